-- Forgets what retention does not keep.

-- Whether this is the content of a retry (`Job.as_new`). It ends with the id of the retried job and three nils, because
-- a retry has no delay, time or expiry of its own. No text contains the byte of nil; the functions cannot decode the
-- whole content.
local function is_retry(content)
    return string.find(string.sub(content, -4), '^[^\192]\192\192\192$') ~= nil
end

-- `tasks`: collects the task of the job.
local function forget_job(seq, outcome, keep, tasks)
    local content = job_content.get(seq)
    local until_ = outcome.finished_at + keep.id_seconds
    if keep.failed_seconds > keep.id_seconds and is_retry(content) then
        until_ = outcome.finished_at + keep.failed_seconds
    end
    if until_ > S.now then
        local remembered = pack({ mark = job_content.mark(seq, content), state = outcome.state, until_ = until_ })
        call('HSET', S.p .. 'id', outcome.id, job_record.REMEMBERED .. remembered)
        call('ZADD', S.p .. 'remembered', until_, outcome.id)
    else
        call('HDEL', S.p .. 'id', outcome.id)
    end
    for _, hash in ipairs({ 'job', 'original', 'headers', 'outcome', 'attempts', 'progress' }) do
        call('HDEL', S.p .. hash, seq)
    end
    local member, name = write_buffer.text(seq), outcome.queue .. ':' .. outcome.task
    call('ZREM', keys.ended(outcome.queue, outcome.state), keys.padded(member))
    id_sets.drop(keys.task(name), member)
    tasks[name] = true
    call('ZREM', keys.by('state', outcome.state), seq)
    call('ZREM', S.p .. 'endings', member)
    if outcome.lane_key then
        call('ZREM', keys.by('lane', keys.lane(outcome.queue, outcome.lane_key)), seq)
    end
    if outcome.sticky then
        call('ZREM', keys.by('sticky', outcome.sticky), seq)
    end
    if outcome.group then
        call('ZREM', keys.by('group', outcome.group), seq)
    end
    if outcome.session then
        id_sets.drop(keys.of_session(outcome.session), member)
    end
    if outcome.parent then
        call('ZREM', S.p .. 'children:' .. outcome.parent, seq)
    end
end

-- Remove tasks without jobs from the list of tasks.
local function forget_tasks(tasks)
    id_sets.drop_empty_blocks()
    for name in pairs(tasks) do
        if call('EXISTS', keys.task(name)) == 0 then
            call('SREM', S.p .. 'tasks', name)
            queue_cache.changed() -- it caches which tasks are listed
        end
    end
end

-- Forget finished jobs of a queue and state beyond their age or their number.
local function prune_state(keep, queue, state, limit, tasks)
    local completed = state == STATE.COMPLETED
    local age = completed and keep.completed_seconds or keep.failed_seconds
    local count = completed and keep.completed_count or keep.failed_count
    local set = keys.ended(queue, state)
    local excess = math.max(0, call('ZCARD', set) - count)
    local old = call('ZCOUNT', set, '-inf', S.now - age)
    local many = math.min(limit, math.max(excess, old))
    if many <= 0 then
        return 0
    end
    local seqs = call('ZRANGE', set, 0, many - 1)
    for _, member in ipairs(seqs) do
        local seq = tonumber(member)
        local outcome = endings.get(seq)
        forget_job(seq, outcome, keep, tasks)
    end
    return #seqs
end

-- Forget old sessions, except those that are part of the history of a kept job.
local function prune_sessions(before, limit)
    local gone = 0
    for _, id in ipairs(call('ZRANGEBYSCORE', S.p .. 'sessions_over', '-inf', before, 'LIMIT', 0, limit)) do
        if call('EXISTS', keys.of_session(id)) == 0 then
            local who = sessions.get(id)
            step.drop('session', id)
            call('LTRIM', S.p .. 'ahead:' .. id, 1, 0)
            call('ZREM', S.p .. 'sessions', id)
            call('ZREM', S.p .. 'sessions_over', id)
            if who and who.index and call('HGET', S.p .. 'pool:' .. who.pool, who.index) == id then
                call('HDEL', S.p .. 'pool:' .. who.pool, who.index)
            end
            gone = gone + 1
        end
    end
    return gone
end

local function prune_bindings(before, limit)
    local seqs = call('ZRANGEBYSCORE', S.p .. 'ties_closed', '-inf', before, 'LIMIT', 0, limit)
    for _, seq in ipairs(seqs) do
        bindings.forget(bindings.get(seq) or { seq = seq, pool = '', key = '' })
    end
    return #seqs
end

-- Forget remembered ids whose time is over, unless they belong to new jobs by now.
local function prune_ids(limit)
    local ids = call('ZRANGEBYSCORE', S.p .. 'remembered', '-inf', S.now, 'LIMIT', 0, limit)
    for _, id in ipairs(ids) do
        if not job_record.number(id) then
            call('HDEL', S.p .. 'id', id)
        end
        call('ZREM', S.p .. 'remembered', id)
    end
    return #ids
end

local function prune_uniques(limit)
    local fields = call('ZRANGEBYSCORE', S.p .. 'uniques_over', '-inf', S.now, 'LIMIT', 0, limit)
    for _, field in ipairs(fields) do
        call('HDEL', S.p .. 'unique', field)
        call('ZREM', S.p .. 'uniques_over', field)
    end
    return #fields
end

local function is_idle(queue, class)
    return step.tallied(queue, class, 'p') + step.tallied(queue, class, 'r') == 0
end

-- Forget flows of empty lanes that are not ahead of the clock. If a queue has no job of a class, there is no order to
-- keep: the clock moves past all flows. Continues where the last call ended.
local function prune_flows(limit)
    local at = call('HGET', S.p .. 'counter', 'flows_seen') or '0'
    local page = call('HSCAN', S.p .. 'flow', at, 'COUNT', math.min(limit, MOST_LOOKED_AT))
    local found, gone = page[2], 0
    for i = 1, #found, 2 do
        local queue, class, inbox = string.match(found[i], '^(%d+)%.(%d)%.([^|]*)|')
        queue, class = tonumber(queue), tonumber(class)
        local finish, tag
        if queue then
            finish, tag = fair_order.read_flow(found[i + 1])
        end
        local domain = queue and not tag and fair_order.domain(queue, class, inbox)
        if domain and finish > domain.clock and is_idle(queue, class) then
            fair_order.set_clock(domain, finish)
        end
        if domain and finish <= domain.clock then
            write_buffer.hdel(S.p .. 'flow', found[i])
            gone = gone + 1
        end
    end
    if page[1] ~= at then
        call('HSET', S.p .. 'counter', 'flows_seen', page[1])
    end
    return gone
end

-- Delete the final jobs among these; returns their ids.
function prune.forget(ids, keep)
    local gone, tasks = {}, {}
    for _, id in ipairs(ids) do
        local seq = job_record.number(id)
        local outcome = seq and endings.get(seq)
        if outcome then
            forget_job(tonumber(seq), outcome, keep, tasks)
            gone[#gone + 1] = id
        end
    end
    forget_tasks(tasks)
    return gone
end

-- Forget inboxes of tasks without declined jobs.
local function prune_unknown()
    local gone = 0
    for _, name in ipairs(call('SMEMBERS', S.p .. 'unknown')) do
        if call('EXISTS', S.p .. 'inboxed:' .. keys.unknown(string.match(name, ' (.*)$'))) == 0 then
            gone = gone + call('SREM', S.p .. 'unknown', name)
        end
    end
    return gone
end

-- Forget task sets that no present session has.
local function prune_task_sets(before, limit)
    local old = call('ZRANGEBYSCORE', S.p .. 'task_sets', '-inf', before, 'LIMIT', 0, limit)
    if #old == 0 then
        return 0
    end
    local used, gone = {}, 0
    for _, id in ipairs(call('ZRANGE', S.p .. 'present', 0, -1)) do
        used[sessions.get(id).task_set or ''] = true
    end
    for _, set in ipairs(old) do
        if not used[set] then
            call('HDEL', S.p .. 'task_set', set)
            call('ZREM', S.p .. 'task_sets', set)
            gone = gone + 1
        end
    end
    return gone
end

-- Delete finished jobs beyond their age or their number, and old records of other kinds.
function prune.prune(keep, limit)
    local jobs, tasks = 0, {}
    for _, number in ipairs(call('HVALS', S.p .. 'queues')) do
        for state = STATE.COMPLETED, STATE.CANCELLED do
            jobs = jobs + prune_state(keep, tonumber(number), state, limit - jobs, tasks)
        end
    end
    forget_tasks(tasks)
    local before = S.now - keep.history_seconds
    local other = prune_sessions(before, limit) + prune_bindings(before, limit)
        + prune_ids(limit) + prune_uniques(limit)
        + prune_flows(limit) + prune_task_sets(before, limit) + prune_unknown()
    return { jobs = jobs, other = other, more = jobs >= limit }
end
