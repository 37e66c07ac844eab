-- The claim: one decision over slots, reservations, queue limit, lanes, bindings and pauses, in fair order.
--
-- Only claimable jobs are looked at, through the flow whose tag is lowest, so the cost depends on what is claimed: not on the
-- backlog, not on the number of lanes, not on how many of them are blocked.

local MOST_EXPIRED = 100

-- What a worker is told of a job that it has claimed.
local function claimed_of(e)
    return {
        call('HGET', S.p .. 'job', e.seq),
        call('HGET', S.p .. 'headers', e.seq) or '',
        pack({ e.id, e.fence, e.attempt, e.class, e.suspect and true or false, e.lane and true or false, e.kind or 'job' }),
    }
end

local function add(answer, e)
    for _, part in ipairs(claimed_of(e)) do
        answer[#answer + 1] = part
    end
end

-- Start one job.
local function start(c, e, queue)
    local flow = step.flow_of(e)
    local weight = #queue.rules > 0 and catalog.terms(queue, e.lane_key or '').weight or 1
    local paid = flows.charge(e.cost or 1, weight)
    local tag = flow.tag
    if tag > flow.domain.clock then
        step.set_clock(flow.domain, tag)
    end
    flow.finish = tag + paid
    entries.move(e, RUNNING)
    e.session, e.claim = c.who.id, c.number
    e.fence = (e.fence or 0) + 1
    e.attempt = (e.attempt or 0) + 1
    e.started_at, e.paid, e.granted_at = S.now, paid, nil
    entries.save(e)
    flows.find_head(flow)
    if flow.tag then
        flow.tag = flow.finish
    end
    step.save_flow(flow)
    step.tell_job(e.id)
    if e.lane then
        step.tell('place:' .. queue.name .. '/' .. e.lane_key)
    end
    add(c.answer, e)
end

-- The flow that comes first in a domain.
local function first_flow(domain)
    local first = call('ZRANGE', S.p .. 'line:' .. domain, 0, 0)[1]
    return first and string.sub(first, 17)
end

-- Start up to `most` jobs of one domain, in fair order; returns how many.
local function from_domain(c, queue, class, inbox, most)
    if queue.paused then
        return 0
    end
    if queue.slots then
        most = math.min(most, catalog.room(queue.slots, dispatch.load(c, queue), class))
    end
    local domain, started = keys.domain(queue.number, class, inbox), 0
    while started < most do
        local lane = first_flow(domain)
        if not lane then
            break
        end
        local flow = step.flow(queue.number, class, inbox, lane)
        local seq = call('ZRANGE', S.p .. 'ready:' .. flow.key, 0, 0)[1]
        local e = entries.get(seq)
        if e.expires_at and e.expires_at <= S.now then
            if c.expired >= MOST_EXPIRED then
                break
            end
            c.expired = c.expired + 1
            outcomes.expire(e)
            step.save_flows()
        else
            start(c, e, queue)
            started = started + 1
        end
    end
    c.left = c.left - started
    c.running[class] = c.running[class] + started
    if c.loads[queue.number] then
        c.loads[queue.number][class] = c.loads[queue.number][class] + started
    end
    return started
end

-- What runs of a queue with a limit, by class.
function dispatch.load(c, queue)
    local found = c.loads[queue.number]
    if not found then
        step.flush_tally()
        found = {}
        for class = 0, 2 do
            found[class] = step.tallied(queue.number, class, 'r') - step.tallied(queue.number, class, SLOTLESS)
        end
        c.loads[queue.number] = found
    end
    return found
end

-- The inbox holds jobs of any queue: the queues take turns, in equal shares and then for the rest.
local function from_inbox(c, class, most)
    local inbox = keys.worker(c.who.pool, c.who.index)
    local queues = {}
    for _, name in ipairs(call('SMEMBERS', S.p .. 'inbox:' .. inbox)) do
        local of, queue = string.match(name, '^(%d)%.(%d+)$')
        if tonumber(of) == class and call('EXISTS', S.p .. 'line:' .. keys.domain(queue, class, inbox)) == 1 then
            queues[#queues + 1] = tonumber(queue)
        end
    end
    table.sort(queues)
    local count = #queues
    local share = math.ceil(most / math.max(1, count))
    for _, limit in ipairs({ share, most }) do
        for i = 1, count do
            local queue = queues[(i - 1 + c.number) % count + 1]
            if most > 0 then
                most = most - from_domain(c, catalog.number(queue), class, inbox, math.min(limit, most))
            end
        end
        if count < 2 then
            break
        end
    end
end

-- The jobs of the last claim that the session still holds, for who has lost the answer.
local function repeated(who, number)
    local answer = {}
    for class = 0, 2 do
        for _, e in ipairs(entries.all(call('ZRANGE', S.p .. 'held:' .. who.id .. ':' .. class, 0, -1))) do
            if e.claim == number then
                add(answer, e)
            end
        end
    end
    return answer
end

-- Who claims, or why he may not.
function dispatch.check(session, number)
    local who = presence.get(session)
    if not presence.is_present(who) then
        step.refuse('session_lost', 'this session is unknown, ended or declared dead; register a new one')
    end
    if number < who.claim then
        step.refuse('stale', 'claim ' .. number .. ' is older than the last one, ' .. who.claim)
    end
    return who
end

-- Start jobs for a worker, ask by ask. An ask is {queue or false, class, most, below or false}.
function dispatch.claim(who, number, total, asks)
    if number == who.claim then
        return repeated(who, number)
    end
    local c = { who = who, number = number, left = total, expired = 0, answer = {}, loads = {} }
    if who.state ~= 'live' or not who.slots or not who.index then
        return c.answer
    end
    c.running = presence.running(who)
    step.save_flows()
    for _, ask in ipairs(asks) do
        local name, class, most, below = ask[1], ask[2], ask[3], ask[4]
        most = math.min(most, c.left, catalog.room(who.slots, c.running, class))
        if below then
            most = math.min(most, below - c.running[class])
        end
        if most > 0 then
            if name then
                local queue = catalog.known(name)
                if queue then
                    from_domain(c, queue, class, '', most)
                end
            else
                from_inbox(c, class, most)
            end
        end
        if c.left <= 0 then
            break
        end
    end
    if #c.answer > 0 then
        -- Only then: an idle worker asks once a second, and nothing is lost when an empty answer is not repeated.
        who.claim = number
        step.put('session', who.id, who)
    end
    return c.answer
end
