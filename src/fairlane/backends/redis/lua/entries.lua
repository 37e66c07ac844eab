-- Live jobs: one record each, and the sorted sets they are found by. Which sets a job is in follows from its record alone
-- (`indexed_by`), so `entries.save` has only to compare: no step can forget one.
--
-- An entry has: seq, id, task, queue (number), class, kind (nil: job), lane_key, cost (nil: 1), pool (nil: default), sticky,
-- direct, retries (nil: 3), backoff, uniq, parent; state (1 scheduled, 2 pending, 3 running), gate (nil: none, 1 unbound,
-- 2 clean-up, 4 parent of a broadcast), flow (true while claimable or running), inbox (nil: for everybody), lane (true: it
-- has arrived in a limited lane), rank, granted, granted_at, arrival, due, expires_at, session, claim, waiter, binding, fence,
-- attempt, crashes, suspect, cancel, refused, paid, started_at. What is nil or false is nought.

local RANK = 2 ^ 50

function entries.flow(e)
    return keys.flow(keys.domain(e.queue, e.class, e.inbox or ''), e.lane_key or '')
end

-- The sorted sets a job is in, with its score in each.
local function indexed_by(e)
    local p, found = S.p, {}
    found[p .. (e.state == SCHEDULED and 'later' or 'alive')] = e.seq
    if e.flow and not e.session then
        found[p .. 'ready:' .. entries.flow(e)] = e.arrival
    end
    if e.session then
        -- By class, so that their number tells the slots in use; turns take none.
        found[keys.held(e.session, e.waiter and 't' or e.class)] = e.seq
    end
    if e.due then
        found[p .. (e.gate == PARENT and 'joining' or 'due:' .. e.class)] = e.due
    end
    if e.gate == PARENT then
        found[p .. 'parents'] = e.seq
    end
    if e.gate == UNBOUND then
        found[p .. 'unbound:' .. (e.pool or 'default')] = e.arrival
    end
    if (e.gate == UNBOUND or e.gate == CLEANUP) and not e.lane and e.arrival then
        found[p .. 'gated:' .. keys.lane(e.queue, e.lane_key or '') .. '|' .. e.class] = e.arrival
    end
    if e.expires_at and e.state ~= RUNNING then
        found[p .. 'expiry'] = e.expires_at
    end
    if e.lane and not e.session then
        local set = e.granted and 'hold:' or 'wait:'
        found[p .. set .. keys.lane(e.queue, e.lane_key)] = (e.rank or 0) * RANK + e.arrival
    end
    if e.lane_key and e.state ~= SCHEDULED then
        found[p .. 'inlane:' .. keys.lane(e.queue, e.lane_key)] = e.seq
    end
    if e.granted_at then
        found[p .. 'holding'] = e.granted_at
    end
    if e.waiter then
        found[p .. 'waits:' .. e.waiter] = e.seq
    end
    if e.binding then
        found[p .. 'tied:' .. e.binding] = e.arrival or 0
    end
    if e.inbox then
        found[p .. 'inboxed:' .. e.inbox] = e.seq
    end
    return found
end

-- A job as it was read, without what it is found by.
function entries.read(raw, seq)
    local e = unpacked(raw)
    e.seq = tonumber(seq)
    return e
end

-- Jobs by their numbers as they were given, read together.
function entries.read_all(seqs)
    local found, asked = {}, {}
    for _, seq in ipairs(seqs) do
        if S.warm[seq] then
            found[seq] = S.warm[seq]
        else
            asked[#asked + 1] = seq
        end
    end
    for i, raw in ipairs(writes.hmget(S.live, asked)) do
        if raw then
            found[asked[i]] = entries.read(raw, asked[i])
        end
    end
    return found
end

function entries.get(seq)
    local raw = writes.hget(S.live, type(seq) == 'string' and seq or writes.text(seq))
    if not raw then
        return nil
    end
    local e = entries.read(raw, seq)
    S.indexed[e.seq] = indexed_by(e)
    return e
end

function entries.all(seqs)
    local found = {}
    for _, seq in ipairs(seqs) do
        local e = entries.get(seq)
        if e then
            found[#found + 1] = e
        end
    end
    return found
end

function entries.by_id(id)
    local seq = writes.hget(S.p .. 'id', id)
    return seq and entries.get(seq) or nil
end

-- A lane has got so many more waiting jobs, or fewer, or a running one has left it.
local function note_lane(e, by)
    local name = keys.lane(e.queue, e.lane_key)
    local noted = S.noted[name]
    if noted then
        noted.by = noted.by + by
    else
        S.noted[name] = { queue = e.queue, key = e.lane_key, by = by }
    end
end

-- Write how many jobs wait in each lane that has any, for whoever looks and for limits of what may wait. Lanes in which jobs
-- only run stand there too, for a change of settings. Empty ones leave nothing.
function entries.flush_lanes()
    local queues = {}
    for name, noted in pairs(S.noted) do
        local of = queues[noted.queue] or { names = {}, keys = {}, by = {} }
        queues[noted.queue] = of
        local i = #of.keys + 1
        of.names[i], of.keys[i], of.by[i] = name, noted.key, noted.by
    end
    for queue, of in pairs(queues) do
        local backlog = S.p .. 'backlog:' .. queue
        for i, was in ipairs(writes.zmscore(backlog, of.keys)) do
            local waiting = (tonumber(was or nil) or 0) + of.by[i]
            if waiting > 0 or call('EXISTS', S.p .. 'inlane:' .. of.names[i]) == 1 then
                writes.zadd(backlog, waiting, of.keys[i])
            else
                writes.zrem(backlog, of.keys[i])
            end
        end
    end
    S.noted = {}
end

local function move_between(seq, was, is)
    local member = writes.text(seq)
    for set, score in pairs(is) do
        if was[set] ~= score then
            writes.zadd(set, score, member)
        end
    end
    for set in pairs(was) do
        if not is[set] then
            writes.zrem(set, member)
        end
    end
end

-- Whether a job counts as one that waits in its lane, by what was stored and by what is to be.
local function waits(e)
    return e and e.state == PENDING and 1 or 0
end

local function put(e)
    local seq, member = e.seq, writes.text(e.seq)
    e.seq = nil
    writes.hset(S.live, member, pack(e))
    e.seq = seq
    S.warm[member] = nil
end

-- The job as it is stored, with what it is found by; nothing when it is new.
local function stored(seq)
    local raw = writes.hget(S.live, writes.text(seq))
    local e = raw and entries.read(raw, seq) or nil
    return e, e and (S.indexed[seq] or indexed_by(e)) or {}
end

-- Write a live job and what it is found by.
function entries.save(e)
    local old, was = stored(e.seq)
    local is = indexed_by(e)
    move_between(e.seq, was, is)
    if e.lane_key then
        note_lane(e, waits(e) - waits(old))
    end
    S.indexed[e.seq] = is
    put(e)
end

function entries.delete(e)
    local old, was = stored(e.seq)
    move_between(e.seq, was, {})
    if e.lane_key then
        note_lane(e, -waits(old))
    end
    S.indexed[e.seq] = nil
    local member = writes.text(e.seq)
    S.warm[member] = nil
    writes.hdel(S.live, member)
end

-- Whether all that a job is found by is its state, its flow or session, and its lane: nearly always so. Then what changes is
-- known without comparing, which costs more than all the rest of a step.
function entries.is_plain(e)
    return not (e.due or e.gate or e.expires_at or e.granted_at or e.waiter or e.binding or e.inbox)
end

-- A plain job is new and pending.
function entries.add(e)
    local p, member = S.p, writes.text(e.seq)
    local flow = e.flow and step.flow_of(e)
    S.indexed[e.seq] = nil
    writes.zadd(S.alive, member, member)
    if flow then
        writes.zadd_new(flow.ready, e.arrival, member)
    end
    if e.lane_key then
        local lane = keys.lane(e.queue, e.lane_key)
        call('ZADD', p .. 'inlane:' .. lane, member, member)
        note_lane(e, 1)
        if e.lane then
            writes.zadd(p .. (e.granted and 'hold:' or 'wait:') .. lane, (e.rank or 0) * RANK + e.arrival, member)
        end
    end
    put(e)
end

-- A plain job has got a place of its lane, and is claimable now.
function entries.admit(e)
    local p, member = S.p, writes.text(e.seq)
    local lane = keys.lane(e.queue, e.lane_key)
    S.indexed[e.seq] = nil
    writes.zrem(p .. 'wait:' .. lane, member)
    writes.zadd_new(p .. 'hold:' .. lane, (e.rank or 0) * RANK + e.arrival, member)
    writes.zadd_new(step.flow_of(e).ready, e.arrival, member)
    put(e)
    S.warm[member] = e -- it may start in the same step
end

-- A plain job that was claimable runs now. `member`: its number as it was read.
function entries.begin(e, flow, member)
    local p = S.p
    S.indexed[e.seq] = nil
    writes.zrem(flow.ready, member)
    writes.zadd(keys.held(e.session, e.class), member, member)
    if e.lane_key then
        local lane = keys.lane(e.queue, e.lane_key)
        note_lane(e, -1)
        if e.lane then
            writes.zrem(p .. 'hold:' .. lane, member)
        end
    end
    put(e)
end

-- A plain job that ran is over.
function entries.over(e, member)
    local p = S.p
    S.indexed[e.seq] = nil
    writes.zrem(S.alive, member)
    writes.zrem(keys.held(e.session, e.class), member)
    if e.lane_key then
        call('ZREM', S.p .. 'inlane:' .. keys.lane(e.queue, e.lane_key), member)
        note_lane(e, 0)
    end
    writes.hdel(S.live, member)
end

-- Put a job into another live state, tallies included. A running job without a slot is counted as such.
function entries.move(e, state)
    step.count(e.queue, e.class, COLUMNS[e.state], -1)
    step.count(e.queue, e.class, COLUMNS[state], 1)
    if e.kind == 'turn' or e.kind == 'broadcast' then
        local by = (state == RUNNING and 1 or 0) - (e.state == RUNNING and 1 or 0)
        if by ~= 0 then
            step.count(e.queue, e.class, SLOTLESS, by)
        end
    end
    e.state = state
end
