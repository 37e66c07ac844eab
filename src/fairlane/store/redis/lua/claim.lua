-- The claim: one decision over slots, reservations, queue limits, lanes, bindings and pauses, in fair order.
--
-- Only claimable jobs are read, through the flow with the lowest tag. The cost depends on what is claimed, not on the
-- backlog, the number of lanes or how many of them are blocked.

local MOST_DROPPED = 100 -- jobs of one claim that do not start because they have expired or are damaged

-- The charge for starting a job, by the weight of its lane.
local function price(queue, lane, cost)
    local weight = #queue.rules > 0 and queue_cache.terms(queue, lane).weight or 1
    return cost == 1 and weight == 1 and PRICE or fair_order.charge(cost, weight)
end

function claim.note(c, member, records)
    local i = #c.members + 1
    c.members[i], c.records[i] = member, records
end

-- Start the first job of a flow; the caller moves the flow on.
local function start(c, e, member, flow, queue)
    local paid = price(queue, flow.lane, e.cost or 1)
    flow.finish = flow.tag + paid
    job_record.move(e, STATE.RUNNING)
    e.session, e.claim = c.who.id, c.number
    e.fence = (e.fence or 0) + 1
    e.attempt = (e.attempt or 0) + 1
    e.started_at, e.paid, e.granted_at = S.now, paid, nil
    job_record.save(e)
    step.notify_job(e.id)
    if e.lane then
        step.notify_lane(e.queue, e.lane_key)
    end
    claim.note(c, member, claim_answer.record_of(e))
end

-- Notify listeners that a job with this packed record starts.
function claim.notify_start(raw, queue, lane)
    step.notify_job(packed_job_record.id(raw))
    if packed_job_record.terms(raw) then
        step.notify_lane(queue, lane)
    end
end

-- `start` for a packed record. `write_started` writes the indexes of all such jobs together.
local function start_packed(c, raw, member, head, queue)
    local flow = head.flow
    local _, cost = packed_job_record.terms(raw)
    local paid = price(queue, flow.lane, cost)
    flow.finish = flow.tag + paid
    local packed, started, domain = packed_job_record.started(raw, c.claim_bytes, paid), c.started, flow.domain
    local count = started.count + 1
    started.count = count
    started.lives[2 * count - 1], started.lives[2 * count] = member, packed
    started.held[count] = member
    if not head.taken[1] then
        started.heads[#started.heads + 1] = head
    end
    head.taken[#head.taken + 1] = member
    job_record.forget_indexed(member)
    job_record.begun(domain.queue, flow.lane, 1)
    if step.has_listeners() then
        claim.notify_start(raw, domain.queue, flow.lane)
    end
    claim.note(c, member, packed)
end

-- Remove the started jobs from their flow.
local function leave(head)
    if head.taken[1] then
        write_buffer.zrem_all(head.flow.ready, head.taken)
        head.taken = {}
    end
end

-- Write the records and indexes of the started jobs that have packed records.
local function write_started(c, domain)
    local started = c.started
    for _, head in ipairs(started.heads) do
        leave(head)
    end
    if started.count > 0 then
        write_buffer.hset_all(S.live, started.lives)
        write_buffer.sadd_all(keys.held(c.who.id, domain.class), started.held)
        step.count(domain.queue, domain.class, 'p', -started.count)
        step.count(domain.queue, domain.class, 'r', started.count)
    end
end

-- The next `count` jobs of a flow and one more, with their arrivals. Jobs that this step added to an empty flow are
-- read from the write buffer: they may start before they are sent. In a lane that starts one job at a time there is
-- only the first.
local function next_of(flow, count)
    if flow.single then
        return { flow.first, flow.head }
    end
    return write_buffer.buffered(flow.ready) or call('ZRANGE', flow.ready, 0, count, 'WITHSCORES')
end

-- The first flows of a domain, `line`, with the next jobs of each: as many as start if all flows start equally many.
local function heads_of(domain, line, most)
    local found = {}
    for i = 1, #line, 2 do
        found[#found + 1] = { lane = sub(line[i], 17), member = line[i] }
    end
    fair_order.load_flows(domain, found)
    local queue = queue_cache.number(domain.queue)
    local page, seqs = math.ceil(most / math.max(1, #found)), {}
    for _, head in ipairs(found) do
        head.page, head.taken = page, {}
        head.flow = fair_order.flow(domain.queue, domain.class, domain.inbox, head.lane)
        head.flow.single, head.flow.stored_member = queue_cache.terms(queue, head.lane).limit == 1, head.member
        head.jobs, head.at = next_of(head.flow, page), 1
        for i = 1, math.min(2 * page, #head.jobs), 2 do
            seqs[#seqs + 1] = head.jobs[i]
        end
    end
    local known = {}
    for i, raw in ipairs(write_buffer.hmget(S.live, seqs)) do
        known[seqs[i]] = raw
    end
    return found, known
end

-- Advance a flow whose first job has started.
local function move_on(head)
    local flow = head.flow
    head.at = head.at + 2
    if head.at > #head.jobs and #head.jobs > 2 * head.page then
        leave(head)
        head.jobs, head.at = next_of(flow, head.page), 1
    end
    local arrival = head.jobs[head.at + 1]
    flow.first, flow.head = head.jobs[head.at], arrival and tonumber(arrival) or nil
    flow.tag = flow.head and flow.finish or nil
    flow.dirty = true
end

-- Insert a flow that has advanced: `heads` are in order from `first` on.
local function put_back(heads, first, head)
    local flow, at = head.flow, #heads
    while at >= first do
        local other = heads[at].flow
        if other.tag < flow.tag or (other.tag == flow.tag and other.head < flow.head) then
            break
        end
        at = at - 1
    end
    table.insert(heads, at + 1, head)
end

-- Fail the first job of a flow because its record cannot be read. Whatever brought the claim to it goes from the
-- indexes in any case, also when the job is long final or the flow has none: the claim looks again.
local function fail(queue, domain, head)
    local flow, member = head.flow, head.jobs[head.at]
    write_buffer.zrem(domain.line, flow.stored_member)
    flow.stored_tag, flow.stored_head, flow.stored_member = nil, nil, false
    if member then
        local lane, arrival = flow.lane, tonumber(head.jobs[head.at + 1])
        local limited = lane ~= '' and lane_limits.lane(queue.number, lane)
        damage.fail(member, {
            queue = queue.number, class = domain.class, lane_key = lane ~= '' and lane or nil, arrival = arrival,
            inbox = domain.inbox ~= '' and domain.inbox or nil, state = STATE.PENDING, flow = true, granted = true, lane = limited and true or nil,
            rank = limited and job_record.rank(limited.ordered, domain.class) or nil, sets = { flow.ready },
        })
    end
    fair_order.find_head(flow)
end

-- Start up to `most` jobs of one domain in fair order. Returns how many, and whether to call again because a job had
-- expired or was damaged.
local function take(c, queue, domain, most)
    local line = call('ZRANGE', domain.line, 0, most - 1, 'WITHSCORES')
    local batch = 0
    if #line == 2 * most then
        batch = claim_batch.one_of_each(c, queue, domain, line)
    elseif #line == 2 then
        batch = claim_batch.many_of_one(c, queue, domain, line[1], line[2], most)
    end
    if batch > 0 or c.full then
        return batch, false
    end
    local heads, known = heads_of(domain, line, most)
    c.started = { count = 0, lives = {}, held = {}, heads = {} }
    local first, started = 1, 0
    local clock = domain.clock
    local expired, broken
    while started < most and heads[first] and not expired and not broken do
        local head = heads[first]
        local member = head.jobs[head.at]
        local raw = member and (known[member] or write_buffer.hget(S.live, member))
        local is_packed = packed_job_record.is_whole(raw)
        local e = not is_packed and raw and damage.entry(raw, member)
        if not (is_packed or e) then
            broken = head
        elseif not (e and e.expires_at and e.expires_at <= S.now) and claim_answer.fitting(c, { member }) == 0 then
            break
        elseif e and e.expires_at and e.expires_at <= S.now then
            expired = member
        else
            domain.clock = math.max(domain.clock, head.flow.tag)
            if e then
                start(c, e, member, head.flow, queue)
            else
                start_packed(c, raw, member, head, queue)
            end
            started = started + 1
            move_on(head)
            heads[first] = false
            first = first + 1
            if head.flow.tag then
                put_back(heads, first, head)
            end
        end
    end
    write_started(c, domain)
    if domain.clock > clock then
        fair_order.set_clock(domain, domain.clock)
    end
    fair_order.save_lines()
    if not (expired or broken) or c.dropped == MOST_DROPPED then
        return started, false
    end
    c.dropped = c.dropped + 1
    if expired then
        endings.expire(job_record.get(expired))
    else
        fail(queue, domain, broken)
    end
    fair_order.save_lines()
    return started, true
end

-- `take` within the limit of the queue.
local function from_domain(c, queue, class, inbox, most)
    if queue.paused then
        return 0
    end
    if queue.slots then
        most = math.min(most, queue_cache.room(queue.slots, claim.load(c, queue), class))
    end
    local domain, started, again = fair_order.domain(queue.number, class, inbox), 0, true
    while again and started < most and not c.full do
        local more
        more, again = take(c, queue, domain, most - started)
        started = started + more
    end
    c.left = c.left - started
    c.running[class] = c.running[class] + started
    if c.loads[queue.number] then
        c.loads[queue.number][class] = c.loads[queue.number][class] + started
    end
    return started
end

-- Running jobs of a limited queue, by class.
function claim.load(c, queue)
    local found = c.loads[queue.number]
    if not found then
        step.flush_tally()
        found = {}
        for class = CLASS.HIGH, CLASS.LOW do
            found[class] = step.tallied(queue.number, class, 'r') - step.tallied(queue.number, class, SLOTLESS)
        end
        c.loads[queue.number] = found
    end
    return found
end

-- Declined jobs of tasks that the session knows, in queues that it serves, as {queue, inbox}. Cached in `c.known` for
-- all classes.
local function unknown_to_others(c)
    if not c.known then
        c.known = {}
        for _, name in ipairs(call('SMEMBERS', S.p .. 'unknown')) do
            local queue, task = string.match(name, '^(%d+) (.*)$')
            queue = tonumber(queue)
            if sessions.serves_queue(c.who, queue_cache.number(queue).name) and sessions.knows(c.who, task) then
                c.known[#c.known + 1] = { queue, keys.unknown(task) }
            end
        end
    end
    return c.known
end

local function has_line(queue, class, inbox)
    return call('EXISTS', S.p .. 'line:' .. keys.domain(queue, class, inbox)) == 1
end

-- The inbox holds jobs of any queue. The queues alternate: first equal shares, then whatever is left. Declined jobs of
-- tasks that the session knows take part as if each of those tasks were a queue of the inbox.
local function from_inbox(c, class, most)
    local inbox = keys.worker(c.who.pool, c.who.index)
    local sources = {}
    for _, name in ipairs(call('SMEMBERS', S.p .. 'inbox:' .. inbox)) do
        local of, queue = string.match(name, '^(%d)%.(%d+)$')
        if tonumber(of) == class and has_line(queue, class, inbox) then
            sources[#sources + 1] = { tonumber(queue), inbox }
        end
    end
    for _, source in ipairs(unknown_to_others(c)) do
        if has_line(source[1], class, source[2]) then
            sources[#sources + 1] = source
        end
    end
    table.sort(sources, function(a, b)
        return a[1] < b[1] or (a[1] == b[1] and a[2] < b[2])
    end)
    local count = #sources
    local share = math.ceil(most / math.max(1, count))
    for _, limit in ipairs({ share, most }) do
        for i = 1, count do
            local source = sources[(i - 1 + c.number) % count + 1]
            if most > 0 and not c.full then
                most = most - from_domain(c, queue_cache.number(source[1]), class, source[2], math.min(limit, most))
            end
        end
        if count < 2 then
            break
        end
    end
end

-- The jobs of the last claim that the session still holds, for a client that lost the answer.
local function repeated(who, number)
    local members, records = {}, {}
    for class = CLASS.HIGH, CLASS.LOW do
        local of_class = {}
        for _, e in ipairs(job_record.all(call('SMEMBERS', keys.held(who.id, class)))) do
            if e.claim == number then
                of_class[#of_class + 1] = e
            end
        end
        table.sort(of_class, function(a, b)
            return a.arrival < b.arrival
        end)
        for _, e in ipairs(of_class) do
            members[#members + 1], records[#records + 1] = write_buffer.text(e.seq), claim_answer.record_of(e)
        end
    end
    return claim_answer.parts_of(members, records)
end

-- The session that claims. Refuses an unknown or ended session, and a claim number that is too old.
function claim.check(session, number)
    local who = sessions.get(session)
    if not sessions.is_present(who) then
        step.refuse('session_lost', 'this session is unknown, ended or declared dead; register a new one')
    end
    if number < who.claim then
        step.refuse('stale', 'claim ' .. number .. ' is older than the last one, ' .. who.claim)
    end
    return who
end

-- Start jobs for a worker, ask by ask. An ask is {queue or false, class, most, below or false}. `accepts_push`: the
-- next claim may be answered by a push.
function claim.claim(who, number, total, asks, accepts_push, most_bytes)
    idle_workers.forget(who.id)
    local answer, was_ahead = {}, who.ahead
    who.ahead = nil
    if number == who.claim then
        answer = repeated(who, number)
        if not was_ahead then
            return answer
        end
        -- A pushed answer does not cover jobs that came after it. Claim those now under the same number, but only once.
        step.put('session', who.id, who)
    end
    local c = { who = who, number = number, left = total - #answer / 3, dropped = 0, members = {}, records = {}, loads = {} }
    c.most_bytes, c.bytes, c.contents, c.headers = most_bytes or math.huge, 0, {}, {}
    if who.state ~= 'live' or not who.slots or not who.index then
        return answer
    end
    c.running, c.claim_bytes = sessions.running(who), packed_job_record.claim(who.id, number)
    fair_order.save_lines()
    for _, ask in ipairs(asks) do
        local name, class, most, below = ask[1], ask[2], ask[3], ask[4]
        most = math.min(most, c.left, queue_cache.room(who.slots, c.running, class))
        if below then
            most = math.min(most, below - c.running[class])
        end
        if most > 0 then
            if name then
                local queue = queue_cache.known(name)
                if queue then
                    from_domain(c, queue, class, '', most)
                end
            else
                from_inbox(c, class, most)
            end
        end
        if c.left <= 0 or c.full then
            break
        end
    end
    if #c.members == 0 and #answer == 0 and #S.damaged == 0 then
        local is_idle = c.running[0] + c.running[1] + c.running[2] == 0
        if accepts_push and is_idle and total > 0 and c.dropped < MOST_DROPPED then
            idle_workers.wait(who, number, asks)
        end
        return {}
    end
    -- Not for an empty answer: an idle worker claims every second, and an empty answer need not be repeatable.
    if #c.members > 0 or #answer > 0 then
        who.claim = number
        step.put('session', who.id, who)
    end
    for _, id in ipairs(S.damaged) do
        for _, part in ipairs({ '', '', pack({ id }) }) do
            answer[#answer + 1] = part
        end
    end
    for _, part in ipairs(claim_answer.parts_of(c.members, c.records, c.contents, c.headers)) do
        answer[#answer + 1] = part
    end
    return answer
end
