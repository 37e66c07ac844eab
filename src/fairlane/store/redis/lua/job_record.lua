-- Live jobs: one record each (see packed_job_record.lua), and the sorted sets they are found by. Which sets a job is in follows from its
-- record alone (`indexed_by`), so `job_record.save` has only to compare: no step can forget one.
--
-- An entry has: seq, id, task, queue (number), class, kind (nil: job), lane_key, cost (nil: 1), pool (nil: default), sticky,
-- direct, retries (nil: 3), backoff, uniq, parent; state (1 scheduled, 2 pending, 3 running), gate (nil: none, 1 unbound,
-- 2 clean-up, 4 parent of a broadcast), flow (true while claimable or running), inbox (nil: for everybody), lane (true: it
-- has arrived in a limited lane), rank, granted, granted_at, arrival, due, expires_at, session, claim, waiter, binding, fence,
-- attempt, crashes, suspect, returns (how often it was handed back in a row after it had begun), cancel, refused, paid,
-- started_at, to_start_by (what expires_at was before it started), declined (since when sessions decline it, see
-- endings.lua), offer (when everybody is offered it again). What is nil or false is nought.

job_record.RANK = 2 ^ 50 -- how far classes are apart in an unordered lane
local MOST_RUNNING = 2 ^ 20 -- of a lane
job_record.REMEMBERED = '~'
job_record.IN_LANES = 'lanes' -- the sum of all lanes of a queue, in its tally

-- How a job of a class stands in a limited lane: by arrival alone if that is ordered, else by class first.
function job_record.rank(ordered, class)
    return not ordered and class > 0 and class or nil
end

-- Where it stands among those that wait for a place.
function job_record.turn(rank, arrival)
    return (rank or 0) * job_record.RANK + arrival
end

function job_record.flow(e)
    return keys.flow(keys.domain(e.queue, e.class, e.inbox or ''), e.lane_key or '')
end

-- The sets a job is in, with its score in each; true where those are sets of numbers.
local function indexed_by(e)
    local p, found = S.p, {}
    if e.state == STATE.SCHEDULED then
        found[p .. 'later'] = e.seq
    else
        found[S.alive] = true
    end
    if e.flow and not e.session then
        found[p .. 'ready:' .. job_record.flow(e)] = e.arrival
    end
    if e.session then
        -- By class, so that their number tells the slots in use; turns take none.
        found[keys.held(e.session, e.waiter and 't' or e.class)] = true
    end
    if e.due then
        found[p .. (e.gate == GATE.PARENT and 'joining' or 'due:' .. e.class)] = e.due
    end
    if e.gate == GATE.PARENT then
        found[p .. 'parents'] = e.seq
    end
    if e.gate == GATE.UNBOUND then
        found[p .. 'unbound:' .. (e.pool or 'default')] = e.arrival
    end
    if (e.gate == GATE.UNBOUND or e.gate == GATE.CLEANUP) and not e.lane and e.arrival then
        found[p .. 'gated:' .. keys.lane(e.queue, e.lane_key or '') .. '|' .. e.class] = e.arrival
    end
    if e.expires_at and e.state ~= STATE.RUNNING then
        found[p .. 'expiry'] = e.expires_at
    end
    if e.lane and not e.session and (e.inbox or not e.flow) then
        -- Those that anybody may claim are found by their flow.
        local set = e.granted and 'hold:' or 'wait:'
        found[p .. set .. keys.lane(e.queue, e.lane_key)] = job_record.turn(e.rank, e.arrival)
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
function job_record.read(raw, seq)
    local e = packed_job_record.read(raw)
    e.seq = tonumber(seq)
    return e
end

-- The same by its number, for who only looks; nil when it is over, or its record cannot be read.
function job_record.look(seq)
    local raw = write_buffer.hget(S.live, type(seq) == 'string' and seq or write_buffer.text(seq))
    return raw and damage.entry(raw, seq) or nil
end

function job_record.get(seq)
    local e = job_record.look(seq)
    if e then
        S.indexed[e.seq] = indexed_by(e)
    end
    return e
end

function job_record.all(seqs)
    local found = {}
    for _, seq in ipairs(seqs) do
        local e = job_record.get(seq)
        if e then
            found[#found + 1] = e
        end
    end
    return found
end

-- The number of the job that has an id, as it is stored; nil when there is none. An id that is only remembered begins otherwise.
function job_record.number(id)
    local seq = write_buffer.hget(S.p .. 'id', id)
    return seq and sub(seq, 1, 1) ~= job_record.REMEMBERED and seq or nil
end

function job_record.by_id(id)
    local seq = job_record.number(id)
    return seq and job_record.get(seq) or nil
end

-- The score of a lane in the backlog: how many of its jobs wait, and, among lanes that have equally many, how many run. It is
-- negative, so that the longest comes first, and those that are equal stand by their names.
function job_record.backlog(waiting, running)
    return -waiting * MOST_RUNNING - running
end

function job_record.in_backlog(score)
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
    of_queue[key] = (of_queue[key] or 0) + job_record.backlog(waiting, running)
end

-- Write how many jobs wait and how many run in each lane that has any, for whoever looks and for limits of what may wait. Empty
-- lanes leave nothing.
function job_record.flush_lanes()
    for queue, noted in pairs(S.noted) do
        local backlog, lanes, changed, empty, sum = S.p .. 'backlog:' .. queue, {}, {}, {}, 0
        for key, by in pairs(noted) do
            if by ~= 0 then
                lanes[#lanes + 1] = key
                sum = sum + by
            end
        end
        if sum ~= 0 then
            call('HINCRBY', keys.tally(queue), job_record.IN_LANES, sum)
        end
        for i, was in ipairs(write_buffer.zmscore(backlog, lanes)) do
            local lane = lanes[i]
            local is = (was and tonumber(was) or 0) + noted[lane]
            if is < 0 then
                changed[#changed + 1], changed[#changed + 2] = is, lane
            else
                empty[#empty + 1] = lane
            end
        end
        write_buffer.zadd_all(backlog, changed)
        write_buffer.zrem_all(backlog, empty)
    end
    S.noted = {}
end

-- Put a job into one of the sets of `indexed_by`.
function job_record.put_in(set, score, member)
    if set == S.alive then
        id_sets.add(set, member)
    elseif score == true then
        write_buffer.sadd(set, member)
    else
        write_buffer.zadd(set, score, member)
    end
end

function job_record.take_from(set, score, member)
    if set == S.alive then
        id_sets.drop(set, member)
    elseif score == true then
        write_buffer.srem(set, member)
    else
        write_buffer.zrem(set, member)
    end
end

local function move_between(seq, was, is)
    local member = write_buffer.text(seq)
    for set, score in pairs(is) do
        if was[set] ~= score then
            job_record.put_in(set, score, member)
        end
    end
    for set, score in pairs(was) do
        if not is[set] then
            job_record.take_from(set, score, member)
        end
    end
end

-- How a job counts in its lane, by what was stored and by what is to be.
local function note_change(old, new)
    local function is(e, state)
        return e and e.state == state and 1 or 0
    end
    local e = new or old
    note_lane(e.queue, e.lane_key, is(new, STATE.PENDING) - is(old, STATE.PENDING), is(new, STATE.RUNNING) - is(old, STATE.RUNNING))
end

local function put(e, member)
    local seq = e.seq
    e.seq = nil
    write_buffer.hset(S.live, member, packed_job_record.of(e) or pack(e))
    e.seq = seq
end

-- The job as it is stored, with what it is found by; nothing when it is new.
local function stored(seq)
    local e = job_record.look(seq)
    return e, S.indexed[seq] or (e and indexed_by(e)) or {}
end

-- What a job is found by whose record is lost, as far as that is known.
function job_record.adopt(e)
    S.indexed[e.seq] = indexed_by(e)
end

-- Write a live job and what it is found by.
function job_record.save(e)
    local old, was = stored(e.seq)
    local is = indexed_by(e)
    move_between(e.seq, was, is)
    if e.lane_key then
        note_change(old, e)
    end
    S.indexed[e.seq] = is
    put(e, write_buffer.text(e.seq))
end

function job_record.delete(e)
    local old, was = stored(e.seq)
    move_between(e.seq, was, {})
    if e.lane_key then
        note_change(old or e, nil)
    end
    S.indexed[e.seq] = nil
    write_buffer.hdel(S.live, write_buffer.text(e.seq))
end

-- What follows is for tickets: where such a job stands is its state, its flow or session, and its lane. What changes is known
-- then without comparing. `member` is its number as it is stored.

-- What was found by comparing before, in the same step, does not hold any more.
function job_record.forget_indexed(member)
    if next(S.indexed) then
        S.indexed[tonumber(member)] = nil
    end
end

-- A new job that needs no more than a ticket is pending. Returns false, and stores nothing, if it needs more.
function job_record.add(e)
    local member, ticket = write_buffer.text(e.seq), packed_job_record.of(e)
    if not ticket then
        return false
    end
    write_buffer.hset(S.live, member, ticket)
    id_sets.add(S.alive, member)
    if e.flow then
        write_buffer.zadd_new(fair_order.flow_of(e).ready, e.arrival, member)
    end
    if e.lane_key then
        note_lane(e.queue, e.lane_key, 1, 0)
        if e.lane and not e.granted then
            write_buffer.zadd(S.p .. 'wait:' .. keys.lane(e.queue, e.lane_key), job_record.turn(e.rank, e.arrival), member)
        end
    end
    return true
end

-- So many jobs that wait have come to this lane.
function job_record.came(queue, lane, count)
    note_lane(queue, lane, count, 0)
end

-- So many jobs of this lane that waited run now.
function job_record.begun(queue, lane, count)
    if lane ~= '' then
        note_lane(queue, lane, -count, count)
    end
end

-- A job of this lane that ran is over.
function job_record.left(queue, lane)
    note_lane(queue, lane, 0, -1)
end

-- Put a job into another live state, tallies included. A running job without a slot is counted as such.
function job_record.move(e, state)
    step.count(e.queue, e.class, COLUMNS[e.state], -1)
    step.count(e.queue, e.class, COLUMNS[state], 1)
    if e.kind == KIND.TURN or e.kind == KIND.BROADCAST then
        local by = (state == STATE.RUNNING and 1 or 0) - (e.state == STATE.RUNNING and 1 or 0)
        if by ~= 0 then
            step.count(e.queue, e.class, SLOTLESS, by)
        end
    end
    e.state = state
end
