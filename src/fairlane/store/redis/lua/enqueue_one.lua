-- One plain job, due now, for any worker and without a unique key: the most frequent call, and one that a caller waits
-- for. It has the same result as `enqueue_batch.store`, without the write buffer, comparisons and lookups that took
-- half of the server's time for such a call (measured). Anything unusual takes the general way.

local ANSWER = '>dHc0I4c0I4c0' -- number of the claim, topic, content, headers; then the packed record. See `push.py`
local WAITS, RUNS = job_record.backlog(1, 0), job_record.backlog(0, 1)

-- What every plain job of a queue and class needs, cached with the settings of the queue. Not by `shared`: the names of
-- a step may belong to another namespace.
local function line_of(queue, class)
    local found = queue.single[class]
    if not found then
        local domain, number = keys.domain(queue.number, class, ''), queue.number
        local function before(granted, limited, rank)
            return packed_job_record.before({ class = class }, number, granted, limited, rank)
        end
        local rank = job_record.rank(false, class)
        found = {
            class = class,
            domain = domain,
            flows = keys.flow(domain, ''),
            ready = S.p .. 'ready:',
            line = S.p .. 'line:' .. domain,
            tally = keys.tally(number),
            waiting = class .. 'p',
            running = class .. 'r',
            before = before(true),
            -- For limited lanes, ordered and unordered: jobs with a place, and jobs that wait for one.
            ordered = { granted = before(true, true), waits = before(false, true) },
            unordered = { granted = before(true, true, rank), waits = before(false, true, rank) },
            topic = 'queue:' .. queue.name,
            tasks = {},
            backlog = S.p .. 'backlog:' .. number,
            by_lane = S.p .. 'by:lane:' .. keys.lane(number, ''),
            lanes = S.p .. 'lanes:' .. number,
        }
        queue.single[class] = found
    end
    return found
end

-- The place of a job in its limited lane; `is_free` is whether it gets one now. Nil if a job of a lower class may hold
-- one without having started.
local function place_of(queue, at, names, lane, terms)
    local name = keys.lane(queue.number, lane)
    local raw = redis.call('HGET', names.lane, name)
    local place = { name = name, places = terms.limit, ordered = terms.ordered, granted = 0, is_new = not raw }
    if raw then
        place.places, place.ordered, place.granted = lane_limits.read_lane(raw)
    end
    place.is_free = place.granted < place.places
    if not (place.is_free or place.ordered) and at.class < CLASS.LOW and place.granted > 0 then
        if redis.call('EXISTS', unpack(lane_limits.weaker(queue.number, lane, at.class))) > 0 then
            return nil
        end
    end
    local kinds = place.ordered and at.ordered or at.unordered
    place.before = place.is_free and kinds.granted or kinds.waits
    return place
end

local function save_place(at, names, lane, place)
    if place.is_free then
        place.granted = place.granted + 1
    end
    if place.is_free or place.is_new then
        redis.call('HSET', names.lane, place.name, lane_limits.lane_bytes(place))
    end
    if place.is_new then
        redis.call('SADD', at.lanes, lane)
    end
end

-- The job waits for a place of its lane.
local function wait_for_place(at, place, member, arrival)
    local turn = job_record.turn(job_record.rank(place.ordered, at.class), arrival)
    redis.call('ZADD', S.p .. 'wait:' .. place.name, turn, member)
    redis.call('HINCRBY', at.tally, at.waiting, 1)
end

-- The job waits to be claimed. If it is the first of its flow, put the flow in line and notify workers.
local function wait(at, names, lane, flow, member, arrival, clock, finish, tag)
    redis.call('ZADD', at.ready .. flow, arrival, member)
    redis.call('HINCRBY', at.tally, at.waiting, 1)
    if tag < 0 then
        tag = math.max(clock, finish)
        redis.call('HSET', names.flow, flow, fair_order.flow_bytes(finish, tag, arrival, member))
        redis.call('ZADD', at.line, tag, fair_order.line_member(arrival, lane))
        redis.call('PUBLISH', names.topics, at.topic)
        idle_workers.wake(at.topic)
    end
end

-- Start the job at a waiting worker: do what a claim would do, and push its answer. `tag`: that of its flow; `topics`:
-- notified for the job and its lane.
local function start(at, names, taker, job, flow, tag, topics)
    local started = packed_job_record.started(job.packed, packed_job_record.claim(taker.id, taker.number), PRICE)
    redis.call('HSET', names.live, job.member, started)
    redis.call('SADD', taker.held .. at.class, job.member)
    redis.call('HINCRBY', at.tally, at.running, 1)
    redis.call('HSET', names.flow, at.domain, tag, flow, fair_order.flow_bytes(tag + PRICE))
    redis.call('HSET', names.session, taker.id, taker.next_record)
    local content, headers = S.stamp .. job.content, job.headers
    local answer = bytes(ANSWER, taker.number, #at.topic, at.topic, #content, content, #headers, headers)
    redis.call('LPUSH', taker.sent, answer .. started)
    if redis.call('PUBSUB', 'NUMSUB', names.jobs)[2] > 0 then
        redis.call('PUBLISH', names.jobs, topics)
    end
end

-- The index of jobs by task; nil for a new task.
local function task_key(queue, at, task)
    local found = at.tasks[task]
    if not found and S.cached.tasks[queue.number .. ':' .. task] then
        found = keys.task(queue.number .. ':' .. task)
        at.tasks[task] = found
    end
    return found
end

-- Store the job; `lane` is '' for none, `after` is the end of its packed record. Returns false, without changes, if
-- anything about it is unusual.
function enqueue_one.enqueue(id, name, class, task, lane, after, content, headers)
    local queue = queue_cache.remembered(name)
    if not queue or queue.bounded then
        return false
    end
    local at, names, terms = line_of(queue, class), S.cached.keys, queue_cache.terms(queue, lane)
    local of_task, flow = task_key(queue, at, task), at.flows .. lane
    local stored = of_task and redis.call('HMGET', names.flow, at.domain, flow)
    if not stored or not stored[1] then
        return false
    end
    local place = terms.limit and place_of(queue, at, names, lane, terms)
    if terms.limit and not place then
        return false
    end
    local seq, arrival = step.new_seq(), step.next_arrival()
    local member, clock, finish, tag = write_buffer.text(seq), tonumber(stored[1]), 0, -1
    if stored[2] then
        finish, tag = parts('>dd', stored[2])
    end
    if redis.call('HSETNX', names.id, id, member) == 0 then
        return false
    end
    redis.call('HSET', names.job, member, S.stamp .. content)
    local block, last = id_sets.block(seq), queue_cache.blocks()
    redis.call('SADD', names.alive .. block, member)
    redis.call('SADD', of_task .. block, member)
    id_sets.note(last, names.alive, block)
    id_sets.note(last, of_task, block)
    if headers ~= '' then
        redis.call('HSET', names.headers, member, headers)
    end
    local packed = packed_job_record.new(place and place.before or at.before, arrival, id, after)
    local may_start = tag < 0 and not queue.paused and not queue.slots and terms.weight == 1
    local has_place = not place or place.is_free
    local taker = may_start and has_place and idle_workers.taker(at.topic, class)
    if taker then
        local job = { member = member, packed = packed, content = content, headers = headers }
        local topics = 'job:' .. id .. (place and '\nplace:' .. name .. '/' .. lane or '')
        start(at, names, taker, job, flow, math.max(clock, finish), topics)
    else
        redis.call('HSET', names.live, member, packed)
        if has_place then
            wait(at, names, lane, flow, member, arrival, clock, finish, tag)
        else
            wait_for_place(at, place, member, arrival)
        end
    end
    if lane ~= '' then
        redis.call('ZADD', at.by_lane .. lane, member, member)
        redis.call('ZINCRBY', at.backlog, taker and RUNS or WAITS, lane)
        redis.call('HINCRBY', at.tally, job_record.IN_LANES, taker and RUNS or WAITS)
    end
    if place then
        save_place(at, names, lane, place)
    end
    step.save_counters()
    return true
end
