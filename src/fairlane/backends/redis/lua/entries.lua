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
    found[p .. 'by:state:' .. e.state] = e.seq
    if e.flow and not e.session then
        found[p .. 'ready:' .. entries.flow(e)] = e.arrival
    end
    if e.session then
        found[p .. 'held_seq:' .. e.session] = e.seq
        -- By class, so that their number tells the slots in use; turns take none.
        found[p .. 'held:' .. e.session .. ':' .. (e.waiter and 't' or e.class)] = e.arrival or 0
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
        found[p .. (e.state == PENDING and 'lanewait:' or 'lanerun:') .. keys.lane(e.queue, e.lane_key)] = e.arrival
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

function entries.get(seq)
    local raw = call('HGET', S.p .. 'live', seq)
    if not raw then
        return nil
    end
    local e = unpacked(raw)
    e.seq = tonumber(seq)
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
    local seq = call('HGET', S.p .. 'id', id)
    return seq and entries.get(seq) or nil
end

-- What is told of lanes that have jobs: how many wait in each, for whoever looks and for limits of what may wait; and which
-- lanes there are, for a change of settings. Empty ones leave nothing.
local function note_lane(e, was, is)
    local lane = keys.lane(e.queue, e.lane_key)
    local wait, run = S.p .. 'lanewait:' .. lane, S.p .. 'lanerun:' .. lane
    if (was[wait] == nil) ~= (is[wait] == nil) then
        local backlog = S.p .. 'backlog:' .. e.queue
        if tonumber(call('ZINCRBY', backlog, is[wait] and 1 or -1, e.lane_key)) <= 0 then
            call('ZREM', backlog, e.lane_key)
        end
    end
    local had, has = was[wait] or was[run], is[wait] or is[run]
    if has and not had then
        call('SADD', S.p .. 'laned:' .. e.queue, e.lane_key)
    elseif had and not has and call('EXISTS', wait, run) == 0 then
        call('SREM', S.p .. 'laned:' .. e.queue, e.lane_key)
    end
end

local function move_between(seq, was, is)
    for set, score in pairs(is) do
        if was[set] ~= score then
            call('ZADD', set, score, seq)
        end
    end
    for set in pairs(was) do
        if not is[set] then
            call('ZREM', set, seq)
        end
    end
end

-- Write a live job and what it is found by.
function entries.save(e)
    local seq = e.seq
    local was, is = S.indexed[seq] or {}, indexed_by(e)
    move_between(seq, was, is)
    if e.lane_key then
        note_lane(e, was, is)
    end
    S.indexed[seq] = is
    e.seq = nil
    call('HSET', S.p .. 'live', seq, pack(e))
    e.seq = seq
end

function entries.delete(e)
    local was = S.indexed[e.seq] or {}
    move_between(e.seq, was, {})
    if e.lane_key then
        note_lane(e, was, {})
    end
    S.indexed[e.seq] = nil
    call('HDEL', S.p .. 'live', e.seq)
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
