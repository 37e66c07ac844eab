-- The reading verbs. Each answer is a consistent snapshot.

-- Sessions with their running jobs by class, the newest first. `id`: only that one.
function reading.sessions(id)
    local found = {}
    for _, each in ipairs(id and { id } or call('ZREVRANGE', S.p .. 'sessions', 0, -1)) do
        local who = sessions.get(each)
        if who then
            local running = sessions.running(who)
            found[#found + 1] = { who, { running[0], running[1], running[2] }, who.expires - S.mono }
        end
    end
    return found
end

-- The tasks of these sessions, by task set.
function reading.task_sets(sessions)
    local found = {}
    for _, each in ipairs(sessions) do
        local set = each[1].task_set
        if set and found[set] == nil then
            found[set] = call('HGET', S.p .. 'task_set', set) or false
        end
    end
    return found
end

-- The waiting job of a queue that arrived first: among the first of each flow, the first that wait for a place of a
-- lane, and gated jobs. At most `most` lanes of each are read: those that are next, and those with the longest backlog.
local function oldest_waiting(number, inboxes, most, stuck)
    local first = stuck[tonumber(number)] or {}
    local function consider(arrival, seq)
        if arrival and (not first.arrival or arrival < first.arrival) then
            first = { arrival = arrival, seq = seq }
        end
    end
    for class = CLASS.HIGH, CLASS.LOW do
        for _, inbox in ipairs(inboxes) do
            local domain, found = keys.domain(number, class, inbox), nil
            for _, member in ipairs(call('ZRANGE', S.p .. 'line:' .. domain, 0, most - 1)) do
                -- The member begins with the arrival, with leading zeros, and then has the lane.
                if not found or member < found then
                    found = member
                end
            end
            local raw = found and call('HGET', S.p .. 'flow', keys.flow(domain, string.sub(found, 17)))
            if raw then
                local _, tag, head, member = fair_order.read_flow(raw)
                consider(tag and head, member)
            end
        end
    end
    local lanes = call('ZRANGE', S.p .. 'backlog:' .. number, 0, most - 1)
    lanes[#lanes + 1] = ''
    for _, lane in ipairs(lanes) do
        for class = CLASS.HIGH, CLASS.LOW do
            local gated = call('ZRANGE', S.p .. 'gated:' .. keys.lane(number, lane) .. '|' .. class, 0, 0, 'WITHSCORES')
            consider(tonumber(gated[2]), gated[1])
        end
        local set = S.p .. 'wait:' .. keys.lane(number, lane)
        local head = call('ZRANGE', set, 0, 0, 'WITHSCORES')
        while head[1] do
            local rank = math.floor(tonumber(head[2]) / job_record.RANK)
            consider(tonumber(head[2]) - rank * job_record.RANK, head[1])
            head = call('ZRANGEBYSCORE', set, string.format('%.0f', (rank + 1) * job_record.RANK), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
        end
    end
    return first.seq
end

local OLDEST = 100

-- The first waiting job of each queue among the oldest jobs of all. Jobs that wait for an unknown worker are found only
-- here.
local function stuck_jobs()
    local seqs, found = {}, {}
    for _, block in ipairs(call('ZRANGE', S.alive, 0, 1)) do
        for _, seq in ipairs(call('SMEMBERS', S.alive .. block)) do
            seqs[#seqs + 1] = tonumber(seq)
        end
    end
    table.sort(seqs)
    for i = 1, math.min(OLDEST, #seqs) do
        local e = job_record.look(seqs[i])
        if e and e.state == STATE.PENDING and e.arrival and not (found[e.queue] and found[e.queue].arrival <= e.arrival) then
            found[e.queue] = { arrival = e.arrival, seq = write_buffer.text(seqs[i]) }
        end
    end
    return found
end

local TALLIED = { 's', 'p', 'r', 'c', 'f', 'x' }

-- Every queue: name, record, and counts by class and state; with the queues that live workers serve. Then for each
-- queue the content of the job that has waited longest, and its claims.
function reading.queues(most)
    local queues, serving, inboxes, oldest, stuck = {}, {}, { '' }, {}, stuck_jobs()
    for _, pool in ipairs(call('SMEMBERS', S.p .. 'pools')) do
        for _, who in ipairs(sessions.of_pool(pool)) do
            if who.index then
                inboxes[#inboxes + 1] = keys.worker(pool, who.index)
            end
            if who.state == 'live' and who.expires > S.mono then
                serving[#serving + 1] = who.queues or {}
            end
        end
    end
    local all = call('HGETALL', S.p .. 'queues')
    for i = 1, #all, 2 do
        local number = all[i + 1]
        local classes = {}
        for class = CLASS.HIGH, CLASS.LOW do
            local counts = {}
            for k, column in ipairs(TALLIED) do
                counts[k] = step.tallied(number, class, column)
            end
            classes[class + 1] = counts
        end
        local waits = false
        for class = CLASS.HIGH, CLASS.LOW do
            waits = waits or step.tallied(number, class, 'p') > 0
        end
        local seq = waits and oldest_waiting(number, inboxes, most, stuck)
        queues[#queues + 1] = { all[i], queue_cache.record(number, all[i]), classes }
        oldest[#oldest + 1] = seq and call('HGET', S.p .. 'job', seq) or ''
        oldest[#oldest + 1] = seq and call('HGET', S.p .. 'attempts', seq) or ''
    end
    table.insert(oldest, 1, pack({ queues = queues, serving = serving, now = S.now }))
    return oldest
end

-- How many lanes of a backlog come before the first one after this position.
local function lanes_before(backlog, after)
    local score = job_record.backlog(after[1], after[2])
    local text = string.format('%.0f', score)
    local low, high = call('ZCOUNT', backlog, '-inf', '(' .. text), call('ZCOUNT', backlog, '-inf', text)
    -- Lanes with equal scores are ordered by name.
    while low < high do
        local middle = math.floor((low + high) / 2)
        if call('ZRANGE', backlog, middle, middle)[1] > after[3] then
            high = middle
        else
            low = middle + 1
        end
    end
    return low
end

local MOST_FLOWS = 10000

-- The number of the job of a lane that has waited longest, '' for no lane. `domains`: those with claimable jobs.
local function oldest_in_lane(number, lane, domains)
    local first, seq
    local function consider(arrival, member)
        if arrival and (not first or arrival < first) then
            first, seq = arrival, member
        end
    end
    for _, domain in ipairs(domains) do
        local head = call('ZRANGE', S.p .. 'ready:' .. keys.flow(domain, lane), 0, 0, 'WITHSCORES')
        consider(tonumber(head[2]), head[1])
    end
    for class = CLASS.HIGH, CLASS.LOW do
        local gated = call('ZRANGE', S.p .. 'gated:' .. keys.lane(number, lane) .. '|' .. class, 0, 0, 'WITHSCORES')
        consider(tonumber(gated[2]), gated[1])
    end
    for _, kind in ipairs({ 'wait:', 'hold:' }) do
        local set = S.p .. kind .. keys.lane(number, lane)
        local head = call('ZRANGE', set, 0, 0, 'WITHSCORES')
        while head[1] do
            local rank = math.floor(tonumber(head[2]) / job_record.RANK)
            local e = job_record.look(head[1])
            if e and e.state == STATE.PENDING then
                consider(e.arrival, head[1])
            end
            head = call('ZRANGEBYSCORE', set, string.format('%.0f', (rank + 1) * job_record.RANK), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
        end
    end
    return seq
end

-- The lanes of a queue that have work, with their waiting and running jobs, the longest backlog first, after a given
-- one. Jobs without a lane come first, without a name. Then for each the content of the job that has waited longest,
-- and its claims.
function reading.lanes(name, limit, after)
    local queue = queue_cache.known(name)
    if not queue then
        step.refuse('not_found', "there is no queue '" .. name .. "'")
    end
    local number = queue.number
    local pending, running = 0, 0
    for class = CLASS.HIGH, CLASS.LOW do
        pending = pending + step.tallied(number, class, 'p')
        running = running + step.tallied(number, class, 'r')
    end
    local waiting, busy = job_record.in_backlog(call('HGET', keys.tally(number), job_record.IN_LANES))
    local found = {}
    if pending > waiting or running > busy then
        found[1] = { false, pending - waiting, running - busy }
    end
    local backlog = S.p .. 'backlog:' .. number
    local from = after and lanes_before(backlog, after) or 0
    local stored = call('ZRANGE', backlog, from, from + limit - 1, 'WITHSCORES')
    for i = 1, #stored, 2 do
        found[#found + 1] = { stored[i], job_record.in_backlog(stored[i + 1]) }
    end
    local domains = {}
    for _, domain in ipairs(call('SMEMBERS', S.p .. 'domains:' .. number)) do
        if #domains * #found < MOST_FLOWS and call('ZCARD', S.p .. 'line:' .. domain) > 0 then
            domains[#domains + 1] = domain
        end
    end
    local answer = { false }
    for _, lane in ipairs(found) do
        local seq = lane[2] > 0 and oldest_in_lane(number, lane[1] or '', domains)
        answer[#answer + 1] = seq and call('HGET', S.p .. 'job', seq) or ''
        answer[#answer + 1] = seq and call('HGET', S.p .. 'attempts', seq) or ''
    end
    answer[1] = pack({ lanes = found, settings = queue_cache.record(number, name).settings or '{}', now = S.now })
    return answer
end

-- Numbers of the running jobs of a lane. `count` is how many there are, if known.
local function running_of(lane, count)
    local found = {}
    if lane == '' then
        for _, seq in ipairs(call('ZRANGE', S.p .. 'parents', 0, -1)) do
            found[#found + 1] = seq
        end
    elseif count == 0 then
        return found
    end
    for _, session in ipairs(call('ZRANGE', S.p .. 'sessions', 0, -1)) do
        for _, kind in ipairs({ 0, 1, 2, 't' }) do
            for _, seq in ipairs(call('SMEMBERS', keys.held(session, kind))) do
                found[#found + 1] = seq
            end
        end
    end
    return found
end

-- At least the next `asked.count` jobs of a lane, '' for none, unordered and possibly twice. First a record of the
-- lane, then for each job a record and the time when it was stored.
function reading.lane_line(name, lane, asked)
    local queue = queue_cache.known(name)
    if not queue then
        step.refuse('not_found', "there is no queue '" .. name .. "'")
    end
    local number, settling = queue.number, queue_cache.settling(queue)[lane] and true or false
    local ordered = lane ~= '' and queue_cache.terms(queue, lane).ordered or false
    local _, running = job_record.in_backlog(call('ZSCORE', S.p .. 'backlog:' .. number, lane))
    local seqs = asked.running and running_of(lane, running) or {}
    local function add(set, base, after)
        local from, to = string.format('(%.0f', base + after), string.format('(%.0f', base + job_record.RANK)
        for _, seq in ipairs(call('ZRANGEBYSCORE', S.p .. set, from, to, 'LIMIT', 0, asked.count)) do
            seqs[#seqs + 1] = seq
        end
    end
    local after = {}
    for class = CLASS.HIGH, CLASS.LOW do
        after[class] = asked.after[ordered and 1 or class + 1]
    end
    for _, domain in ipairs(call('SMEMBERS', S.p .. 'domains:' .. number)) do
        local class = tonumber(string.match(domain, '^%d+%.(%d)%.'))
        if after[class] then
            add('ready:' .. keys.flow(domain, lane), 0, after[class])
        end
    end
    for class = CLASS.HIGH, CLASS.LOW do
        if after[class] then
            add('gated:' .. keys.lane(number, lane) .. '|' .. class, 0, after[class])
            add('wait:' .. keys.lane(number, lane), class * job_record.RANK, after[class])
            add('hold:' .. keys.lane(number, lane), class * job_record.RANK, after[class])
        end
    end
    local found, seen = { false }, {}
    for _, seq in ipairs(seqs) do
        local e = not seen[seq] and job_record.look(seq)
        seen[seq] = true
        if e and e.queue == number and (e.lane_key or '') == lane then
            local job = call('HGET', S.p .. 'job', seq) or ''
            found[#found + 1] = pack({ e.seq, e.id, e.task, e.state, e.class, e.attempt or 0, e.started_at or false, e.arrival or false })
            found[#found + 1] = sub(job, 1, 8)
        end
    end
    found[1] = pack({ ordered = ordered, exact = not settling })
    return found
end

-- Failed jobs by task and error group, among some of the newest: of a queue, or '' for all.
function reading.failures(name, task, first, count, tail)
    local set = keys.by('state', STATE.FAILED)
    if name ~= '' then
        local queue = queue_cache.known(name)
        if not queue then
            return { groups = {}, looked_at = 0 }
        end
        set = keys.ended(queue.number, STATE.FAILED)
    end
    local groups, known = {}, {}
    local members = call('ZREVRANGE', set, first, first + count - 1)
    for _, member in ipairs(members) do
        local job = endings.get(tonumber(member))
        if job and (task == '' or job.task == task) then
            local kind = job.group or job.reason
            local key = job.task .. '\n' .. kind
            local group = known[key]
            if not group then
                -- task, group, count, first and last time; of the newest: reason, id and the end of its error
                group = { job.task, kind, 0, job.finished_at, -1 }
                known[key] = group
                groups[#groups + 1] = group
            end
            group[3] = group[3] + 1
            group[4] = math.min(group[4], job.finished_at)
            if job.finished_at > group[5] then
                group[5], group[6], group[7], group[8] = job.finished_at, job.reason, job.id, sub(job.error or '', -tail)
            end
        end
    end
    return { groups = groups, looked_at = #members }
end

local function tie_of(seq)
    local tie = bindings.get(seq)
    local job = tie.cleanup and (job_record.look(tie.cleanup) or endings.get(tie.cleanup))
    tie.cleanup = job and job.id or nil
    return tie
end

-- Bindings, open ones first, then the latest.
function reading.bindings(pool, key, limit)
    local seqs = {}
    local function add(set, fits)
        for _, seq in ipairs(call('ZREVRANGE', S.p .. set, 0, -1)) do
            if #seqs >= limit then
                return
            end
            local tie = bindings.get(seq)
            if tie and (not pool or tie.pool == pool) and (not key or tie.key == key) and fits(tie) then
                seqs[#seqs + 1] = seq
            end
        end
    end
    local set = pool and key and 'ties:' .. pool .. ' ' .. key or nil
    add(set or 'ties_open', function(tie)
        return not tie.closed_at
    end)
    add(set or 'ties_closed', function(tie)
        return tie.closed_at
    end)
    local found = {}
    for i, seq in ipairs(seqs) do
        found[i] = tie_of(seq)
    end
    return found
end

-- The time, then for each schedule its name, its record and its job.
function reading.schedules()
    local found = { pack({ now = S.now }) }
    local all = call('HGETALL', S.p .. 'schedule')
    for i = 1, #all, 2 do
        found[#found + 1] = all[i]
        found[#found + 1] = all[i + 1]
        found[#found + 1] = call('HGET', S.p .. 'schedule_job', all[i])
    end
    return found
end
