-- Fair order between lanes (see `fairlane.model.fairness`). A domain is a queue, a class and an inbox, and has a clock;
-- a flow is a lane in a domain. The flows with claimable jobs stand in the line of their domain, by tag.

local function domain_read(queue, class, inbox, key, clock)
    local found = {
        key = key,
        queue = queue,
        class = class,
        inbox = inbox,
        clock = tonumber(clock or 0),
        line = S.p .. 'line:' .. key,
        -- wakes the workers that could start its jobs
        topic = inbox ~= '' and not keys.is_unknown(inbox) and 'worker:' .. inbox or 'queue:' .. queue_cache.number(queue).name,
    }
    if not clock then
        write_buffer.hset(S.p .. 'flow', key, 0)
        call('SADD', S.p .. 'domains:' .. queue, key)
        if inbox ~= '' then
            call('SADD', S.p .. 'inbox:' .. inbox, class .. '.' .. queue)
        end
    end
    S.domains[key] = found
    return found
end

-- A domain and its clock, cached for the step.
function fair_order.domain(queue, class, inbox)
    local last = S.domain
    if last and last.class == class and last.queue == queue and last.inbox == inbox then
        return last
    end
    local key = keys.domain(queue, class, inbox)
    S.domain = S.domains[key] or domain_read(queue, class, inbox, key, write_buffer.hget(S.p .. 'flow', key))
    return S.domain
end

function fair_order.set_clock(domain, clock)
    domain.clock = clock
    write_buffer.hset(S.p .. 'flow', domain.key, clock)
end

-- A stored flow: finish, tag in line, arrival of its first job, and that job.
function fair_order.read_flow(raw)
    local finish, tag, head, first = parts('>dddHc0', raw)
    if tag < 0 then
        return finish
    end
    return finish, tag, head, first
end

function fair_order.flow_bytes(finish, tag, head, first)
    return bytes('>dddHc0', finish, tag or -1, head or -1, #(first or ''), first or '')
end

local function flow_read(domain, lane, key, raw)
    local finish, tag, head, first = 0, nil, nil, nil
    if raw then
        finish, tag, head, first = fair_order.read_flow(raw)
    end
    -- All fields at once: a growing table is reallocated several times.
    local found = {
        key = key, domain = domain, lane = lane, ready = S.p .. 'ready:' .. key, finish = finish, tag = tag, head = head,
        first = first, stored_tag = tag, stored_head = head, stored_member = false, single = false, dirty = not raw,
    }
    S.flows[key] = found
    return found
end

-- The flow of a lane in a domain, created when it is new.
function fair_order.flow(queue, class, inbox, lane)
    local last = S.flow
    if last and last.lane == lane then
        local domain = last.domain
        if domain.class == class and domain.queue == queue and domain.inbox == inbox then
            return last
        end
    end
    local domain_key = keys.domain(queue, class, inbox)
    local key = keys.flow(domain_key, lane)
    if not S.flows[key] then
        local domain, stored = S.domains[domain_key], nil
        if domain then
            stored = write_buffer.hget(S.p .. 'flow', key)
        else
            local both = write_buffer.hmget(S.p .. 'flow', { domain_key, key })
            domain, stored = domain_read(queue, class, inbox, domain_key, both[1]), both[2]
        end
        flow_read(domain, lane, key, stored)
    end
    S.flow = S.flows[key]
    return S.flow
end

-- Read the flows of these lanes together.
function fair_order.load_flows(domain, lanes)
    local missing, fields = {}, {}
    for _, each in ipairs(lanes) do
        local key = keys.flow(domain.key, each.lane)
        if not S.flows[key] then
            missing[#missing + 1], fields[#fields + 1] = each.lane, key
        end
    end
    for i, raw in ipairs(write_buffer.hmget(S.p .. 'flow', fields)) do
        flow_read(domain, missing[i], fields[i], raw)
    end
end

-- The flow of a live job.
function fair_order.flow_of(e)
    return fair_order.flow(e.queue, e.class, e.inbox or '', e.lane_key or '')
end

function fair_order.line_member(head, lane)
    return keys.line_member(write_buffer.text(head), lane)
end

local function put_in_line(f)
    if f.stored_tag == f.tag and f.stored_head == f.head then
        return
    end
    local line, member = f.domain.line, f.stored_head == f.head and f.stored_member
    if f.stored_tag and f.stored_head ~= f.head then
        write_buffer.zrem(line, f.stored_member or fair_order.line_member(f.stored_head, f.lane))
    end
    if f.tag then
        member = member or fair_order.line_member(f.head, f.lane)
        write_buffer.zadd(line, f.tag, member)
    end
    f.stored_tag, f.stored_head, f.stored_member = f.tag, f.head, member
end

-- Update the line for the flows that this step has changed, because the line is read from the server. The flows
-- themselves are written when the step ends.
function fair_order.save_lines()
    for _, flow in pairs(S.flows) do
        if flow.dirty then
            put_in_line(flow)
        end
    end
end

function fair_order.save_flows()
    for _, flow in pairs(S.flows) do
        if flow.dirty then
            put_in_line(flow)
            write_buffer.hset(S.p .. 'flow', flow.key, fair_order.flow_bytes(flow.finish, flow.tag, flow.head, flow.first))
            flow.dirty = false
        end
    end
end

-- Write all flows and drop them from the cache.
function fair_order.put_flows()
    fair_order.save_flows()
    S.flows, S.flow = {}, nil
end

local SCALE = 1000

function fair_order.charge(cost, weight)
    -- Python rounds halves to even.
    local exact = SCALE * cost / weight
    local whole = math.floor(exact)
    local rest = exact - whole
    if rest > 0.5 or (rest == 0.5 and whole % 2 == 1) then
        whole = whole + 1
    end
    return math.max(1, whole)
end

-- Read the flows of these jobs together.
function fair_order.load(jobs)
    local domains = {}
    for _, e in pairs(jobs) do
        local domain = fair_order.domain(e.queue, e.class, e.inbox or '')
        local lanes = domains[domain] or {}
        domains[domain] = lanes
        lanes[#lanes + 1] = { lane = e.lane_key or '' }
    end
    for domain, lanes in pairs(domains) do
        fair_order.load_flows(domain, lanes)
    end
end

-- Whether a flow is kept out of line because its lane is settling (see lane_limit_changes.lua).
local function is_held(flow)
    return queue_cache.settling(queue_cache.number(flow.domain.queue))[flow.lane]
end

-- Add a job to a flow, and notify workers if it is the first. Returns whether the flow was empty.
function fair_order.add(flow, arrival, member)
    if is_held(flow) then
        return false
    end
    local is_first = not flow.tag
    if is_first then
        flow.tag = math.max(flow.domain.clock, flow.finish)
        -- Only for the first job: for the others, workers were notified before or are busy.
        step.notify(flow.domain.topic)
    end
    if is_first or arrival < flow.head then
        flow.head, flow.first = arrival, member
        flow.dirty = true
    end
    return is_first
end

-- Add a job to its flow; an empty flow is buffered as a whole from now on.
local function join(queue, class, inbox, lane, arrival, member)
    local flow = fair_order.flow(queue, class, inbox, lane)
    if fair_order.add(flow, arrival, member) then
        write_buffer.begin(flow.ready)
    end
end

-- Make a job claimable; it is pending, granted and ungated. The caller saves it.
function fair_order.enter(e)
    join(e.queue, e.class, e.inbox or '', e.lane_key or '', e.arrival, write_buffer.text(e.seq))
    e.flow = true
    -- Only a job that no other worker can take can hold its lane's place idle; see `lane_limits.move_idle_grants`.
    e.granted_at = e.lane and e.inbox and S.now or nil
end

-- Remove a job from its flow before it has started. Nothing was charged for it.
function fair_order.withdraw(e)
    if not e.flow then
        return
    end
    local flow = fair_order.flow_of(e)
    e.flow, e.granted_at = nil, nil
    job_record.save(e)
    if flow.head == e.arrival then
        fair_order.find_head(flow)
    end
end

-- Find the next job of a flow after its first one has gone. The tag stays, because nothing was charged.
function fair_order.find_head(flow)
    local first = call('ZRANGE', flow.ready, 0, 0, 'WITHSCORES')
    flow.first, flow.head = first[1], first[2] and tonumber(first[2]) or nil
    if not flow.head then
        flow.tag = nil
    elseif not flow.tag then
        flow.tag = math.max(flow.domain.clock, flow.finish) -- its record was lost
    end
    flow.dirty = true
end

-- Refund the charge of an interrupted start, so that the job pays once in all.
function fair_order.give_back(e)
    local flow = fair_order.flow_of(e)
    flow.finish = math.max(0, flow.finish - (e.paid or 0))
    if flow.tag then
        flow.tag = math.max(flow.domain.clock, flow.finish)
    end
    flow.dirty = true
    e.paid = nil
end
