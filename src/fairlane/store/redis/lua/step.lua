-- One atomic step: its time, and the records it has touched. Redis runs one step at a time, so there is one `S`.
--
-- Nothing is rolled back: a verb refuses (`step.refuse`) before it writes anything. Flows, lanes and counters are
-- changed many times by one batch; they are kept in memory and written once, by `step.flush`.

-- The counters that every step reads. `generation` distinguishes the data from those of an emptied or replaced server;
-- `steps` counts the steps that wrote, which shows when a server returned to an earlier state.
local function read_counters()
    local found = redis.call('HMGET', S.p .. 'counter', 'generation', 'settings', 'steps', 'seq', 'arrival')
    S.generation, S.settings = found[1] or '', found[2] or '0'
    S.steps, S.seq, S.arrival = tonumber(found[3] or 0), tonumber(found[4] or 0), tonumber(found[5] or 0)
end

-- Start a new generation. A client that has seen another one learns that data were lost.
function step.begin_generation()
    local time = redis.call('TIME')
    S.generation = time[1] .. '.' .. time[2]
    redis.call('HSET', S.p .. 'counter', 'generation', S.generation)
end

function step.save_counters()
    if S.generation == '' then
        step.begin_generation()
    end
    redis.call('HSET', S.p .. 'counter', 'steps', S.steps + 1, 'seq', S.seq, 'arrival', S.arrival)
    queue_cache.wrote()
end

-- Prefix, time and counters: enough for a step without a write buffer. ARGV: the time and the time for leases, both
-- empty outside of tests.
function step.begin_alone(names, args)
    if not call then
        call, pack, unpacked = write_buffer.call, cmsgpack.pack, cmsgpack.unpack
        bytes, parts, sub, byte = struct.pack, struct.unpack, string.sub, string.byte
    end
    S.p, S.fresh = names[1], false
    if args[1] == '' then
        local time = redis.call('TIME')
        S.now = time[1] + time[2] / 1000000
        S.mono = S.now
    else
        S.now, S.mono = tonumber(args[1]), tonumber(args[2])
    end
    S.stamp = bytes('>d', S.now) -- goes before the content of new jobs
    read_counters()
end

local function begin(names, args)
    S.writes, S.noted, S.names, S.roomy = {}, {}, {}, {}
    S.topics, S.changes, S.notified = {}, {}, {}
    S.tally, S.domains, S.flows, S.lanes, S.deferred_lanes = {}, {}, {}, {}, nil
    S.indexed, S.damaged = {}, {}
    S.flow, S.domain, S.dirty, S.direct, S.has_listeners, S.thinned, S.has_headers = nil, nil, false, false, nil, nil, nil
    step.begin_alone(names, args)
    S.live, S.alive = S.p .. 'live', S.p .. 'alive/'
end

-- Refuse a call that has written nothing yet. The client raises the error.
function step.refuse(code, message, detail)
    error({ refused = { code = code, message = message, detail = detail } })
end

-- Run a verb, and answer with its result or with its refusal.
function step.run(verb, names, args)
    begin(names, args)
    local done, answer = pcall(verb, args)
    if done then
        step.flush()
        return answer
    end
    if type(answer) == 'table' and answer.refused then
        return step.signed(answer)
    end
    error(answer, 0)
end

-- An answer with the signature of its data; see `data_loss.py`.
function step.signed(answer)
    answer.generation, answer.steps = S.generation, S.steps
    return pack(answer)
end

-- The first letters of topics about jobs: `job:` and `place:`.
local ABOUT_JOBS = { j = true, p = true }
local MOST_TOPICS = 1000
local EVERYTHING = '*'

-- Publish a topic at the end of the step.
function step.notify(topic)
    if not S.notified[topic] then
        S.notified[topic] = true
        local is_about_job = ABOUT_JOBS[string.sub(topic, 1, 1)]
        local topics = is_about_job and S.changes or S.topics
        topics[#topics + 1] = topic
        if not is_about_job then
            idle_workers.wake(topic)
        end
    end
end

-- Publish topics on one of the two channels of a namespace. Too many topics are replaced by one that stands for
-- everything.
local function publish(channel, topics)
    if #topics > 0 then
        call('PUBLISH', S.p .. channel, #topics > MOST_TOPICS and EVERYTHING or table.concat(topics, '\n'))
    end
end

-- Whether any client listens for jobs: mostly none does, and publishing each change costs about as much as starting a
-- job.
function step.has_listeners()
    if S.has_listeners == nil then
        S.has_listeners = redis.call('PUBSUB', 'NUMSUB', S.p .. 'jobs')[2] > 0
    end
    return S.has_listeners
end

function step.notify_job(id)
    if step.has_listeners() then
        step.notify('job:' .. id)
    end
end

-- Jobs that wait in this lane have moved up.
function step.notify_lane(queue, lane)
    if step.has_listeners() then
        step.notify('place:' .. queue_cache.number(queue).name .. '/' .. lane)
    end
end

function step.next(counter, by)
    return call('HINCRBY', S.p .. 'counter', counter, by or 1)
end

-- The next job number.
function step.new_seq()
    S.seq = S.seq + 1
    return S.seq
end

-- The next number in the order of arrival.
function step.next_arrival()
    S.arrival = S.arrival + 1
    return S.arrival
end

local function field_of(name)
    return type(name) == 'number' and write_buffer.text(name) or name
end

function step.get(hash, field)
    local raw = write_buffer.hget(S.p .. hash, field_of(field))
    local value = raw and damage.unpacked(raw)
    return type(value) == 'table' and value or nil
end

function step.put(hash, field, value)
    write_buffer.hset(S.p .. hash, field_of(field), pack(value))
end

function step.drop(hash, field)
    write_buffer.hdel(S.p .. hash, field_of(field))
end

-- A random number in [0, 1).
function step.draw()
    return math.random()
end

-- Refuse a leader whose term has ended.
function step.check_term(term)
    if not term or term == '' then
        return
    end
    local leader = settings.leader()
    if not leader or leader.term ~= tonumber(term) or not leader.session or leader.expires <= S.mono then
        step.refuse('term_lost', 'term ' .. term .. ' has ended; stop leading and stand again')
    end
end

-- Count jobs of a queue by class and state.
function step.count(queue, class, column, by)
    local row = S.tally[queue]
    if not row then
        row = {}
        S.tally[queue] = row
    end
    local field = keys.column(class, column)
    row[field] = (row[field] or 0) + (by or 1)
end

function step.flush_tally()
    for queue, row in pairs(S.tally) do
        for field, by in pairs(row) do
            if by ~= 0 then
                call('HINCRBY', keys.tally(queue), field, by)
            end
        end
    end
    S.tally = {}
end

function step.tallied(queue, class, column)
    return tonumber(call('HGET', keys.tally(queue), class .. column) or 0)
end

-- As many members of a sorted set as a call looks at, up to a score and behind the first `skipped`. If there are more: one
-- page of them, at every time another one, so that none is left out for ever because nothing can be done about others.
function step.page(set, score, skipped)
    local first = skipped or 0
    local pages = math.ceil((call('ZCOUNT', set, '-inf', score) - first) / MOST_LOOKED_AT)
    -- Multiples of the golden ratio spread evenly, whatever the interval between the passes.
    local page = pages > 1 and math.floor(S.now * GOLDEN_RATIO % 1 * pages) or 0
    return call('ZRANGEBYSCORE', set, '-inf', score, 'LIMIT', first + page * MOST_LOOKED_AT, MOST_LOOKED_AT)
end

-- Write everything that was kept, and publish the topics.
function step.flush()
    step.flush_tally()
    fair_order.save_flows()
    for _, lane in pairs(S.lanes) do
        if lane then
            if lane.granted ~= lane.stored then
                lane_limits.save_lane(lane)
                lane_limits.save_room(lane)
            end
        end
    end
    S.lanes, S.flows, S.domains, S.flow, S.domain = {}, {}, {}, nil, nil
    job_record.flush_lanes()
    id_sets.drop_empty_blocks()
    write_buffer.flush()
    if S.dirty then
        step.save_counters()
    end
    publish('topics', S.topics)
    publish('jobs', S.changes)
    S.topics, S.changes, S.notified = {}, {}, {}
end
