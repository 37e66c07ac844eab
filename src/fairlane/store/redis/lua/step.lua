-- One atomic step: the time, and the records it has touched. Redis runs one at a time and to its end, so there is one.
--
-- Nothing is rolled back here: a verb refuses (`step.refuse`) before it writes anything. Flows, lanes and tallies are
-- touched many times by one batch and looked up only here, so they are kept and written once, by `step.flush`.

-- What every step looks at. `generation` tells the data from those of an emptied or replaced server, `steps` counts what was
-- written, so that a server that has gone back shows.
local function read_counters()
    local found = redis.call('HMGET', S.p .. 'counter', 'generation', 'settings', 'steps', 'seq', 'arrival')
    S.generation, S.settings = found[1] or '', found[2] or '0'
    S.steps, S.seq, S.arrival = tonumber(found[3] or 0), tonumber(found[4] or 0), tonumber(found[5] or 0)
end

-- Whoever has seen another generation knows that data were lost.
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
    catalog.wrote()
end

-- What a step is about, and when it is: enough for one that gathers nothing. ARGV: the time and the time for leases, both
-- empty outside of tests.
function step.begin_alone(names, args)
    if not call then
        call, pack, unpacked = writes.call, cmsgpack.pack, cmsgpack.unpack
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
    S.stamp = bytes('>d', S.now) -- before the content of jobs that come now
    read_counters()
end

local function begin(names, args)
    S.writes, S.noted, S.names, S.roomy = {}, {}, {}, {}
    S.topics, S.changes, S.told = {}, {}, {}
    S.tally, S.domains, S.flows, S.lanes = {}, {}, {}, {}
    S.indexed, S.damaged = {}, {}
    S.flow, S.domain, S.dirty, S.direct, S.heard, S.thinned, S.has_headers = nil, nil, false, false, nil, nil, nil
    step.begin_alone(names, args)
    S.live, S.alive = S.p .. 'live', S.p .. 'alive/'
end

-- Refuse a call, which has written nothing yet: an error of ours for the client to raise.
function step.refuse(code, message, detail)
    error({ refused = { code = code, message = message, detail = detail } })
end

-- Run a verb, and answer with what it returns, or with why it was refused.
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

-- An answer that tells of the data that it comes from; see `losses.py`.
function step.signed(answer)
    answer.generation, answer.steps = S.generation, S.steps
    return pack(answer)
end

-- Topics that begin with these letters are about jobs: a change of one, or of the line that it waits in.
local ABOUT_JOBS = { j = true, p = true }
local MOST_TOPICS = 1000
local EVERYTHING = '*'

-- Tell who listens to a topic, at the end of the step.
function step.tell(topic)
    if not S.told[topic] then
        S.told[topic] = true
        local is_about_job = ABOUT_JOBS[string.sub(topic, 1, 1)]
        local topics = is_about_job and S.changes or S.topics
        topics[#topics + 1] = topic
        if not is_about_job then
            idle.wake(topic)
        end
    end
end

-- Publish topics on one of the two channels of a namespace; when they are too many, whoever hears it looks at everything.
local function publish(channel, topics)
    if #topics > 0 then
        call('PUBLISH', S.p .. channel, #topics > MOST_TOPICS and EVERYTHING or table.concat(topics, '\n'))
    end
end

-- Whether anybody hears of jobs: mostly nobody waits for one, and to tell of each costs about as much as to start it.
function step.is_heard()
    if S.heard == nil then
        S.heard = redis.call('PUBSUB', 'NUMSUB', S.p .. 'jobs')[2] > 0
    end
    return S.heard
end

function step.tell_job(id)
    if step.is_heard() then
        step.tell('job:' .. id)
    end
end

-- Whoever waits in this lane has moved up.
function step.tell_line(queue, lane)
    if step.is_heard() then
        step.tell('place:' .. catalog.number(queue).name .. '/' .. lane)
    end
end

function step.next(counter, by)
    return call('HINCRBY', S.p .. 'counter', counter, by or 1)
end

-- The next number of a job.
function step.new_seq()
    S.seq = S.seq + 1
    return S.seq
end

-- The next number in the order of admission.
function step.next_arrival()
    S.arrival = S.arrival + 1
    return S.arrival
end

local function field_of(name)
    return type(name) == 'number' and writes.text(name) or name
end

function step.get(hash, field)
    local raw = writes.hget(S.p .. hash, field_of(field))
    local value = raw and damage.unpacked(raw)
    return type(value) == 'table' and value or nil
end

function step.put(hash, field, value)
    writes.hset(S.p .. hash, field_of(field), pack(value))
end

function step.drop(hash, field)
    writes.hdel(S.p .. hash, field_of(field))
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

-- Tallies: jobs of a queue by class and state.
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

local function domain_read(queue, class, inbox, key, clock)
    local found = {
        key = key,
        queue = queue,
        class = class,
        inbox = inbox,
        clock = tonumber(clock or 0),
        line = S.p .. 'line:' .. key,
        topic = inbox ~= '' and not keys.is_unknown(inbox) and 'worker:' .. inbox or 'queue:' .. catalog.number(queue).name, -- for who could start its jobs
    }
    if not clock then
        writes.hset(S.p .. 'flow', key, 0)
        call('SADD', S.p .. 'domains:' .. queue, key)
        if inbox ~= '' then
            call('SADD', S.p .. 'inbox:' .. inbox, class .. '.' .. queue)
        end
    end
    S.domains[key] = found
    return found
end

-- Domains and their clocks.
function step.domain(queue, class, inbox)
    local last = S.domain
    if last and last.class == class and last.queue == queue and last.inbox == inbox then
        return last
    end
    local key = keys.domain(queue, class, inbox)
    S.domain = S.domains[key] or domain_read(queue, class, inbox, key, writes.hget(S.p .. 'flow', key))
    return S.domain
end

function step.set_clock(domain, clock)
    domain.clock = clock
    writes.hset(S.p .. 'flow', domain.key, clock)
end

-- What is stored of a flow: when it will have been served, its place in line, the arrival of its first job, and that job.
function step.read_flow(raw)
    local finish, tag, head, first = parts('>dddHc0', raw)
    if tag < 0 then
        return finish
    end
    return finish, tag, head, first
end

function step.flow_bytes(finish, tag, head, first)
    return bytes('>dddHc0', finish, tag or -1, head or -1, #(first or ''), first or '')
end

local function flow_read(domain, lane, key, raw)
    local finish, tag, head, first = 0, nil, nil, nil
    if raw then
        finish, tag, head, first = step.read_flow(raw)
    end
    -- All fields at once: a table that grows is made anew several times.
    local found = {
        key = key, domain = domain, lane = lane, ready = S.p .. 'ready:' .. key, finish = finish, tag = tag, head = head,
        first = first, stored_tag = tag, stored_head = head, stored_member = false, single = false, dirty = not raw,
    }
    S.flows[key] = found
    return found
end

-- A lane's flow in a domain, made when it is new.
function step.flow(queue, class, inbox, lane)
    local last = S.flow
    if last and last.lane == lane then
        local domain = last.domain
        if domain.class == class and domain.queue == queue and domain.inbox == inbox then
            return last
        end
    end
    local domain_key = keys.domain(queue, class, inbox)
    local key = keys.flow(domain_key, lane)
    if not S.flows[key] then
        local domain, stored = S.domains[domain_key], nil
        if domain then
            stored = writes.hget(S.p .. 'flow', key)
        else
            local both = writes.hmget(S.p .. 'flow', { domain_key, key })
            domain, stored = domain_read(queue, class, inbox, domain_key, both[1]), both[2]
        end
        flow_read(domain, lane, key, stored)
    end
    S.flow = S.flows[key]
    return S.flow
end

-- Read the flows of these lanes together.
function step.load_flows(domain, lanes)
    local missing, fields = {}, {}
    for _, each in ipairs(lanes) do
        local key = keys.flow(domain.key, each.lane)
        if not S.flows[key] then
            missing[#missing + 1], fields[#fields + 1] = each.lane, key
        end
    end
    for i, raw in ipairs(writes.hmget(S.p .. 'flow', fields)) do
        flow_read(domain, missing[i], fields[i], raw)
    end
end

-- The flow that a live job stands in.
function step.flow_of(e)
    return step.flow(e.queue, e.class, e.inbox or '', e.lane_key or '')
end

function step.line_member(head, lane)
    return keys.place(writes.text(head), lane)
end

local function put_in_line(f)
    if f.stored_tag == f.tag and f.stored_head == f.head then
        return
    end
    local line, member = f.domain.line, f.stored_head == f.head and f.stored_member
    if f.stored_tag and f.stored_head ~= f.head then
        writes.zrem(line, f.stored_member or step.line_member(f.stored_head, f.lane))
    end
    if f.tag then
        member = member or step.line_member(f.head, f.lane)
        writes.zadd(line, f.tag, member)
    end
    f.stored_tag, f.stored_head, f.stored_member = f.tag, f.head, member
end

-- Put the flows that this step has changed where they stand in line, for whoever looks at one: it is read from where it is
-- stored. The flows themselves are written when the step ends.
function step.save_lines()
    for _, flow in pairs(S.flows) do
        if flow.dirty then
            put_in_line(flow)
        end
    end
end

local function save_flows()
    for _, flow in pairs(S.flows) do
        if flow.dirty then
            put_in_line(flow)
            writes.hset(S.p .. 'flow', flow.key, step.flow_bytes(flow.finish, flow.tag, flow.head, flow.first))
            flow.dirty = false
        end
    end
end

-- The same for good: whoever needs a flow reads it again.
function step.put_flows()
    save_flows()
    S.flows, S.flow = {}, nil
end

-- A limited lane as it is stored: how many places it has, whether it is ordered, and how many are taken.
function step.read_lane(raw)
    local most, ordered, granted = parts('>dBd', raw)
    return most, ordered == 1, granted
end

function step.lane_bytes(lane)
    return bytes('>dBd', lane.places, lane.ordered and 1 or 0, lane.granted)
end

-- Whether all places of a lane, as it is stored, are taken, and not more.
function step.is_full(raw)
    local most, _, granted = step.read_lane(raw)
    return granted == most
end

-- Limited lanes.
function step.lane(queue, key)
    local name = keys.lane(queue, key)
    local found = S.lanes[name]
    if found == nil then
        local raw = writes.hget(S.p .. 'lane', name)
        if raw then
            local most, ordered, granted = step.read_lane(raw)
            found = {
                name = name, queue = queue, key = key, places = most, ordered = ordered, granted = granted, stored = granted,
            }
            S.lanes[name] = found
        end
    end
    return found or nil
end

-- The limited lane of a key, made when it has no jobs yet.
function step.lane_for(queue, key, terms)
    local found = step.lane(queue, key)
    if not found then
        local name = keys.lane(queue, key)
        found = { name = name, queue = queue, key = key, places = terms.limit, ordered = terms.ordered, granted = 0 }
        S.lanes[name] = found
        call('SADD', S.p .. 'lanes:' .. queue, key)
        step.save_lane(found)
    end
    return found
end

function step.save_lane(lane)
    writes.hset(S.p .. 'lane', lane.name, step.lane_bytes(lane))
    lane.stored = lane.granted
end

-- Empty lanes leave nothing.
function step.drop_lane(lane)
    step.drop('lane', lane.name)
    call('SREM', S.p .. 'lanes:' .. lane.queue, lane.key)
    call('SREM', S.p .. 'short', lane.name)
    S.lanes[lane.name] = false
end

function step.save_room(lane)
    -- Only a fault leaves a place free while somebody waits; `admit` looks here.
    local short = lane.granted < lane.places and call('ZCARD', S.p .. 'wait:' .. lane.name) > 0
    call(short and 'SADD' or 'SREM', S.p .. 'short', lane.name)
end

-- Write what was kept, and tell who listens.
function step.flush()
    step.flush_tally()
    save_flows()
    for _, lane in pairs(S.lanes) do
        if lane then
            if lane.granted ~= lane.stored then
                step.save_lane(lane)
                step.save_room(lane)
            end
        end
    end
    S.lanes, S.flows, S.domains, S.flow, S.domain = {}, {}, {}, nil, nil
    entries.flush_lanes()
    numbers.settle()
    writes.flush()
    if S.dirty then
        step.save_counters()
    end
    publish('topics', S.topics)
    publish('jobs', S.changes)
    S.topics, S.changes, S.told = {}, {}, {}
end
