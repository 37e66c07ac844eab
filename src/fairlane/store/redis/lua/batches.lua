-- What happens to many plain jobs at a time, by lists: without a table for each lane and job, which were half of the cost
-- (measured). Jobs have tickets here; for all else there are `dispatch` and `places`, with the same result.
--
-- A claim mostly has one of two shapes: one job of each of many lanes, or many jobs of one. The places of limited lanes go on to
-- one job each.

local AT_FIRST = 27 -- of a flow as it is stored, see `step.flow_bytes`

local function are_cheap(raws)
    for _, raw in ipairs(raws) do
        if not tickets.is_cheap(raw) then
            return false
        end
    end
    return true
end

-- The tickets of jobs that start now, and where they are kept from now on. Those who listen are told by the caller.
local function start_all(c, domain, members, raws)
    local lives = {}
    for i, member in ipairs(members) do
        local ticket = tickets.started(raws[i], c.ticket, PRICE)
        lives[2 * i - 1], lives[2 * i] = member, ticket
        entries.forget_indexed(member)
        dispatch.note(c, member, ticket)
    end
    writes.hset_all(S.live, lives)
    writes.sadd_all(keys.held(c.who.id, domain.class), members)
    step.count(domain.queue, domain.class, 'p', -#members)
    step.count(domain.queue, domain.class, 'r', #members)
end

local function tell_all(domain, lanes, raws)
    if step.is_heard() then
        for i, raw in ipairs(raws) do
            dispatch.tell_start(raw, domain.queue, lanes[i] or lanes[1])
        end
    end
end

-- What comes first and second in these flows, and when the second came. A lane with a single place has no second, and its flow
-- need not be looked at for the first.
local function heads_of(flow_keys, singles)
    local firsts, seconds, arrivals, readies = {}, {}, {}, S.p .. 'ready:'
    local single_keys, places_ = {}, {}
    for i, flow_key in ipairs(flow_keys) do
        if singles[i] then
            single_keys[#single_keys + 1], places_[#places_ + 1] = flow_key, i
        else
            local ready = readies .. flow_key
            -- Mostly nothing was gathered for it: then there is no need to look.
            local both = (S.writes[ready] and call or redis.call)('ZRANGE', ready, 0, 1, 'WITHSCORES')
            firsts[i], seconds[i], arrivals[i] = both[1], both[3], both[4]
        end
    end
    for n, raw in ipairs(writes.hmget(S.p .. 'flow', single_keys)) do
        firsts[places_[n]] = sub(raw, AT_FIRST)
    end
    return firsts, seconds, arrivals
end

-- Start the first job of each flow of `line`, members and tags, in that order. Returns how many; none if another order may hold,
-- because a lane comes again before the last of them.
function batches.one_of_each(c, queue, domain, line)
    local count = #line / 2
    local last = tonumber(line[2 * count])
    if last >= tonumber(line[2]) + PRICE then
        return 0
    end
    step.put_flows()
    local lanes, flow_keys, singles, before = {}, {}, {}, keys.flow(domain.key, '')
    for i = 1, count do
        local lane = sub(line[2 * i - 1], 17)
        local terms = catalog.terms(queue, lane)
        if terms.weight ~= 1 then
            return 0
        end
        lanes[i], flow_keys[i], singles[i] = lane, before .. lane, terms.limit == 1
    end
    local members, seconds, arrivals = heads_of(flow_keys, singles)
    local raws = writes.hmget(S.live, members)
    if not are_cheap(raws) then
        return 0
    end
    local fit = answers.fitting(c, members)
    for i = fit + 1, count do
        lanes[i], members[i], raws[i] = nil, nil, nil
    end
    if fit < count then
        count, last = fit, tonumber(line[2 * fit])
    end
    if count == 0 then
        return 0
    end
    start_all(c, domain, members, raws)
    local gone, back, records, readies = {}, {}, {}, S.p .. 'ready:'
    for i, lane in ipairs(lanes) do
        local finish, next_, arrival = tonumber(line[2 * i]) + PRICE, seconds[i], arrivals[i]
        call('ZREM', readies .. flow_keys[i], members[i])
        gone[i] = line[2 * i - 1]
        if next_ then
            back[#back + 1], back[#back + 2] = finish, keys.place(arrival, lane)
        end
        records[2 * i - 1], records[2 * i] = flow_keys[i], step.flow_bytes(finish, next_ and finish, arrival, next_)
        entries.begun(domain.queue, lane, 1)
    end
    writes.hset_all(S.p .. 'flow', records)
    writes.zrem_all(domain.line, gone)
    writes.zadd_all(domain.line, back)
    step.set_clock(domain, math.max(domain.clock, last))
    tell_all(domain, lanes, raws)
    return count
end

-- Start up to `most` jobs of the only flow of a domain, whose place in line is `place`. Returns how many.
function batches.many_of_one(c, queue, domain, place, tag, most)
    local lane = sub(place, 17)
    if catalog.terms(queue, lane).weight ~= 1 then
        return 0
    end
    step.put_flows()
    local flow_key = keys.flow(domain.key, lane)
    local ready = S.p .. 'ready:' .. flow_key
    local found, members = call('ZRANGE', ready, 0, most, 'WITHSCORES'), {}
    local count = math.min(most, #found / 2)
    for i = 1, count do
        members[i] = found[2 * i - 1]
    end
    local raws = writes.hmget(S.live, members)
    if not are_cheap(raws) then
        return 0
    end
    local fit = answers.fitting(c, members)
    for i = fit + 1, count do
        members[i], raws[i] = nil, nil
    end
    count = fit
    if count == 0 then
        return 0
    end
    start_all(c, domain, members, raws)
    local next_, arrival = found[2 * count + 1], found[2 * count + 2]
    local finish = tonumber(tag) + count * PRICE
    writes.zrem_all(ready, members)
    writes.zrem_all(domain.line, { place })
    if next_ then
        writes.zadd_all(domain.line, { finish, keys.place(arrival, lane) })
    end
    writes.hset_all(S.p .. 'flow', { flow_key, step.flow_bytes(finish, next_ and finish, arrival, next_) })
    entries.begun(domain.queue, lane, count)
    step.set_clock(domain, math.max(domain.clock, finish - PRICE))
    tell_all(domain, { lane }, raws)
    return count
end

-- The first in the lines of limited lanes whose only change is that one job has left them: numbers, scores, and which of the
-- lanes each is of. The others are noted in `rest`.
local function pop_waiting(names, rest)
    local times, members, scores, at = {}, {}, {}, {}
    for _, name in ipairs(names) do
        times[name] = (times[name] or 0) + 1
    end
    for i, raw in ipairs(writes.hmget(S.p .. 'lane', names)) do
        local name = names[i]
        local is_simple = times[name] == 1 and not S.lanes[name] and raw and step.is_full(raw)
        local popped = is_simple and call('ZPOPMIN', S.p .. 'wait:' .. name) or {}
        if popped[1] then
            local n = #at + 1
            members[n], scores[n], at[n] = popped[1], popped[2], i
        else
            rest[#rest + 1] = i
        end
    end
    return members, scores, at
end

-- Let a job that has got a place stand in its flow, `record` as it is stored. Returns false, and does nothing, if it comes before
-- others there.
local function join(lists, domain, lane, flow_key, record, member, arrival)
    local finish, tag, head = 0, nil, nil
    if record then
        finish, tag, head = step.read_flow(record)
    end
    if tag and arrival < head then
        return false
    end
    if not tag then
        tag = math.max(domain.clock, finish)
        local records, line = lists.records, lists.lines[domain] or {}
        lists.lines[domain] = line
        records[#records + 1], records[#records + 2] = flow_key, step.flow_bytes(finish, tag, arrival, member)
        line[#line + 1], line[#line + 2] = tag, step.line_member(arrival, lane)
        step.tell(domain.topic)
    end
    call('ZADD', S.p .. 'ready:' .. flow_key, arrival, member)
    return true
end

-- Jobs with tickets have left these limited lanes: their places go on, each to the next of its lane.
function batches.hand_on(queues, lanes)
    local names, rest, lists = {}, {}, { lives = {}, records = {}, lines = {} }
    for i, lane in ipairs(lanes) do
        names[i] = keys.lane(queues[i], lane)
    end
    step.put_flows()
    local members, scores, at = pop_waiting(names, rest)
    local raws, flow_keys, classes, arrivals = writes.hmget(S.live, members), {}, {}, {}
    for n, raw in ipairs(raws) do
        flow_keys[n], classes[n] = '', false
        if tickets.is_whole(raw) then
            classes[n], arrivals[n] = tickets.place(raw)
            flow_keys[n] = keys.flow(step.domain(queues[at[n]], classes[n], '').key, lanes[at[n]])
        end
    end
    for n, record in ipairs(writes.hmget(S.p .. 'flow', flow_keys)) do
        local i, member, class = at[n], members[n], classes[n]
        local domain = class and step.domain(queues[i], class, '')
        if domain and join(lists, domain, lanes[i], flow_keys[n], record, member, arrivals[n]) then
            local lives = lists.lives
            lives[#lives + 1], lives[#lives + 2] = member, tickets.granted(raws[n])
            entries.forget_indexed(member)
            step.tell_line(queues[i], lanes[i])
        else
            writes.zadd(S.p .. 'wait:' .. names[i], scores[n], member)
            rest[#rest + 1] = i
        end
    end
    writes.hset_all(S.live, lists.lives)
    writes.hset_all(S.p .. 'flow', lists.records)
    for domain, line in pairs(lists.lines) do
        writes.zadd_all(domain.line, line)
    end
    for _, i in ipairs(rest) do
        places.leave(queues[i], lanes[i])
    end
end
