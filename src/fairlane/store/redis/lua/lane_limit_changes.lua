-- A lane gets a limit, loses it, or changes its order. Then all of its jobs change: waiting, running and retrying ones.
-- That takes one step for each thousand jobs, because an operator may pause a lane in which a million jobs wait, and
-- other calls must not wait for all of them. Until the last step the lane is settling: it has no places, new jobs wait,
-- its flows are out of line, and none of its jobs can be claimed. Which lanes are settling is cached with the rules
-- (`queue_cache.settling`); the number of the last job that was changed is in the hash `settling:QUEUE`.

-- The number of places of a settling lane, and of one whose rules changed again before it had settled.
lane_limit_changes.UNSETTLED, lane_limit_changes.ANEW = -1, -2
local LOOKS_LIKE_A_JOB = 50 -- how many flows can be read in the time that it takes to change one job

local function key_of(queue)
    return S.p .. 'settling:' .. queue.number
end

-- The domains of a queue. A deployment with many workers has many of them, so the list is cached in `known` for the
-- step, until a new one is added.
local function domains_of(queue, known)
    local set = S.p .. 'domains:' .. queue.number
    if known and call('SCARD', set) == #known then
        return known
    end
    local domains = call('SMEMBERS', set)
    for i, name in ipairs(domains) do
        local class, inbox = string.match(name, '^%d+%.(%d)%.(.*)$')
        domains[i] = { name = name, class = tonumber(class), inbox = inbox }
    end
    return domains
end

-- Take the flows of these lanes out of line, in all inboxes and classes.
local function leave_line(queue, lanes)
    fair_order.save_lines()
    local leaving = {}
    for _, key in ipairs(lanes) do
        leaving[key] = true
    end
    local function leave(domain, key)
        local flow = fair_order.flow(queue.number, domain.class, domain.inbox, key)
        flow.tag, flow.head, flow.first, flow.dirty = nil, nil, nil, true
    end
    for _, domain in ipairs(domains_of(queue)) do
        local line = S.p .. 'line:' .. domain.name
        -- Iterate over the line or over the lanes, whichever is shorter.
        if call('ZCARD', line) <= #lanes then
            for _, member in ipairs(call('ZRANGE', line, 0, -1)) do
                if leaving[sub(member, 17)] then
                    leave(domain, sub(member, 17))
                end
            end
        else
            local fields = {}
            for i, key in ipairs(lanes) do
                fields[i] = keys.flow(domain.name, key)
            end
            for i, stored in ipairs(write_buffer.hmget(S.p .. 'flow', fields)) do
                if stored and select(2, fair_order.read_flow(stored)) then
                    leave(domain, lanes[i])
                end
            end
        end
    end
end

-- Whether a flow of this lane has jobs in any of these domains.
local function stand_in(domains, key)
    local sets, before = {}, S.p .. 'ready:'
    for i, domain in ipairs(domains) do
        sets[i] = before .. keys.flow(domain.name, key)
        if S.writes[sets[i]] then
            return true
        end
    end
    for from = 1, #sets, MOST_LOOKED_AT do
        if call('EXISTS', unpack(sets, from, math.min(#sets, from + MOST_LOOKED_AT - 1))) > 0 then
            return true
        end
    end
    return false
end

-- Put the flows back in line with their old tags, or at the clock if it has passed them: a blocked lane earns no
-- credit.
local function join_line(queue, key, domains)
    if not stand_in(domains, key) then
        return
    end
    for _, domain in ipairs(domains) do
        if call('EXISTS', S.p .. 'ready:' .. keys.flow(domain.name, key)) == 1 then
            local flow = fair_order.flow(queue.number, domain.class, domain.inbox, key)
            fair_order.find_head(flow)
            if flow.head then
                flow.tag = math.max(flow.domain.clock, flow.finish)
                step.notify(flow.domain.topic)
            end
        end
    end
end

-- Begin to change lanes, each from its first job on. None of their jobs can be claimed from now on.
function lane_limit_changes.begin(queue, lanes)
    for _, key in ipairs(lanes) do
        local terms = queue_cache.rule(queue, key)
        queue_cache.settling(queue)[key] = true
        call('HSET', key_of(queue), key, 0)
        call('SADD', S.p .. 'unsettled', queue.number)
        local lane = lane_limits.lane_for(queue.number, key, { limit = 0, ordered = terms.ordered })
        lane.places = lane.places < 0 and lane_limit_changes.ANEW or lane_limit_changes.UNSETTLED
        if terms.limit then
            lane.ordered = terms.ordered
        end
        lane_limits.save_lane(lane)
    end
    if lanes[1] then
        leave_line(queue, lanes)
    end
end

-- For jobs with packed records. `lists`: `lives`, new records; `waits` and `got`, jobs that wait for a place now or no
-- longer; by class `ready` and `left`, jobs that are in their flow now or no longer.

local function put(list, first, second)
    list[#list + 1], list[#list + 2] = first, second
end

-- The lane is limited: running jobs have a place, and all others wait for one. Jobs that already have a place keep it,
-- and jobs that were in the lane before get a new rank.
local function limit_packed(lane, lists, member, raw)
    local class, arrival, granted, limited = packed_job_record.lane_state(raw)
    local rank, is_waiting = job_record.rank(lane.ordered, class), packed_job_record.is_waiting(raw)
    if limited and is_waiting and granted and lane.places == lane_limit_changes.ANEW then
        -- A job before it may have lost its place while the lane had no limit.
        put(lists.lives, member, packed_job_record.placed(raw, true, rank, false))
        put(lists.waits, job_record.turn(rank, arrival), member)
        put(lists.left[class], member)
        lane.granted = lane.granted - 1
    elseif limited then
        put(lists.lives, member, packed_job_record.placed(raw, true, rank, granted))
        if not granted then
            put(lists.waits, job_record.turn(rank, arrival), member)
        end
    elseif is_waiting then
        put(lists.lives, member, packed_job_record.placed(raw, true, rank, false))
        put(lists.waits, job_record.turn(rank, arrival), member)
        put(lists.left[class], member)
    else
        put(lists.lives, member, packed_job_record.placed(raw, true, rank, true))
        lane.granted = lane.granted + 1
    end
end

-- The lane is not limited: all of its jobs may start.
local function free_packed(lane, lists, member, raw)
    local class, arrival, granted, limited = packed_job_record.lane_state(raw)
    if not limited then
        return
    end
    put(lists.lives, member, packed_job_record.placed(raw, false, nil, true))
    if granted then
        lane.granted = lane.granted - 1
    else
        put(lists.got, member)
        put(lists.ready[class], arrival, member)
    end
end

-- For jobs without packed records.

local function limit_entry(lane, e)
    if e.lane and e.due and not lane.ordered then
        -- In an unordered lane a retrying job holds no place: it comes back when it is due.
        lane.granted = lane.granted - (e.granted and 1 or 0)
        e.lane, e.granted = nil, nil
    elseif e.lane then
        e.rank = job_record.rank(lane.ordered, e.class)
        if lane.places == lane_limit_changes.ANEW and e.state == STATE.PENDING and e.granted then
            fair_order.withdraw(e)
            lane.granted = lane.granted - 1
            e.granted, e.granted_at = nil, nil
        end
    elseif e.state ~= STATE.SCHEDULED then
        if e.state == STATE.RUNNING then
            lane.granted = lane.granted + 1
        else
            fair_order.withdraw(e)
        end
        e.lane, e.granted, e.rank = true, e.state == STATE.RUNNING or nil, job_record.rank(lane.ordered, e.class)
    end
    job_record.save(e)
end

local function free_entry(lane, e)
    if not e.lane then
        return
    end
    -- Expired jobs too: a claim finds and cancels them in line. An expired turn would start, so it is left out.
    if not e.granted and (not e.waiter or not e.expires_at or e.expires_at > S.now) then
        lane_limits.grant(lane, e)
    end
    lane.granted = lane.granted - (e.granted and 1 or 0)
    -- A retrying job has kept its place.
    e.lane, e.rank, e.granted, e.granted_at = nil, nil, true, nil
    job_record.save(e)
end

-- Change some jobs of a lane; `members` are their numbers.
local function change(queue, key, lane, members)
    local limited = queue_cache.rule(queue, key).limit
    local change_packed, change_entry = limited and limit_packed or free_packed, limited and limit_entry or free_entry
    local lists, others = { lives = {}, waits = {}, got = {}, ready = { [0] = {}, {}, {} }, left = { [0] = {}, {}, {} } }, {}
    for i, raw in ipairs(write_buffer.hmget(S.live, members)) do
        local member = members[i]
        if raw and packed_job_record.is_packed(raw) then
            job_record.forget_indexed(member)
            change_packed(lane, lists, member, raw)
        elseif raw then
            others[#others + 1] = member
        end
    end
    write_buffer.hset_all(S.live, lists.lives)
    write_buffer.zadd_all(S.p .. 'wait:' .. lane.name, lists.waits)
    write_buffer.zrem_all(S.p .. 'wait:' .. lane.name, lists.got)
    for class = CLASS.HIGH, CLASS.LOW do
        write_buffer.zadd_all(keys.ready(queue.number, class, key), lists.ready[class])
        write_buffer.zrem_all(keys.ready(queue.number, class, key), lists.left[class])
    end
    for _, e in ipairs(job_record.all(others)) do
        change_entry(lane, e)
    end
end

-- A running job goes back to waiting: in a lane that becomes limited it has a place by then, even if it was not changed
-- yet.
function lane_limit_changes.reach(e)
    local queue = queue_cache.number(e.queue)
    if e.lane_key and not e.lane and queue_cache.settling(queue)[e.lane_key] and queue_cache.rule(queue, e.lane_key).limit then
        limit_entry(lane_limits.lane(e.queue, e.lane_key), e)
    end
end

-- The lane has settled: grant its places, or drop its limit.
local function finish(queue, key, lane, known)
    local terms, domains = queue_cache.rule(queue, key), domains_of(queue, known)
    queue_cache.settling(queue)[key] = nil
    call('HDEL', key_of(queue), key)
    if terms.limit then
        lane.places = terms.limit
        lane_limits.save_lane(lane)
        join_line(queue, key, domains)
        lane_limits.trim(lane)
        lane_limits.regrant(lane)
        lane_limits.hand_on(lane)
    else
        join_line(queue, key, domains)
        lane_limits.drop_lane(lane)
    end
end

-- Change up to `most` more jobs of a lane. Returns how many were read.
local function go_on(queue, key, most, known)
    local lane, after = lane_limits.lane(queue.number, key), call('HGET', key_of(queue), key)
    local set = S.p .. 'by:lane:' .. keys.lane(queue.number, key)
    local members = call('ZRANGEBYSCORE', set, '(' .. after, '+inf', 'LIMIT', 0, most)
    change(queue, key, lane, members)
    if #members == most then
        call('HSET', key_of(queue), key, members[most])
        lane_limits.save_lane(lane)
        return most
    end
    if not queue_cache.rule(queue, key).limit then
        -- Jobs that came back meanwhile wait as well, with numbers that were passed already.
        local late = call('ZRANGE', S.p .. 'wait:' .. lane.name, 0, most - 1)
        change(queue, key, lane, late)
        if #late == most then
            lane_limits.save_lane(lane)
            return most
        end
    end
    finish(queue, key, lane, known)
    return #members
end

-- Change up to `most` more jobs of the lanes of a queue. Returns how much of `most` is left.
local function settle_queue(queue, most)
    local has_settled, domains = false, domains_of(queue)
    for key in pairs(queue_cache.settling(queue)) do
        if most <= 0 then
            break
        end
        most = most - math.max(1, go_on(queue, key, most, domains)) - math.floor(#domains / LOOKS_LIKE_A_JOB)
        has_settled = has_settled or not queue_cache.settling(queue)[key]
    end
    if not next(queue_cache.settling(queue)) then
        call('SREM', S.p .. 'unsettled', queue.number)
    end
    if has_settled then
        queue_cache.changed() -- another version of this library, or another server, may have cached that they settle
    end
    return most
end

-- Change up to `most` more jobs, over all queues. Returns whether there is more to do.
function lane_limit_changes.settle(most)
    for _, number in ipairs(call('SMEMBERS', S.p .. 'unsettled')) do
        if most > 0 then
            most = settle_queue(queue_cache.number(tonumber(number)), most)
        end
    end
    return call('EXISTS', S.p .. 'unsettled') == 1
end
