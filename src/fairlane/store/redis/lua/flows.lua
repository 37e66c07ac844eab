-- Fair order between lanes: entering and leaving the line of claimable jobs (see `fairlane.model.fairness`).

local SCALE = 1000

function flows.charge(cost, weight)
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
function flows.load(jobs)
    local domains = {}
    for _, e in pairs(jobs) do
        local domain = step.domain(e.queue, e.class, e.inbox or '')
        local lanes = domains[domain] or {}
        domains[domain] = lanes
        lanes[#lanes + 1] = { lane = e.lane_key or '' }
    end
    for domain, lanes in pairs(domains) do
        step.load_flows(domain, lanes)
    end
end

-- Whether a flow is kept out of line, because its lane settles (see limits.lua).
local function is_held(flow)
    return catalog.settling(catalog.number(flow.domain.queue))[flow.lane]
end

-- An arrival, the job `member`, stands in a flow; those are told who could start it. Returns whether nobody stood there before.
function flows.stand(flow, arrival, member)
    if is_held(flow) then
        return false
    end
    local is_first = not flow.tag
    if is_first then
        flow.tag = math.max(flow.domain.clock, flow.finish)
        -- Behind others, nobody need be told: who could start it was told of the first one, or is busy.
        step.tell(flow.domain.topic)
    end
    if is_first or arrival < flow.head then
        flow.head, flow.first = arrival, member
        flow.dirty = true
    end
    return is_first
end

-- Put an arrival into its flow; what stands there is gathered from now on.
local function join(queue, class, inbox, lane, arrival, member)
    local flow = step.flow(queue, class, inbox, lane)
    if flows.stand(flow, arrival, member) then
        writes.begin(flow.ready)
    end
end

-- Make a job claimable; the caller saves it. It is pending, granted and ungated.
function flows.enter(e)
    join(e.queue, e.class, e.inbox or '', e.lane_key or '', e.arrival, writes.text(e.seq))
    e.flow = true
    -- Only a job that somebody else cannot take can hold its lane's place idle; see `places.move_idle_grants`.
    e.granted_at = e.lane and e.inbox and S.now or nil
end

-- Take a job out of the line, before it has started. Nothing was charged for it, so nothing is owed.
function flows.withdraw(e)
    if not e.flow then
        return
    end
    local flow = step.flow_of(e)
    e.flow, e.granted_at = nil, nil
    entries.save(e)
    if flow.head == e.arrival then
        flows.find_head(flow)
    end
end

-- Look up the next job of a flow after its head has gone; its tag stays, because nobody has paid.
function flows.find_head(flow)
    local first = call('ZRANGE', flow.ready, 0, 0, 'WITHSCORES')
    flow.first, flow.head = first[1], first[2] and tonumber(first[2]) or nil
    if not flow.head then
        flow.tag = nil
    end
    flow.dirty = true
end

-- Return what an interrupted start had paid, so that starting again pays once in all.
function flows.give_back(e)
    local flow = step.flow_of(e)
    flow.finish = math.max(0, flow.finish - (e.paid or 0))
    if flow.tag then
        flow.tag = math.max(flow.domain.clock, flow.finish)
    end
    flow.dirty = true
    e.paid = nil
end
