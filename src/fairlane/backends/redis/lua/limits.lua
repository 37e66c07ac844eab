-- A lane gets a limit, or loses it: every job of it changes, whoever waits, runs or waits for its retry. Those with tickets do so
-- by lists, because an operator pauses just that lane in which a hundred thousand wait.

local PAGE = 1000

-- Look at the jobs of a lane that are not over, page by page: `visit` gets their numbers and records, false for what is over.
local function each_page(queue, key, visit)
    local set, after = S.p .. 'by:lane:' .. keys.lane(queue, key), '-inf'
    while true do
        local members = call('ZRANGEBYSCORE', set, after, '+inf', 'LIMIT', 0, PAGE)
        visit(members, writes.hmget(S.live, members))
        if #members < PAGE then
            return
        end
        after = '(' .. members[PAGE]
    end
end

-- Change the jobs of a lane that have tickets: `visit` gets each of them, and lists to put it in: `lives`, its new ticket;
-- `waits` and `got`, it waits for a place now, or does not any more; by class `ready` and `left`, it stands in its flow now, or
-- does not any more. The others are returned, as entries.
local function change_tickets(queue, key, name, visit)
    local others = {}
    each_page(queue, key, function(members, raws)
        local lists = { lives = {}, waits = {}, got = {}, ready = { [0] = {}, {}, {} }, left = { [0] = {}, {}, {} } }
        for i, raw in ipairs(raws) do
            local member = members[i]
            if raw and tickets.is_ticket(raw) then
                entries.forget_indexed(member)
                visit(lists, member, raw)
            elseif raw then
                others[#others + 1] = member
            end
        end
        writes.hset_all(S.live, lists.lives)
        writes.zadd_all(S.p .. 'wait:' .. name, lists.waits)
        writes.zrem_all(S.p .. 'wait:' .. name, lists.got)
        for class = 0, 2 do
            writes.zadd_all(keys.ready(queue, class, key), lists.ready[class])
            writes.zrem_all(keys.ready(queue, class, key), lists.left[class])
        end
    end)
    return entries.all(others)
end

-- One that has no ticket waits for a place now, or has one if it runs.
local function enter(lane, e)
    if e.state == RUNNING then
        lane.granted = lane.granted + 1
    else
        flows.withdraw(e)
    end
    e.lane, e.granted, e.rank = true, e.state == RUNNING or nil, entries.rank(lane.ordered, e.class)
    entries.save(e)
end

-- A lane that had no limit has one now. Running jobs have their places; the others wait, and get those that are left in the
-- order of the lane.
function limits.establish(queue, key, terms)
    local lane, moved = step.lane_for(queue.number, key, terms), {}
    local others = change_tickets(queue.number, key, lane.name, function(lists, member, raw)
        local class, arrival = tickets.standing(raw)
        local rank, is_waiting = entries.rank(lane.ordered, class), tickets.is_waiting(raw)
        local lives, waits, left = lists.lives, lists.waits, lists.left[class]
        lives[#lives + 1], lives[#lives + 2] = member, tickets.placed(raw, true, rank, not is_waiting)
        if is_waiting then
            waits[#waits + 1], waits[#waits + 2] = entries.turn(rank, arrival), member
            left[#left + 1] = member
            moved[class] = true
        else
            lane.granted = lane.granted + 1
        end
    end)
    for class in pairs(moved) do
        flows.find_head(step.flow(queue.number, class, '', key))
    end
    for _, e in ipairs(others) do
        if e.state ~= SCHEDULED then
            enter(lane, e)
        end
    end
    places.hand_on(lane)
end

-- The lane has no limit any more: everybody in it may start.
function limits.abolish(lane)
    local queue, key, first = lane.queue, lane.key, {}
    local others = change_tickets(queue, key, lane.name, function(lists, member, raw)
        local class, arrival, granted = tickets.standing(raw)
        local lives, got, ready = lists.lives, lists.got, lists.ready[class]
        lives[#lives + 1], lives[#lives + 2] = member, tickets.placed(raw, false, nil, true)
        if not granted then
            got[#got + 1], ready[#ready + 1], ready[#ready + 2] = member, arrival, member
            if not first[class] or arrival < first[class].arrival then
                first[class] = { arrival = arrival, member = member }
            end
        end
    end)
    for class, each in pairs(first) do
        flows.stand(step.flow(queue, class, '', key), each.arrival, each.member)
    end
    for _, e in ipairs(others) do
        -- Expired jobs too: in line a claim finds and cancels them. An expired turn would be started, so it is left out.
        if e.lane and not e.granted and (not e.waiter or not e.expires_at or e.expires_at > S.now) then
            places.grant(lane, e)
        end
        -- One that waits for its retry has kept its place.
        if e.lane then
            e.lane, e.rank, e.granted, e.granted_at = nil, nil, true, nil
            entries.save(e)
        end
    end
    step.drop_lane(lane)
end
