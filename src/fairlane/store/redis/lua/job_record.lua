-- Live jobs: one record each (see packed_job_record.lua), and the sorted sets that index them. Which sets a job is in
-- follows from its record alone (`indexed_by`), so `job_record.save` only compares, and no step can forget an index.
--
-- A record has: seq, id, task, queue (number), class, kind (nil: job), lane_key, cost (nil: 1), pool (nil: default),
-- sticky, direct, retries (nil: 3), backoff, uniq, parent; state, gate (nil: none), flow (true while claimable or
-- running), inbox (nil: any worker), lane (true: it has arrived in a limited lane), rank, granted, granted_at, arrival,
-- due, expires_at, session, claim, waiter, binding, fence, attempt, crashes, suspect, returns (consecutive hand-backs
-- after it had begun), cancel, refused, paid, started_at, to_start_by (expires_at before it started), declined (since
-- when sessions decline it, see endings.lua), offer (when it is offered to all workers again). Absent fields are nil or
-- false.

job_record.RANK = 2 ^ 50 -- the distance between classes in an unordered lane
local MOST_RUNNING = 2 ^ 20 -- in one lane
job_record.REMEMBERED = '~'
job_record.IN_LANES = 'lanes' -- the counter of all lanes of a queue

-- The rank of a class in a limited lane: none if the lane is ordered, so that arrival alone counts.
function job_record.rank(ordered, class)
    return not ordered and class > 0 and class or nil
end

-- The score of a job among those that wait for a place.
function job_record.turn(rank, arrival)
    return (rank or 0) * job_record.RANK + arrival
end

function job_record.flow(e)
    return keys.flow(keys.domain(e.queue, e.class, e.inbox or ''), e.lane_key or '')
end

-- The sets a job is in, with its score in each; true for id sets.
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
        -- By class, so that their sizes are the slots in use; turns use none.
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
        -- Jobs that any worker may claim are found through their flow.
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

-- A job from its record, without its indexes.
function job_record.read(raw, seq)
    local e = packed_job_record.read(raw)
    e.seq = tonumber(seq)
    return e
end

-- A job by its number, for reading only; nil when it is final or its record cannot be read.
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

-- The stored number of the job with this id; nil when there is none. The entry of a forgotten job begins with another
-- byte.
function job_record.number(id)
    local seq = write_buffer.hget(S.p .. 'id', id)
    return seq and sub(seq, 1, 1) ~= job_record.REMEMBERED and seq or nil
end

function job_record.by_id(id)
    local seq = job_record.number(id)
    return seq and job_record.get(seq) or nil
end

-- The score of a lane in the backlog: how many of its jobs wait and, for equal numbers, how many run. Negative, so that
-- the longest comes first; equal ones are ordered by name.
function job_record.backlog(waiting, running)
    return -waiting * MOST_RUNNING - running
end

function job_record.in_backlog(score)
    local both = -tonumber(score or 0)
    local waiting = math.floor(both / MOST_RUNNING)
    return waiting, both - waiting * MOST_RUNNING
end

-- Add to the counts of waiting and running jobs of a lane.
local function note_lane(queue, key, waiting, running)
    local of_queue = S.noted[queue]
    if not of_queue then
        of_queue = {}
        S.noted[queue] = of_queue
    end
    of_queue[key] = (of_queue[key] or 0) + job_record.backlog(waiting, running)
end

-- Write the counts of waiting and running jobs by lane, for readers and for `max_pending`. Empty lanes leave nothing.
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

-- Add a job to one of the sets of `indexed_by`.
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

-- Update the counts of a lane from the old and the new record of a job.
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

-- The stored job with its indexes; nothing when it is new.
local function stored(seq)
    local e = job_record.look(seq)
    return e, S.indexed[seq] or (e and indexed_by(e)) or {}
end

-- The indexes of a job whose record is lost, as far as they are known.
function job_record.adopt(e)
    S.indexed[e.seq] = indexed_by(e)
end

-- Write a live job and its indexes.
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

-- For packed records: the indexes of such a job are its state, its flow or session, and its lane, so changes are known
-- without comparing. `member` is its stored number.

-- Drop what an earlier comparison in this step has cached.
function job_record.forget_indexed(member)
    if next(S.indexed) then
        S.indexed[tonumber(member)] = nil
    end
end

-- Add a pending job with a packed record. Returns false, without changes, if it needs a map.
function job_record.add(e)
    local member, packed = write_buffer.text(e.seq), packed_job_record.of(e)
    if not packed then
        return false
    end
    write_buffer.hset(S.live, member, packed)
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

-- Count new waiting jobs of a lane.
function job_record.came(queue, lane, count)
    note_lane(queue, lane, count, 0)
end

-- Count waiting jobs of a lane that have started.
function job_record.begun(queue, lane, count)
    if lane ~= '' then
        note_lane(queue, lane, -count, count)
    end
end

-- Count a running job of a lane that has ended.
function job_record.left(queue, lane)
    note_lane(queue, lane, 0, -1)
end

-- Change the state of a live job, with the counters. A running job without a slot is counted as such.
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
