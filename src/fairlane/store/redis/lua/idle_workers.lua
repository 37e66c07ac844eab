-- Workers whose last claim returned nothing. The next single job (enqueue_one.lua) starts at one of them in the step
-- that stores it, and is pushed to it (`push.py`) as the answer to its next claim. This saves a round trip, which was a
-- third of the time from enqueue to start (measured).
--
-- Nothing depends on the delivery. A claim that was answered by a push is answered again when it is made
-- (`claim.claim`), and a renewal sent meanwhile knows only smaller claim numbers. All this is in memory only: after a
-- restart, workers claim again within a second. Another version of the library does not share it: a job that the other
-- version puts in line for a worker may start after one that is pushed here, until that worker claims again.

local FRESH_SECONDS = 2 -- workers claim every second; one that has not may be frozen, and others would start the job at once
local MOST = 1000 -- of one namespace
local NOTHING = { [0] = 0, 0, 0 } -- what an idle worker runs, by class
local ANY = 'any' -- the class for jobs in a worker's inbox
-- By prefix: generation; count; sessions, by id: see `idle_workers.wait`; topics, by topic and class: the sessions that
-- want such jobs.
local known = {}

local function here()
    local found = known[S.p]
    if not found or found.generation ~= S.generation or found.count >= MOST then
        found = { generation = S.generation, count = 0, sessions = {}, topics = {} }
        known[S.p] = found
    end
    return found
end

-- Remove a session from the idle set: it claimed or was notified.
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

-- The record of a session whose claim of this number was answered by a push.
local function answered(who, number)
    who.claim, who.ahead = number, true
    return pack(who)
end

-- Add a worker that runs nothing and got nothing for claim `number`; it may be pushed a job that matches its asks.
-- Everything a push needs is prepared now, because a caller waits for the push.
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

-- There is work for this topic. The idle sessions that want it are notified and claim in the usual order.
function idle_workers.wake(topic)
    local found = known[S.p]
    for _, sessions in pairs(found and found.topics[topic] or {}) do
        for session in pairs(sessions) do
            idle_workers.forget(session)
        end
    end
end

-- Whether a job can still be pushed to a session. Past `call`: the step of a single job has no write buffer.
local function is_there(waits)
    -- The subscription ends with the process, and the lease much later.
    if waits.fresh < S.mono or redis.call('PUBSUB', 'NUMSUB', waits.sent)[2] == 0 then
        return false
    end
    local record = redis.call('HGET', S.cached.keys.session, waits.id)
    if record == waits.record then
        return waits.lease_ends > S.mono
    end
    -- The session may have renewed its lease since, or ended.
    local who = record and unpacked(record)
    if not who or who.state ~= 'live' or who.expires <= S.mono or who.claim >= waits.number then
        return false
    end
    waits.next_record = answered(who, waits.number)
    return true
end

-- An idle session that wants a job of this topic and class: its id, the number of its next claim, its record after that
-- claim, and the key of what it holds. Removes it from the idle set.
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
