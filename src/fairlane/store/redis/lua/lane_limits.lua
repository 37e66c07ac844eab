-- The places of limited lanes. A job holds a grant from the step that gives it until it leaves the lane, and every way
-- out passes the place on in the same step (see `fairlane.model.lanes` for the order).

-- A stored limited lane: its places, whether it is ordered, and how many places are taken.
function lane_limits.read_lane(raw)
    local most, ordered, granted = parts('>dBd', raw)
    return most, ordered == 1, granted
end

function lane_limits.lane_bytes(lane)
    return bytes('>dBd', lane.places, lane.ordered and 1 or 0, lane.granted)
end

-- Whether exactly all places of a stored lane are taken.
function lane_limits.is_full(raw)
    local most, _, granted = lane_limits.read_lane(raw)
    return granted == most
end

-- A limited lane, cached for the step; nil if it has no jobs.
function lane_limits.lane(queue, key)
    local name = keys.lane(queue, key)
    local found = S.lanes[name]
    if found == nil then
        local raw = write_buffer.hget(S.p .. 'lane', name)
        if raw then
            local most, ordered, granted = lane_limits.read_lane(raw)
            found = {
                name = name, queue = queue, key = key, places = most, ordered = ordered, granted = granted, stored = granted,
            }
            S.lanes[name] = found
        end
    end
    return found or nil
end

-- The limited lane of a key, created when it has no jobs yet.
function lane_limits.lane_for(queue, key, terms)
    local found = lane_limits.lane(queue, key)
    if not found then
        local name = keys.lane(queue, key)
        found = { name = name, queue = queue, key = key, places = terms.limit, ordered = terms.ordered, granted = 0 }
        S.lanes[name] = found
        call('SADD', S.p .. 'lanes:' .. queue, key)
        lane_limits.save_lane(found)
    end
    return found
end

function lane_limits.save_lane(lane)
    write_buffer.hset(S.p .. 'lane', lane.name, lane_limits.lane_bytes(lane))
    lane.stored = lane.granted
end

-- Remove an empty lane.
function lane_limits.drop_lane(lane)
    step.drop('lane', lane.name)
    call('SREM', S.p .. 'lanes:' .. lane.queue, lane.key)
    call('SREM', S.p .. 'short', lane.name)
    S.lanes[lane.name] = false
end

function lane_limits.save_room(lane)
    -- Only a fault leaves a place free while a job waits; `admit` repairs the lanes in this set.
    local short = lane.granted < lane.places and call('ZCARD', S.p .. 'wait:' .. lane.name) > 0
    call(short and 'SADD' or 'SREM', S.p .. 'short', lane.name)
end

local IDLE_GRANT_SECONDS = 2
local PAGE = 50

local function open(e)
    if e.kind == KIND.TURN then
        lane_limits.start_turn(e)
    elseif not e.gate then
        fair_order.enter(e)
    elseif e.lane then
        e.granted_at = S.now
    end
end

-- Jobs behind this one have moved up.
local function notify_lane(e)
    step.notify_lane(e.queue, e.lane_key)
end

-- Start a turn in its waiter: turns are never claimed.
function lane_limits.start_turn(e)
    job_record.move(e, STATE.RUNNING)
    e.session = e.waiter
    e.fence = (e.fence or 0) + 1
    e.attempt = (e.attempt or 0) + 1
    e.started_at = S.now
    step.notify_job(e.id)
    step.notify('session:' .. e.waiter)
    notify_lane(e)
end

local function ungrant(e)
    fair_order.withdraw(e)
    e.granted, e.granted_at = nil, nil
    job_record.save(e)
end

-- The last job that holds a place and has not started: among those any worker may claim, and among the others.
local function weakest_of(lane)
    local last = call('ZREVRANGE', S.p .. 'hold:' .. lane.name, 0, 0, 'WITHSCORES')
    local weakest, score = last[1], tonumber(last[2] or -1)
    for class = CLASS.HIGH, CLASS.LOW do
        local of_class = call('ZREVRANGE', keys.ready(lane.queue, class, lane.key), 0, 0, 'WITHSCORES')
        local its = of_class[1] and tonumber(of_class[2]) + (lane.ordered and 0 or class * job_record.RANK)
        if its and its > score then
            weakest, score = of_class[1], its
        end
    end
    return weakest and job_record.get(weakest) or nil
end

-- The next job to be granted a place. Expired jobs get none; the promoter cancels them.
local function next_of(lane)
    local set = S.p .. 'wait:' .. lane.name
    -- Nearly always the first.
    local first = call('ZRANGE', set, 0, 0)[1]
    local e = first and job_record.look(first)
    while first and not e do
        damage.fail(first, { queue = lane.queue, lane_key = lane.key, sets = { set } })
        first = call('ZRANGE', set, 0, 0)[1]
        e = first and job_record.look(first)
    end
    if not e or not e.expires_at or e.expires_at > S.now then
        return e
    end
    for from = 0, MOST_LOOKED_AT, PAGE do
        local seqs = call('ZRANGE', set, from, from + PAGE - 1)
        for _, e in ipairs(job_record.all(seqs)) do
            if not e.expires_at or e.expires_at > S.now then
                return e
            end
        end
        if #seqs < PAGE then
            return nil
        end
    end
    return nil
end

-- The sets of jobs of lower classes that hold a place of an unordered lane and have not started.
function lane_limits.weaker(queue, key, class)
    local sets = { S.p .. 'hold:' .. keys.lane(queue, key) }
    for lower = class + 1, 2 do
        sets[#sets + 1] = keys.ready(queue, lower, key)
    end
    return sets
end

-- In an unordered lane, a job of a higher class takes the place of the lowest one that has not started.
local function take_from_weaker(lane, class)
    local weakest = weakest_of(lane)
    if not weakest or weakest.class <= class then
        return false
    end
    ungrant(weakest)
    return true
end

-- Place a pending job in its lane, and in its flow if it may start. The caller saves it.
function lane_limits.arrive(e)
    e.arrival = e.arrival or step.next_arrival()
    local terms = queue_cache.terms(queue_cache.number(e.queue), e.lane_key or '')
    if not terms.limit or not e.lane_key then
        e.lane, e.granted, e.rank = nil, true, nil
        open(e)
        return
    end
    local lane = lane_limits.lane_for(e.queue, e.lane_key, terms)
    e.lane, e.granted = true, nil
    e.rank = job_record.rank(lane.ordered, e.class)
    if e.kind == KIND.TURN and e.expires_at and e.expires_at < S.now then
        return -- too late to start; the promoter cancels it
    end
    if lane.granted < lane.places then
        lane.granted = lane.granted + 1
        e.granted = true
    elseif not lane.ordered and lane.places >= 0 and e.class < CLASS.LOW and take_from_weaker(lane, e.class) then
        e.granted = true
    end
    if e.granted then
        open(e)
    end
end

-- The gate of a pending job has opened. The caller saves it.
function lane_limits.ungate(e)
    e.gate = nil
    if e.granted then
        open(e)
    end
end

-- A job that kept its grant is pending again. The caller saves it.
function lane_limits.resume(e)
    if e.lane then
        local lane = lane_limits.lane(e.queue, e.lane_key)
        e.rank = job_record.rank(lane.ordered, e.class)
    end
    open(e)
end

-- Grant a place to a waiting job: a turn starts, an ungated job becomes claimable.
function lane_limits.grant(lane, e)
    lane.granted = lane.granted + 1
    e.granted = true
    if e.waiter then
        lane_limits.start_turn(e)
    elseif e.state == STATE.PENDING then
        open(e)
    end
    job_record.save(e)
end

-- While many jobs expire in one step, free places are granted once at its end: `next_of` skips expired jobs, so granting
-- after each of them would read all the others every time (10 s for 2,400 jobs of a lane, measured).
function lane_limits.defer_grants()
    S.deferred_lanes = {}
end

function lane_limits.grant_deferred()
    local lanes = S.deferred_lanes
    S.deferred_lanes = nil
    for _, deferred in pairs(lanes) do
        local lane = lane_limits.lane(deferred.queue, deferred.key)
        if lane then
            lane_limits.hand_on(lane)
        end
    end
end

-- Grant the free places of a lane to the next jobs; returns how many were granted.
function lane_limits.hand_on(lane)
    if S.deferred_lanes then
        S.deferred_lanes[lane.name] = lane
        return 0
    end
    local given = 0
    while lane.granted < lane.places do
        local waiting = next_of(lane)
        if not waiting then
            break
        end
        lane_limits.grant(lane, waiting)
        given = given + 1
    end
    if lane.granted == 0 and lane.places >= 0 and call('ZCARD', S.p .. 'wait:' .. lane.name) == 0 then
        lane_limits.drop_lane(lane)
    end
    return given
end

-- Release the place of a job that is gone, or whose saved record is not in the lane any more.
function lane_limits.vacate(e)
    if not e.lane then
        return
    end
    local lane = lane_limits.lane(e.queue, e.lane_key)
    if e.granted then
        lane.granted = lane.granted - 1
    end
    e.lane, e.granted = nil, nil
    notify_lane(e)
    lane_limits.hand_on(lane)
end

-- `vacate` for a job with a packed record.
function lane_limits.leave(queue, lane_key)
    local lane = lane_limits.lane(queue, lane_key)
    lane.granted = lane.granted - 1
    step.notify_lane(queue, lane_key)
    lane_limits.hand_on(lane)
end

-- After a job went back from running to waiting, or the order changed: give the places to the jobs that come first, by
-- arrival in an ordered lane and by class in an unordered one.
function lane_limits.regrant(lane)
    while lane.places >= 0 do
        local best = next_of(lane)
        local weakest = best and weakest_of(lane)
        if not weakest then
            return
        end
        local first
        if lane.ordered then
            first = best.arrival < weakest.arrival
        else
            first = best.class < weakest.class
        end
        if not first then
            return
        end
        ungrant(weakest)
        lane.granted = lane.granted - 1
        lane_limits.grant(lane, best)
    end
end

-- A limit was lowered while jobs ran: revoke unstarted grants, newest first, until it holds.
function lane_limits.trim(lane)
    while lane.granted > lane.places and lane.places >= 0 do
        local weakest = weakest_of(lane)
        if not weakest then
            return
        end
        lane.granted = lane.granted - 1
        ungrant(weakest)
    end
end

-- Apply a new limit: a lower one revokes unstarted grants, newest first; a higher one grants at once.
function lane_limits.resize(lane, limit)
    lane.places = limit
    lane_limits.save_lane(lane)
    lane_limits.trim(lane)
    lane_limits.regrant(lane)
    lane_limits.hand_on(lane)
end

-- Whether a worker could start one more job of a class now; a job for any worker can always start.
local function takes(inbox, class)
    if not inbox then
        return true
    end
    local who = sessions.at(inbox)
    return who and who.state == 'live' and queue_cache.room(who.slots, sessions.running(who), class) > 0
end

-- The first of these waiting jobs that could start now, but not where `holder` waits.
local function first_able(seqs, holder)
    for _, seq in ipairs(seqs) do
        local e = job_record.get(seq)
        local expired = not e or (e.expires_at and e.expires_at <= S.now)
        if not expired and not e.gate and e.inbox ~= holder.inbox and takes(e.inbox, e.class) then
            return e
        end
    end
    return nil
end

-- Unordered lanes: a grant that waited 2 s for a worker that cannot start the job goes to the next job that can run.
function lane_limits.move_idle_grants(limit)
    local moved = 0
    local idle = S.now - IDLE_GRANT_SECONDS
    for _, seq in ipairs(step.page(S.p .. 'holding', idle)) do
        if moved >= limit then
            break
        end
        local holder = job_record.get(seq)
        local lane = holder and holder.lane and holder.granted and lane_limits.lane(holder.queue, holder.lane_key)
        -- Ignore grants of lanes in which no job waits.
        local wanted = lane and lane.places >= 0 and not lane.ordered and call('EXISTS', S.p .. 'wait:' .. lane.name) == 1
        if wanted and (holder.gate or not takes(holder.inbox, holder.class)) then
            local waiting = S.p .. 'wait:' .. lane.name
            local e = first_able(call('ZRANGE', waiting, 0, MOST_LOOKED_AT - 1), holder)
                or first_able(step.page(waiting, '+inf', MOST_LOOKED_AT), holder)
            if e then
                ungrant(holder)
                lane.granted = lane.granted - 1
                lane_limits.grant(lane, e)
                moved = moved + 1
            end
        end
    end
    return moved
end
