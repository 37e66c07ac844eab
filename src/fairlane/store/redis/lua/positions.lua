-- What `fairlane.store.positions` needs to compute the positions of waiting jobs. Places are counted by the
-- sorted sets themselves, so a long lane costs no more than a short one.

local NONE -- None in Python; an absent field would be missing
local FAR = 2 ^ 49
local MOST_RUNS = 101

local function or_none(value)
    if value == nil then
        return NONE
    end
    return value
end

local function number(value)
    return string.format('%.17g', value)
end

-- A worker's slots, those reserved for high and for normal, and its running jobs by class.
local function worker_of(who)
    local running = sessions.running(who)
    return { who.slots.total, who.slots.high, who.slots.normal, running[0], running[1], running[2] }
end

-- The live workers that serve a queue.
local function serving(queue)
    local found = {}
    for _, pool in ipairs(call('SMEMBERS', S.p .. 'pools')) do
        for _, who in ipairs(sessions.of_pool(pool)) do
            if who.state == 'live' and who.expires > S.mono and sessions.serves_queue(who, queue) then
                found[#found + 1] = who
            end
        end
    end
    return found
end

local function workers_of(queue)
    local found = serving(queue)
    for i, who in ipairs(found) do
        found[i] = worker_of(who)
    end
    return found
end

-- Whether one of these workers knows a task.
local function is_known(task, workers)
    for _, who in ipairs(workers) do
        if sessions.knows(who, task) then
            return true
        end
    end
    return false
end

-- Tasks with jobs that wait because sessions declined them, the longest waiting first.
function positions.declined(limit, most)
    local found, known = {}, {}
    for _, seq in ipairs(call('ZRANGE', S.p .. 'declined', 0, most - 1)) do
        local e = job_record.look(seq)
        local name = e.queue .. ' ' .. e.task
        if not known[name] and #found < limit then
            local queue = queue_cache.number(e.queue).name
            known[name] = { queue, e.task, 0, e.declined, is_known(e.task, serving(queue)) }
            found[#found + 1] = known[name]
        end
        if known[name] then
            known[name][3] = known[name][3] + 1
        end
    end
    return found
end

-- The median run time of the latest completed jobs of a queue.
local function seconds_of(queue)
    local times = {}
    for _, member in ipairs(call('ZREVRANGE', keys.ended(queue, STATE.COMPLETED), 0, MOST_RUNS - 1)) do
        local outcome = endings.get(tonumber(member))
        if outcome and outcome.started_at then
            times[#times + 1] = math.max(0, outcome.finished_at - outcome.started_at)
        end
    end
    table.sort(times)
    return times[math.floor(#times / 2) + 1]
end

function positions.queue(number_)
    local queue = queue_cache.number(number_)
    local pending, busy = {}, {}
    for class = CLASS.HIGH, CLASS.LOW do
        pending[class + 1] = step.tallied(number_, class, 'p')
        busy[class + 1] = step.tallied(number_, class, 'r') - step.tallied(number_, class, SLOTLESS)
    end
    return {
        id = number_,
        name = queue.name,
        settings = queue_cache.record(number_).settings or '{}',
        pending = pending,
        busy = busy,
        workers = workers_of(queue.name),
        seconds = or_none(seconds_of(number_)),
    }
end

-- How a queue is served, and how many lanes share that in a class.
function positions.service(name, class)
    NONE = cjson.null
    local queue = queue_cache.known(name)
    local lanes = call('ZCARD', S.p .. 'line:' .. keys.domain(queue.number, class, ''))
    return { queue = positions.queue(queue.number), lanes = lanes }
end

-- Waiting jobs of a job's lane in one class, up to an arrival.
local function count_class(e, ordered, class, bound)
    if e.lane then
        local base = ordered and 0 or class * job_record.RANK
        local lane, total = keys.lane(e.queue, e.lane_key), 0
        for _, set in ipairs({ 'wait:', 'hold:' }) do
            total = total + call('ZCOUNT', S.p .. set .. lane, number(base), '(' .. number(base + bound))
        end
        for each = ordered and 0 or class, ordered and 2 or class do
            total = total + call('ZCOUNT', keys.ready(e.queue, each, e.lane_key), '-inf', '(' .. number(bound))
        end
        return total
    end
    local total = call('ZCOUNT', S.p .. 'gated:' .. keys.lane(e.queue, e.lane_key or '') .. '|' .. class, '-inf', '(' .. number(bound))
    for _, domain in ipairs(call('SMEMBERS', S.p .. 'domains:' .. e.queue)) do
        if tonumber(string.match(domain, '^%d+%.(%d)%.')) == class then
            local flow = keys.flow(domain, e.lane_key or '')
            total = total + call('ZCOUNT', S.p .. 'ready:' .. flow, '-inf', '(' .. number(bound))
        end
    end
    return total
end

-- The place of a job among the waiting jobs of its lane, how many those are, and how many of its class come before it.
local function places_of(e, ordered)
    local before, everyone, lower = 0, 0, 0
    for class = CLASS.HIGH, CLASS.LOW do
        -- In an ordered lane every rank is 0, so one count covers all classes.
        if not (e.lane and ordered) or class == 0 then
            local all = count_class(e, ordered, class, FAR)
            everyone = everyone + all
            if e.lane and ordered then
                before = count_class(e, true, 0, e.arrival)
            elseif class < e.class then
                before, lower = before + all, lower + all
            elseif class == e.class then
                before = before + count_class(e, ordered, class, e.arrival)
            end
        end
    end
    return before + 1, everyone, ordered and before or before - lower
end

-- Until when a retrying job keeps a place of the lane, and the task of the first job that workers declined.
local function held_up(e)
    local soonest, task
    for _, seq in ipairs(call('ZRANGE', S.p .. 'hold:' .. keys.lane(e.queue, e.lane_key), 0, MOST_LOOKED_AT)) do
        local holder = job_record.look(seq)
        if holder and holder.due and (not soonest or holder.due < soonest) then
            soonest = holder.due
        end
        task = task or holder and holder.declined and holder.task
    end
    return soonest, task or nil
end

local function lane_waits(queue, lane, class, most)
    local base = lane.ordered and 0 or class * job_record.RANK
    local count = call('ZCOUNT', S.p .. 'wait:' .. keys.lane(queue, lane.key), number(base), '(' .. number(base + FAR))
    return math.min(most, count)
end

-- Finish and tag of a lane's flow, read only; nothing when it has none.
local function flow_at(domain, lane)
    local stored = write_buffer.hget(S.p .. 'flow', keys.flow(domain, lane))
    if stored then
        return fair_order.read_flow(stored)
    end
end

-- The lanes that compete with a job which has `own` jobs of its lane and class before it.
local function competing_lanes_of(e, own, limits)
    local domain = keys.domain(e.queue, e.class, e.inbox or '')
    local clock = call('HGET', S.p .. 'flow', domain)
    if not clock then
        return NONE
    end
    local line, mine = S.p .. 'line:' .. domain, e.lane_key or ''
    local own_finish, own_tag = flow_at(domain, mine)
    local active = math.min(limits.many, call('ZCARD', line))
    local limited = e.inbox and 0 or math.min(limits.many, call('SCARD', S.p .. 'lanes:' .. e.queue))
    local most = math.min(2 * own + 10, math.floor(limits.counted / math.min(limits.lanes, math.max(1, active + limited))))
    local ready, blocked = {}, {}
    local first = call('ZRANGE', line, 0, limits.lanes, 'WITHSCORES')
    for i = 1, #first, 2 do
        local key = string.sub(first[i], 17)
        if key ~= mine and #ready < limits.lanes then
            local set = S.p .. 'ready:' .. keys.flow(domain, key)
            local first_job = call('ZRANGE', set, 0, 0)[1]
            local head = first_job and job_record.look(first_job)
            local lane = key ~= '' and lane_limits.lane(e.queue, key)
            local waits = math.min(most, call('ZCARD', set)) + (lane and lane_waits(e.queue, lane, e.class, most) or 0)
            ready[#ready + 1] = { key, tonumber(first[i + 1]), head and head.cost or 1, lane and lane.places or NONE, waits }
        end
    end
    if limited > 0 then
        for _, key in ipairs(call('SRANDMEMBER', S.p .. 'lanes:' .. e.queue, limits.many)) do
            local finish, tag = flow_at(domain, key)
            local lane = lane_limits.lane(e.queue, key)
            if lane and key ~= mine and #blocked < limits.lanes and not tag then
                local waits = lane_waits(e.queue, lane, e.class, most)
                blocked[#blocked + 1] = { key, finish or NONE, math.max(0, lane.places), waits }
            end
        end
    end
    return {
        clock = tonumber(clock),
        finish = own_finish or 0,
        tag = or_none(own_tag),
        active = active,
        limited = limited,
        counted = most,
        ready = ready,
        blocked = blocked,
    }
end

local function waiting_job_of(e, queue, limits)
    local settles = queue_cache.settling(queue_cache.number(e.queue))[e.lane_key or '']
    if settles and e.state == STATE.PENDING then
        e.lane, e.granted, e.flow = true, nil, nil -- it waits for its lane, even if its record was already changed
    end
    local ordered = e.lane and queue_cache.terms(queue_cache.number(e.queue), e.lane_key).ordered or false
    if settles then
        ordered = lane_limits.lane(e.queue, e.lane_key).ordered
    end
    -- In an ordered lane a retrying job keeps its place; other scheduled jobs have none yet.
    local in_line = e.arrival and (e.state ~= STATE.SCHEDULED or e.lane)
    local place, of, own = nil, 0, 0
    if in_line then
        place, of, own = places_of(e, ordered)
    end
    local workers, known = nil, true
    if e.inbox and string.sub(e.inbox, -1) ~= '/' then
        local who = sessions.at(e.inbox)
        workers = who and who.expires > S.mono and { worker_of(who) } or {}
        known = not e.declined or (#workers > 0 and sessions.knows(who, e.task))
    elseif e.declined then
        known = is_known(e.task, serving(queue.name))
    end
    local before, retrying, awaited = 0, nil, nil
    if e.lane and not e.granted then
        retrying, awaited = held_up(e)
    elseif place == 1 and e.flow then
        local slots = 0
        for _, worker in ipairs(workers or queue.workers) do
            slots = slots + worker[1]
        end
        local flow = fair_order.flow_of(e)
        local rank = call('ZRANK', S.p .. 'line:' .. flow.domain.key, fair_order.line_member(flow.head, flow.lane))
        before = math.min(slots, rank or 0)
    end
    return {
        id = e.id,
        queue = e.queue,
        kind = e.kind or KIND.JOB,
        priority = e.class,
        state = e.state,
        gate = e.gate or 0,
        inbox = e.inbox or '',
        lane = or_none(e.lane_key),
        cost = e.cost or 1,
        limited = e.lane or false,
        ordered = ordered,
        granted = e.granted or false,
        due = or_none(e.due),
        place = or_none(place),
        of = of,
        own = own,
        flows_before = before,
        retry_until = or_none(retrying),
        awaited_task = or_none(awaited),
        workers = or_none(workers),
        competing = place and e.kind ~= KIND.TURN and competing_lanes_of(e, own, limits) or NONE,
        task = e.task,
        declined = e.declined and true or false,
        known = known,
        settling = settles or false,
    }
end

-- The waiting jobs among the ids, and their queues. `limits`: lanes to read, jobs to count, lanes to count.
function positions.of(ids, limits)
    NONE = cjson.null
    local queues, jobs, known = {}, {}, {}
    for _, id in ipairs(ids) do
        local e = job_record.by_id(id)
        if e and e.state ~= STATE.RUNNING then
            if not known[e.queue] then
                known[e.queue] = positions.queue(e.queue)
                queues[#queues + 1] = known[e.queue]
            end
            jobs[#jobs + 1] = waiting_job_of(e, known[e.queue], limits)
        end
    end
    return { now = S.now, queues = queues, jobs = jobs }
end
