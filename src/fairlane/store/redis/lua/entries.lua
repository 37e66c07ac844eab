-- Live jobs: one record each (see tickets.lua), and the sorted sets they are found by. Which sets a job is in follows from its
-- record alone (`indexed_by`), so `entries.save` has only to compare: no step can forget one.
--
-- An entry has: seq, id, task, queue (number), class, kind (nil: job), lane_key, cost (nil: 1), pool (nil: default), sticky,
-- direct, retries (nil: 3), backoff, uniq, parent; state (1 scheduled, 2 pending, 3 running), gate (nil: none, 1 unbound,
-- 2 clean-up, 4 parent of a broadcast), flow (true while claimable or running), inbox (nil: for everybody), lane (true: it
-- has arrived in a limited lane), rank, granted, granted_at, arrival, due, expires_at, session, claim, waiter, binding, fence,
-- attempt, crashes, suspect, returns (how often it was handed back in a row after it had begun), cancel, refused, paid,
-- started_at, to_start_by (what expires_at was before it started), declined (since when sessions decline it, see
-- outcomes.lua), offer (when everybody is offered it again). What is nil or false is nought.

entries.RANK = 2 ^ 50 -- how far classes are apart in an unordered lane
local MOST_RUNNING = 2 ^ 20 -- of a lane
entries.REMEMBERED = '~'
entries.IN_LANES = 'lanes' -- the sum of all lanes of a queue, in its tally

-- How a job of a class stands in a limited lane: by arrival alone if that is ordered, else by class first.
function entries.rank(ordered, class)
    return not ordered and class > 0 and class or nil
end

-- Where it stands among those that wait for a place.
function entries.turn(rank, arrival)
    return (rank or 0) * entries.RANK + arrival
end

function entries.flow(e)
    return keys.flow(keys.domain(e.queue, e.class, e.inbox or ''), e.lane_key or '')
end

-- The sets a job is in, with its score in each; true where those are sets of numbers.
local function indexed_by(e)
    local p, found = S.p, {}
    if e.state == SCHEDULED then
        found[p .. 'later'] = e.seq
    else
        found[S.alive] = true
    end
    if e.flow and not e.session then
        found[p .. 'ready:' .. entries.flow(e)] = e.arrival
    end
    if e.session then
        -- By class, so that their number tells the slots in use; turns take none.
        found[keys.held(e.session, e.waiter and 't' or e.class)] = true
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
    if e.lane and not e.session and (e.inbox or not e.flow) then
        -- Those that anybody may claim are found by their flow.
        local set = e.granted and 'hold:' or 'wait:'
        found[p .. set .. keys.lane(e.queue, e.lane_key)] = entries.turn(e.rank, e.arrival)
    end
    if e.declined and not e.session then
        found[p .. 'declined'] = e.declined
        if e.offer then
            found[p .. 'overdue'] = e.offer
        end
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
    local e = tickets.read(raw)
    e.seq = tonumber(seq)
    return e
end

-- The same by its number, for who only looks; nil when it is over, or its record cannot be read.
function entries.look(seq)
    local raw = writes.hget(S.live, type(seq) == 'string' and seq or writes.text(seq))
    return raw and damage.entry(raw, seq) or nil
end

function entries.get(seq)
    local e = entries.look(seq)
    if e then
        S.indexed[e.seq] = indexed_by(e)
    end
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

-- The number of the job that has an id, as it is stored; nil when there is none. An id that is only remembered begins otherwise.
function entries.number(id)
    local seq = writes.hget(S.p .. 'id', id)
    return seq and sub(seq, 1, 1) ~= entries.REMEMBERED and seq or nil
end

function entries.by_id(id)
    local seq = entries.number(id)
    return seq and entries.get(seq) or nil
end

-- The score of a lane in the backlog: how many of its jobs wait, and, among lanes that have equally many, how many run. It is
-- negative, so that the longest comes first, and those that are equal stand by their names.
function entries.backlog(waiting, running)
    return -waiting * MOST_RUNNING - running
end

function entries.in_backlog(score)
    local both = -tonumber(score or 0)
    local waiting = math.floor(both / MOST_RUNNING)
    return waiting, both - waiting * MOST_RUNNING
end

-- A lane has got so many more jobs that wait, and that run.
local function note_lane(queue, key, waiting, running)
    local of_queue = S.noted[queue]
    if not of_queue then
        of_queue = {}
        S.noted[queue] = of_queue
    end
    of_queue[key] = (of_queue[key] or 0) + entries.backlog(waiting, running)
end

-- Write how many jobs wait and how many run in each lane that has any, for whoever looks and for limits of what may wait. Empty
-- lanes leave nothing.
function entries.flush_lanes()
    for queue, noted in pairs(S.noted) do
        local backlog, lanes, changed, empty, sum = S.p .. 'backlog:' .. queue, {}, {}, {}, 0
        for key, by in pairs(noted) do
            if by ~= 0 then
                lanes[#lanes + 1] = key
                sum = sum + by
            end
        end
        if sum ~= 0 then
            call('HINCRBY', keys.tally(queue), entries.IN_LANES, sum)
        end
        for i, was in ipairs(writes.zmscore(backlog, lanes)) do
            local lane = lanes[i]
            local is = (was and tonumber(was) or 0) + noted[lane]
            if is < 0 then
                changed[#changed + 1], changed[#changed + 2] = is, lane
            else
                empty[#empty + 1] = lane
            end
        end
        writes.zadd_all(backlog, changed)
        writes.zrem_all(backlog, empty)
    end
    S.noted = {}
end

-- Put a job into one of the sets of `indexed_by`.
function entries.put_in(set, score, member)
    if set == S.alive then
        numbers.add(set, member)
    elseif score == true then
        writes.sadd(set, member)
    else
        writes.zadd(set, score, member)
    end
end

function entries.take_from(set, score, member)
    if set == S.alive then
        numbers.drop(set, member)
    elseif score == true then
        writes.srem(set, member)
    else
        writes.zrem(set, member)
    end
end

local function move_between(seq, was, is)
    local member = writes.text(seq)
    for set, score in pairs(is) do
        if was[set] ~= score then
            entries.put_in(set, score, member)
        end
    end
    for set, score in pairs(was) do
        if not is[set] then
            entries.take_from(set, score, member)
        end
    end
end

-- How a job counts in its lane, by what was stored and by what is to be.
local function note_change(old, new)
    local function is(e, state)
        return e and e.state == state and 1 or 0
    end
    local e = new or old
    note_lane(e.queue, e.lane_key, is(new, PENDING) - is(old, PENDING), is(new, RUNNING) - is(old, RUNNING))
end

local function put(e, member)
    local seq = e.seq
    e.seq = nil
    writes.hset(S.live, member, tickets.of(e) or pack(e))
    e.seq = seq
end

-- The job as it is stored, with what it is found by; nothing when it is new.
local function stored(seq)
    local e = entries.look(seq)
    return e, S.indexed[seq] or (e and indexed_by(e)) or {}
end

-- What a job is found by whose record is lost, as far as that is known.
function entries.adopt(e)
    S.indexed[e.seq] = indexed_by(e)
end

-- Write a live job and what it is found by.
function entries.save(e)
    local old, was = stored(e.seq)
    local is = indexed_by(e)
    move_between(e.seq, was, is)
    if e.lane_key then
        note_change(old, e)
    end
    S.indexed[e.seq] = is
    put(e, writes.text(e.seq))
end

function entries.delete(e)
    local old, was = stored(e.seq)
    move_between(e.seq, was, {})
    if e.lane_key then
        note_change(old or e, nil)
    end
    S.indexed[e.seq] = nil
    writes.hdel(S.live, writes.text(e.seq))
end

-- What follows is for tickets: where such a job stands is its state, its flow or session, and its lane. What changes is known
-- then without comparing. `member` is its number as it is stored.

-- What was found by comparing before, in the same step, does not hold any more.
function entries.forget_indexed(member)
    if next(S.indexed) then
        S.indexed[tonumber(member)] = nil
    end
end

-- A new job that needs no more than a ticket is pending. Returns false, and stores nothing, if it needs more.
function entries.add(e)
    local member, ticket = writes.text(e.seq), tickets.of(e)
    if not ticket then
        return false
    end
    writes.hset(S.live, member, ticket)
    numbers.add(S.alive, member)
    if e.flow then
        writes.zadd_new(step.flow_of(e).ready, e.arrival, member)
    end
    if e.lane_key then
        note_lane(e.queue, e.lane_key, 1, 0)
        if e.lane and not e.granted then
            writes.zadd(S.p .. 'wait:' .. keys.lane(e.queue, e.lane_key), entries.turn(e.rank, e.arrival), member)
        end
    end
    return true
end

-- So many jobs that wait have come to this lane.
function entries.came(queue, lane, count)
    note_lane(queue, lane, count, 0)
end

-- So many jobs of this lane that waited run now.
function entries.begun(queue, lane, count)
    if lane ~= '' then
        note_lane(queue, lane, -count, count)
    end
end

-- A job of this lane that ran is over.
function entries.left(queue, lane)
    note_lane(queue, lane, 0, -1)
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
