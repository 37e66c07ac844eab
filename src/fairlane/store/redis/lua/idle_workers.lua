-- Workers that have asked and got nothing. The next job that is sent alone (enqueue_one.lua) starts at one of them in the step that
-- stores it, and is sent to him (`ahead.py`): the answer to his next claim, before he asks. He need not come back for it, which
-- took a third of the time from sending a job to starting it (measured).
--
-- Nothing depends on its getting there. A claim that was answered ahead is answered once more when it comes (`claim.claim`),
-- and a renewal on its way meanwhile knows only of smaller numbers. All this is kept in memory alone: whoever is forgotten by
-- a restart asks again within a second. Another version of the library knows nothing of it: what that puts in line for a worker
-- who waits here may start after what is sent to him here, until he asks again.

local FRESH_SECONDS = 2 -- he asks every second; who has not may be frozen, and others would start the job at once
local MOST = 1000 -- of one namespace
local NOTHING = { [0] = 0, 0, 0 } -- what an idle worker runs, by class
local ANY = 'any' -- class of what comes to a worker's inbox
-- By prefix: generation; count; sessions, by id: see `idle_workers.wait`; topics, by topic and class: who wants such jobs.
local known = {}

local function here()
    local found = known[S.p]
    if not found or found.generation ~= S.generation or found.count >= MOST then
        found = { generation = S.generation, count = 0, sessions = {}, topics = {} }
        known[S.p] = found
    end
    return found
end

-- He asks again, or is told: what comes now he is not sent.
function idle_workers.forget(session)
    local found = known[S.p]
    local waits = found and found.sessions[session]
    if not waits then
        return
    end
    found.sessions[session], found.count = nil, found.count - 1
    for topic, classes in pairs(waits.wants) do
        for class in pairs(classes) do
            found.topics[topic][class][session] = nil
        end
    end
    if found.count == 0 then
        known[S.p] = nil
    end
end

local function wants_of(who, asks)
    local wants = { ['worker:' .. keys.worker(who.pool, who.index)] = { [ANY] = true } }
    for _, ask in ipairs(asks) do
        local queue, class, most, below = ask[1], ask[2], ask[3], ask[4]
        local room = queue_cache.room(who.slots, NOTHING, class) > 0 and most > 0 and (not below or below > 0)
        if queue and room then
            local topic = 'queue:' .. queue
            wants[topic] = wants[topic] or {}
            wants[topic][class] = true
        end
    end
    return wants
end

-- How a session is stored whose claim of this number was answered ahead.
local function answered(who, number)
    who.claim, who.ahead = number, true
    return pack(who)
end

-- Remember that a worker who runs nothing got nothing for claim `number`: he may be sent what he has asked for. What that
-- takes is made ready now, because then somebody waits for it.
function idle_workers.wait(who, number, asks)
    local found, wants = here(), wants_of(who, asks)
    for topic, classes in pairs(wants) do
        local of_topic = found.topics[topic] or {}
        found.topics[topic] = of_topic
        for class in pairs(classes) do
            of_topic[class] = of_topic[class] or {}
            of_topic[class][who.id] = true
        end
    end
    found.sessions[who.id] = {
        id = who.id,
        wants = wants,
        fresh = S.mono + FRESH_SECONDS,
        number = number + 1,
        record = call('HGET', S.p .. 'session', who.id),
        next_record = answered(who, number + 1),
        held = S.p .. 'held:' .. who.id .. ':',
        sent = S.p .. 'ahead:' .. who.id,
        lease_ends = who.expires,
    }
    found.count = found.count + 1
end

-- There is work of this topic. Those who wait for some are told, and come for it in the order that holds for all.
function idle_workers.wake(topic)
    local found = known[S.p]
    for _, sessions in pairs(found and found.topics[topic] or {}) do
        for session in pairs(sessions) do
            idle_workers.forget(session)
        end
    end
end

-- Whether he can still be sent a job. Past `call`: nothing is gathered in the step of a single job.
local function is_there(waits)
    -- The connection of a process ends with it, and its lease much later.
    if waits.fresh < S.mono or redis.call('PUBSUB', 'NUMSUB', waits.sent)[2] == 0 then
        return false
    end
    local record = redis.call('HGET', S.catalog.keys.session, waits.id)
    if record == waits.record then
        return waits.lease_ends > S.mono
    end
    -- He has renewed his lease since, or is no more.
    local who = record and unpacked(record)
    if not who or who.state ~= 'live' or who.expires <= S.mono or who.claim >= waits.number then
        return false
    end
    waits.next_record = answered(who, waits.number)
    return true
end

-- Somebody who waits for a job of this topic and class: id, number of his next claim, his record after it, and where what he
-- holds is kept. He waits no more.
function idle_workers.taker(topic, class)
    local found = known[S.p]
    local of_topic = found and found.generation == S.generation and found.topics[topic]
    for session in pairs(of_topic and of_topic[class] or {}) do
        local waits = found.sessions[session]
        idle_workers.forget(session)
        if is_there(waits) then
            return waits
        end
    end
    return nil
end
