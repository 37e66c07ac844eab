-- What happens to many plain jobs at a time, by lists: without a table for each lane and job, which were half of the cost
-- (measured). Jobs have tickets here; for all else there are `dispatch` and `places`, with the same result.
--
-- A claim mostly has one of two shapes: one job of each of many lanes, or many jobs of one. The places of limited lanes go on to
-- one job each.

local AT_FIRST = 27 -- of a flow as it is stored, see `fair_order.flow_bytes`

local function are_cheap(raws)
    for _, raw in ipairs(raws) do
        if not packed_job_record.is_cheap(raw) then
            return false
        end
    end
    return true
end

-- The tickets of jobs that start now, and where they are kept from now on. Those who listen are told by the caller.
local function start_all(c, domain, members, raws)
    local lives = {}
    for i, member in ipairs(members) do
        local ticket = packed_job_record.started(raws[i], c.ticket, PRICE)
        lives[2 * i - 1], lives[2 * i] = member, ticket
        job_record.forget_indexed(member)
        claim.note(c, member, ticket)
    end
    write_buffer.hset_all(S.live, lives)
    write_buffer.sadd_all(keys.held(c.who.id, domain.class), members)
    step.count(domain.queue, domain.class, 'p', -#members)
    step.count(domain.queue, domain.class, 'r', #members)
end

local function tell_all(domain, lanes, raws)
    if step.is_heard() then
        for i, raw in ipairs(raws) do
            claim.tell_start(raw, domain.queue, lanes[i] or lanes[1])
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
    for n, raw in ipairs(write_buffer.hmget(S.p .. 'flow', single_keys)) do
        firsts[places_[n]] = sub(raw, AT_FIRST)
    end
    return firsts, seconds, arrivals
end

-- Start the first job of each flow of `line`, members and tags, in that order. Returns how many; none if another order may hold,
-- because a lane comes again before the last of them.
function claim_batch.one_of_each(c, queue, domain, line)
    local count = #line / 2
    local last = tonumber(line[2 * count])
    if last >= tonumber(line[2]) + PRICE then
        return 0
    end
    fair_order.put_flows()
    local lanes, flow_keys, singles, before = {}, {}, {}, keys.flow(domain.key, '')
    for i = 1, count do
        local lane = sub(line[2 * i - 1], 17)
        local terms = queue_cache.terms(queue, lane)
        if terms.weight ~= 1 then
            return 0
        end
        lanes[i], flow_keys[i], singles[i] = lane, before .. lane, terms.limit == 1
    end
    local members, seconds, arrivals = heads_of(flow_keys, singles)
    local raws = write_buffer.hmget(S.live, members)
    if not are_cheap(raws) then
        return 0
    end
    local fit = claim_answer.fitting(c, members)
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
        records[2 * i - 1], records[2 * i] = flow_keys[i], fair_order.flow_bytes(finish, next_ and finish, arrival, next_)
        job_record.begun(domain.queue, lane, 1)
    end
    write_buffer.hset_all(S.p .. 'flow', records)
    write_buffer.zrem_all(domain.line, gone)
    write_buffer.zadd_all(domain.line, back)
    fair_order.set_clock(domain, math.max(domain.clock, last))
    tell_all(domain, lanes, raws)
    return count
end

-- Start up to `most` jobs of the only flow of a domain, whose place in line is `place`. Returns how many.
function claim_batch.many_of_one(c, queue, domain, place, tag, most)
    local lane = sub(place, 17)
    if queue_cache.terms(queue, lane).weight ~= 1 then
        return 0
    end
    fair_order.put_flows()
    local flow_key = keys.flow(domain.key, lane)
    local ready = S.p .. 'ready:' .. flow_key
    local found, members = call('ZRANGE', ready, 0, most, 'WITHSCORES'), {}
    local count = math.min(most, #found / 2)
    for i = 1, count do
        members[i] = found[2 * i - 1]
    end
    local raws = write_buffer.hmget(S.live, members)
    if not are_cheap(raws) then
        return 0
    end
    local fit = claim_answer.fitting(c, members)
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
    write_buffer.zrem_all(ready, members)
    write_buffer.zrem_all(domain.line, { place })
    if next_ then
        write_buffer.zadd_all(domain.line, { finish, keys.place(arrival, lane) })
    end
    write_buffer.hset_all(S.p .. 'flow', { flow_key, fair_order.flow_bytes(finish, next_ and finish, arrival, next_) })
    job_record.begun(domain.queue, lane, count)
    fair_order.set_clock(domain, math.max(domain.clock, finish - PRICE))
    tell_all(domain, { lane }, raws)
    return count
end
