-- Recomputes all derived data from the job records.

local function compare(differences, what, was, is)
    if was ~= is then
        differences[#differences + 1] = what .. ' was ' .. tostring(was) .. ', is ' .. tostring(is)
    end
end

-- Account for a claimable job in its flow: it may be the first one.
local function count_flow(heads, e)
    if e.flow and not e.session then
        local flow = fair_order.flow_of(e)
        if not heads[flow] or e.arrival < heads[flow].arrival then
            heads[flow] = e
        end
    end
end

local function count_lane(waiting, e)
    if e.lane_key and e.state ~= STATE.SCHEDULED then
        local of_queue = waiting[e.queue] or {}
        waiting[e.queue] = of_queue
        local waits = e.state == STATE.PENDING
        of_queue[e.lane_key] = (of_queue[e.lane_key] or 0) + job_record.backlog(waits and 1 or 0, waits and 0 or 1)
    end
end

-- A job that is not final holds its unique key.
local function check_unique(differences, e)
    if e.uniq then
        local field = e.task .. '\0' .. e.uniq
        local holder = step.get('unique', field)
        if not holder or holder.seq ~= e.seq then
            compare(differences, 'job ' .. e.id .. ': unique value held by', holder and holder.id, e.id)
            step.put('unique', field, { seq = e.seq, id = e.id })
        end
    end
end

local function is_held(set)
    return string.sub(set, #S.p + 1, #S.p + 5) == 'held:'
end

-- The members of a set that may contain live jobs.
local function members_of(set)
    if set == S.alive then
        return id_sets.all(set)
    elseif is_held(set) then
        return call('SMEMBERS', set)
    end
    return call('ZRANGE', set, 0, -1)
end

-- Whether a job is in an id set. `known`: sets that were read before.
local function is_in(known, set, seq)
    if not known[set] then
        known[set] = {}
        for _, member in ipairs(members_of(set)) do
            known[set][member] = true
        end
    end
    return known[set][seq]
end

-- Fail jobs whose records are missing or cannot be read, before anything is computed from them.
local function end_damaged(differences)
    local found = {}
    for _, seqs in ipairs({ call('HKEYS', S.live), id_sets.all(S.alive), call('ZRANGE', S.p .. 'later', 0, -1) }) do
        for _, seq in ipairs(seqs) do
            -- A number without any record is removed by `drop_strangers`.
            local is_job = write_buffer.hget(S.live, seq) or write_buffer.hget(S.p .. 'job', seq)
            if is_job and not found[seq] and not job_record.look(seq) then
                found[seq] = true
                damage.fail(seq, {})
                differences[#differences + 1] = 'number ' .. seq .. ': the record of the job cannot be read'
            end
        end
    end
    if next(found) then
        step.flush()
        S.live, S.alive = S.p .. 'live', S.p .. 'alive/'
    end
end

-- The counters, lanes and flows that follow from the live jobs; each job is added to the sets it belongs to. `belongs`:
-- the members of each set.
local function count_live(differences)
    local tallies, granted, heads, waiting, belongs, known, jobs = {}, {}, {}, {}, {}, {}, 0
    queue_cache.forget_blocks() -- the cache may be what is wrong
    for _, seq in ipairs(call('HKEYS', S.p .. 'live')) do
        local e = job_record.get(seq)
        jobs = jobs + 1
        count_flow(heads, e)
        count_lane(waiting, e)
        check_unique(differences, e)
        local function count(column)
            local name = e.queue .. ' ' .. e.class .. column
            tallies[name] = (tallies[name] or 0) + 1
        end
        count(COLUMNS[e.state])
        if e.state == STATE.RUNNING and (e.kind == KIND.TURN or e.kind == KIND.BROADCAST) then
            count(SLOTLESS)
        end
        if e.lane and e.granted then
            local name = keys.lane(e.queue, e.lane_key)
            granted[name] = (granted[name] or 0) + 1
        end
        for set, score in pairs(S.indexed[e.seq]) do
            belongs[set] = belongs[set] or {}
            belongs[set][seq] = true
            local stored
            if score == true then
                stored = is_in(known, set, seq)
            else
                stored = tonumber(call('ZSCORE', set, seq) or nil)
            end
            if stored ~= score then
                compare(differences, 'job ' .. e.id .. ' in ' .. string.sub(set, #S.p + 1), stored, score)
                job_record.put_in(set, score, seq)
            end
        end
    end
    return tallies, granted, heads, waiting, belongs, jobs
end

-- Correct the first job of each flow, and the line: only flows in line can start jobs.
local function recount_flows(differences, heads)
    for _, key in ipairs(call('HKEYS', S.p .. 'flow')) do
        local queue, class, inbox, lane = string.match(key, '^(%d+)%.(%d)%.([^|]*)|(.*)$')
        if queue then
            fair_order.flow(tonumber(queue), tonumber(class), inbox, lane)
        end
    end
    local lines = {}
    for _, flow in pairs(S.flows) do
        -- Flows of a settling lane are not in line.
        local first = not queue_cache.settling(queue_cache.number(flow.domain.queue))[flow.lane] and heads[flow] or nil
        local head = first and first.arrival
        if flow.head ~= head then
            compare(differences, 'flow ' .. flow.key .. ': head', flow.head, head)
            flow.head, flow.first, flow.dirty = head, first and write_buffer.text(first.seq), true
            flow.tag = head and (flow.tag or math.max(flow.domain.clock, flow.finish)) or nil
        end
        local line = lines[flow.domain] or {}
        lines[flow.domain] = line
        if flow.head then
            line[fair_order.line_member(flow.head, flow.lane)] = flow.tag
        end
        flow.stored_tag, flow.stored_head, flow.stored_member = flow.tag, flow.head, false
    end
    for domain, line in pairs(lines) do
        local stored = call('ZRANGE', domain.line, 0, -1, 'WITHSCORES')
        for i = 1, #stored, 2 do
            if line[stored[i]] == tonumber(stored[i + 1]) then
                line[stored[i]] = nil
            elseif not line[stored[i]] then
                compare(differences, 'line ' .. domain.key .. ': ' .. stored[i], stored[i + 1], nil)
                call('ZREM', domain.line, stored[i])
            end
        end
        for member, tag in pairs(line) do
            compare(differences, 'line ' .. domain.key .. ': ' .. member, nil, tag)
            call('ZADD', domain.line, tag, member)
        end
    end
end

local function recount_backlogs(differences, waiting)
    for _, number in ipairs(call('HVALS', S.p .. 'queues')) do
        local backlog, of_queue, sum = S.p .. 'backlog:' .. number, waiting[tonumber(number)] or {}, 0
        for _, is in pairs(of_queue) do
            sum = sum + is
        end
        local was = tonumber(call('HGET', keys.tally(number), job_record.IN_LANES) or 0)
        if was ~= sum then
            compare(differences, 'lanes of queue ' .. queue_cache.number(tonumber(number)).name, was, sum)
            call('HSET', keys.tally(number), job_record.IN_LANES, sum)
        end
        local stored = call('ZRANGE', backlog, 0, -1, 'WITHSCORES')
        for i = 1, #stored, 2 do
            local is = of_queue[stored[i]]
            if is ~= tonumber(stored[i + 1]) then
                compare(differences, 'lane ' .. stored[i] .. ': waiting', stored[i + 1], is)
                if is then
                    call('ZADD', backlog, is, stored[i])
                else
                    call('ZREM', backlog, stored[i])
                end
            end
            of_queue[stored[i]] = nil
        end
        for key, is in pairs(of_queue) do
            compare(differences, 'lane ' .. key .. ': waiting', nil, is)
            call('ZADD', backlog, is, key)
        end
    end
end

-- The sets that may contain live jobs.
local function sets_of_jobs()
    local found = { 'alive/', 'later', 'expiry', 'declined', 'overdue', 'holding', 'due:0', 'due:1', 'due:2' }
    for _, flow in pairs(S.flows) do
        found[#found + 1] = 'ready:' .. flow.key
    end
    for _, number in ipairs(call('HVALS', S.p .. 'queues')) do
        for _, key in ipairs(call('SMEMBERS', S.p .. 'lanes:' .. number)) do
            found[#found + 1] = 'wait:' .. keys.lane(number, key)
            found[#found + 1] = 'hold:' .. keys.lane(number, key)
        end
    end
    for _, session in ipairs(call('ZRANGE', S.p .. 'sessions', 0, -1)) do
        for _, class in ipairs({ '0', '1', '2', 't' }) do
            found[#found + 1] = 'held:' .. session .. ':' .. class
        end
    end
    return found
end

-- Remove members that do not belong.
local function drop_strangers(differences, belongs)
    for _, name in ipairs(sets_of_jobs()) do
        local set = S.p .. name
        for _, seq in ipairs(members_of(set)) do
            if not (belongs[set] and belongs[set][seq]) then
                compare(differences, 'number ' .. seq .. ' in ' .. name, 'there', nil)
                job_record.take_from(set, is_held(set), seq)
            end
        end
    end
end

-- Remove entries of empty blocks.
local function drop_blocks(differences)
    id_sets.drop_empty_blocks()
    for _, block in ipairs(call('ZRANGE', S.alive, 0, -1)) do
        if call('EXISTS', S.alive .. block) == 0 then
            compare(differences, 'block ' .. block .. ' of alive', 'there', nil)
            call('ZREM', S.alive, block)
        end
    end
end

-- The limited lane of a key. One whose record is lost begins anew by the settings of its queue, if they limit it.
local function lane_of(differences, queue, key)
    local found = lane_limits.lane(queue, key)
    if found then
        return found
    end
    compare(differences, 'lane ' .. key .. ' of the limited lanes', 'without a record', nil)
    local terms = queue_cache.terms(queue_cache.number(queue), key)
    if terms.limit then
        return lane_limits.lane_for(queue, key, terms)
    end
    call('SREM', S.p .. 'lanes:' .. queue, key)
    return nil
end

-- Recompute all derived data from the job records, correct and return the differences. Refused with more than `most`
-- jobs, because all other calls wait for it.
function recount.recount(most)
    local count, differences = call('HLEN', S.live), {}
    if count > most then
        step.refuse('too_many', count, most)
    end
    end_damaged(differences)
    local tallies, granted, heads, waiting, belongs, jobs = count_live(differences)
    recount_flows(differences, heads)
    recount_backlogs(differences, waiting)
    drop_strangers(differences, belongs)
    drop_blocks(differences)
    for _, number in ipairs(call('HVALS', S.p .. 'queues')) do
        local name = queue_cache.number(tonumber(number)).name
        for class = CLASS.HIGH, CLASS.LOW do
            for _, column in ipairs({ 's', 'p', 'r', SLOTLESS }) do
                local is = tallies[number .. ' ' .. class .. column] or 0
                local was = step.tallied(number, class, column)
                compare(differences, 'queue ' .. name .. ', class ' .. class .. ': ' .. column, was, is)
                if was ~= is then
                    call('HSET', keys.tally(number), class .. column, is)
                end
            end
        end
        for _, key in ipairs(call('SMEMBERS', S.p .. 'lanes:' .. number)) do
            local lane = lane_of(differences, tonumber(number), key)
            if lane then
                compare(differences, 'lane ' .. key .. ': granted', lane.granted, granted[lane.name] or 0)
                lane.granted = granted[lane.name] or 0
                local given = lane_limits.hand_on(lane)
                if given > 0 then
                    differences[#differences + 1] = 'lane ' .. key .. ': ' .. given .. ' places were free while jobs waited'
                end
            end
        end
    end
    return { jobs = jobs, differences = differences }
end
