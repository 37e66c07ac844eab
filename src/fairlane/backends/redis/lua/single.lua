-- One job that is sent alone, is due and for everybody, holds nothing and has no lane: the commonest call of all, and one that
-- somebody waits for. It does what `admission.enqueue` does for it, with nothing gathered, compared or looked up that is known:
-- half of the server's time for such a call went into that (measured). Whatever is not usual goes the other way.

local ANSWER = '>dHc0I4c0I4c0' -- number of the claim, topic, content, headers; then the ticket. See `ahead.py`

-- What every such job of a queue and class needs, kept with the settings of the queue. Not by `shared`: what a step has put
-- together may be of another namespace.
local function line_of(queue, class)
    local found = queue.single[class]
    if not found then
        local domain = keys.domain(queue.number, class, '')
        local flow = keys.flow(domain, '')
        found = {
            class = class,
            domain = domain,
            flow = flow,
            ready = S.p .. 'ready:' .. flow,
            line = S.p .. 'line:' .. domain,
            tally = keys.tally(queue.number),
            waiting = class .. 'p',
            running = class .. 'r',
            before = tickets.alike({ class = class }, queue.number),
            topic = 'queue:' .. queue.name,
            tasks = {},
        }
        queue.single[class] = found
    end
    return found
end

-- It waits. The first of its line takes its turn now, and those are told who could start it.
local function wait(at, names, member, arrival, ticket, clock, finish, tag)
    redis.call('HSET', names.live, member, ticket)
    redis.call('ZADD', at.ready, arrival, member)
    redis.call('HINCRBY', at.tally, at.waiting, 1)
    if tag < 0 then
        tag = math.max(clock, finish)
        redis.call('HSET', names.flow, at.flow, step.flow_bytes(finish, tag, arrival, member))
        redis.call('ZADD', at.line, tag, step.line_member(arrival, ''))
        redis.call('PUBLISH', names.topics, at.topic)
        idle.wake(at.topic)
    end
end

-- It starts at a worker who waits for it: what a claim would do, and what the claim would be answered.
local function start(at, names, id, member, ticket, clock, finish, taker, content, headers)
    local tag = math.max(clock, finish)
    local started = tickets.started(ticket, tickets.claim(taker.id, taker.number), PRICE)
    redis.call('HSET', names.live, member, started)
    redis.call('ZADD', taker.held .. at.class, member, member)
    redis.call('HINCRBY', at.tally, at.running, 1)
    redis.call('HSET', names.flow, at.domain, tag, at.flow, step.flow_bytes(tag + PRICE))
    redis.call('HSET', names.session, taker.id, taker.next_record)
    local answer = bytes(ANSWER, taker.number, #at.topic, at.topic, #content + #S.stamp, S.stamp .. content, #headers, headers)
    redis.call('LPUSH', taker.sent, answer .. started)
    if redis.call('PUBSUB', 'NUMSUB', names.jobs)[2] > 0 then
        redis.call('PUBLISH', names.jobs, 'job:' .. id)
    end
end

-- Store it; `after` is what comes last in its ticket. Returns false, and does nothing, if there is anything unusual about it.
function single.enqueue(id, name, class, task, after, content, headers)
    local queue = catalog.remembered(name)
    if not queue or queue.closed or queue.max_pending then
        return false
    end
    local at, names = line_of(queue, class), S.catalog.keys
    local of_task = at.tasks[task]
    if not of_task then
        if not S.catalog.tasks[queue.number .. ':' .. task] then
            return false
        end
        of_task = S.p .. 'by:task:' .. queue.number .. ':' .. task
        at.tasks[task] = of_task
    end
    local stored = redis.call('HMGET', names.flow, at.domain, at.flow)
    if not stored[1] then
        return false
    end
    local seq, arrival = step.new_seq(), step.next_arrival()
    local member, clock, finish, tag = writes.text(seq), tonumber(stored[1]), 0, -1
    if stored[2] then
        finish, tag = parts('>dd', stored[2])
    end
    if redis.call('HSETNX', names.id, id, member) == 0 then
        return false
    end
    redis.call('HSET', names.job, member, S.stamp .. content)
    redis.call('ZADD', names.alive, member, member)
    redis.call('ZADD', of_task, member, member)
    if headers ~= '' then
        redis.call('HSET', names.headers, member, headers)
    end
    local ticket = tickets.new(at.before, arrival, id, after)
    local may_start = tag < 0 and not queue.paused and not queue.slots
    local taker = may_start and idle.taker(at.topic, class)
    if taker then
        start(at, names, id, member, ticket, clock, finish, taker, content, headers)
    else
        wait(at, names, member, arrival, ticket, clock, finish, tag)
    end
    step.save_counters()
    return true
end
