-- Claims of many plain jobs by lists, without a table for each lane and job: those tables were half of the cost
-- (measured). All jobs here have packed records; `claim.lua` does the same for all others.
--
-- A claim mostly has one of two shapes: one job from each of many lanes, or many jobs from one lane.

local AT_FIRST = 27 -- the offset of the first job in a stored flow, see `fair_order.flow_bytes`

local function have_default_cost(raws)
    for _, raw in ipairs(raws) do
        if not packed_job_record.has_default_cost(raw) then
            return false
        end
    end
    return true
end

-- Write the packed records and indexes of jobs that start. The caller notifies listeners.
local function start_all(c, domain, members, raws)
    local lives = {}
    for i, member in ipairs(members) do
        local packed = packed_job_record.started(raws[i], c.claim_bytes, PRICE)
        lives[2 * i - 1], lives[2 * i] = member, packed
        job_record.forget_indexed(member)
        claim.note(c, member, packed)
    end
    write_buffer.hset_all(S.live, lives)
    write_buffer.sadd_all(keys.held(c.who.id, domain.class), members)
    step.count(domain.queue, domain.class, 'p', -#members)
    step.count(domain.queue, domain.class, 'r', #members)
end

local function notify_all(domain, lanes, raws)
    if step.has_listeners() then
        for i, raw in ipairs(raws) do
            claim.notify_start(raw, domain.queue, lanes[i] or lanes[1])
        end
    end
end

-- The first and second job of these flows, and the arrival of the second. A lane that runs one job at a time has no
-- second, and its first is in the record of the flow.
local function heads_of(flow_keys, singles)
    local firsts, seconds, arrivals, readies = {}, {}, {}, S.p .. 'ready:'
    local single_keys, places_ = {}, {}
    for i, flow_key in ipairs(flow_keys) do
        if singles[i] then
            single_keys[#single_keys + 1], places_[#places_ + 1] = flow_key, i
        else
            local ready = readies .. flow_key
            -- Read past the write buffer when it holds nothing for this key, which is the usual case.
            local both = (S.writes[ready] and call or redis.call)('ZRANGE', ready, 0, 1, 'WITHSCORES')
            firsts[i], seconds[i], arrivals[i] = both[1], both[3], both[4]
        end
    end
    for n, raw in ipairs(write_buffer.hmget(S.p .. 'flow', single_keys)) do
        firsts[places_[n]] = raw and sub(raw, AT_FIRST)
    end
    return firsts, seconds, arrivals
end

-- Start the first job of each flow of `line`, members and tags, in that order. Returns how many; 0 if the order may be
-- another, because a lane's second job would start before the last of them.
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
    for i = 1, count do
        if not members[i] then
            return 0
        end
    end
    local raws = write_buffer.hmget(S.live, members)
    if not have_default_cost(raws) then
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
            back[#back + 1], back[#back + 2] = finish, keys.line_member(arrival, lane)
        end
        records[2 * i - 1], records[2 * i] = flow_keys[i], fair_order.flow_bytes(finish, next_ and finish, arrival, next_)
        job_record.begun(domain.queue, lane, 1)
    end
    write_buffer.hset_all(S.p .. 'flow', records)
    write_buffer.zrem_all(domain.line, gone)
    write_buffer.zadd_all(domain.line, back)
    fair_order.set_clock(domain, math.max(domain.clock, last))
    notify_all(domain, lanes, raws)
    return count
end

-- Start up to `most` jobs of the only flow of a domain; `member` is its member of the line. Returns how many.
function claim_batch.many_of_one(c, queue, domain, member, tag, most)
    local lane = sub(member, 17)
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
    if not have_default_cost(raws) then
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
    write_buffer.zrem_all(domain.line, { member })
    if next_ then
        write_buffer.zadd_all(domain.line, { finish, keys.line_member(arrival, lane) })
    end
    write_buffer.hset_all(S.p .. 'flow', { flow_key, fair_order.flow_bytes(finish, next_ and finish, arrival, next_) })
    job_record.begun(domain.queue, lane, count)
    fair_order.set_clock(domain, math.max(domain.clock, finish - PRICE))
    notify_all(domain, { lane }, raws)
    return count
end
