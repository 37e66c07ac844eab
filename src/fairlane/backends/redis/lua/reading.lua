-- Reading: what a person or a worker looks at, of one moment.

-- A job with all that is told of it: seq, its queue's name, content with its time, headers, live record, outcome, attempts,
-- progress, result, the session it runs or ended in, its parent's id; '' for what there is not.
local function job_of(seq)
    local function part(hash)
        return call('HGET', S.p .. hash, seq) or ''
    end
    local live, outcome, result = entries.look(seq), '', ''
    local record = live
    if live then
        live.seq = nil
        live = pack(live)
    else
        record, result = outcomes.get(seq)
        live, outcome = '', pack(record)
    end
    local who = record.session and call('HGET', S.p .. 'session', record.session) or ''
    local parent = ''
    if record.parent then
        local above = entries.look(record.parent) or outcomes.get(record.parent)
        parent = above and above.id or ''
    end
    return {
        tostring(seq), part('job'), part('headers'), live, outcome, part('attempts'), part('progress'), result or '', who,
        parent, record.id, catalog.number(record.queue).name,
    }
end

function reading.get(ids)
    local found = {}
    for _, id in ipairs(ids) do
        local seq = entries.number(id)
        if seq then
            found[#found + 1] = job_of(seq)
        end
    end
    return found
end

-- Sessions with what they run, by class; the newest first. `id`: that one alone.
function reading.sessions(id)
    local found = {}
    for _, each in ipairs(id and { id } or call('ZREVRANGE', S.p .. 'sessions', 0, -1)) do
        local who = presence.get(each)
        if who then
            local running = presence.running(who)
            found[#found + 1] = { who, { running[0], running[1], running[2] }, who.expires - S.mono }
        end
    end
    return found
end

-- The highest numbers of a set below `before`, at least `count` of them. What a session holds is looked at as a whole.
local function below(set, before, count)
    local key = S.p .. set
    if string.sub(set, -1) == '/' then
        return numbers.below(key, tonumber(before), count)
    elseif string.sub(set, 1, 5) == 'held:' then
        return call('SMEMBERS', key)
    end
    return call('ZREVRANGEBYSCORE', key, '(' .. before, '-inf', 'LIMIT', 0, count)
end

-- Jobs that are in any of these sets, by number from before `before` downwards; no more than `count`. Returns them and whether
-- there are more.
function reading.scan(sets, before, count)
    local seqs, seen = {}, {}
    for _, set in ipairs(sets) do
        for _, seq in ipairs(below(set, before, count + 1)) do
            if not seen[seq] and tonumber(seq) < tonumber(before) then
                seen[seq] = true
                seqs[#seqs + 1] = tonumber(seq)
            end
        end
    end
    table.sort(seqs, function(a, b)
        return a > b
    end)
    local found = {}
    for i = 1, math.min(count, #seqs) do
        found[i] = job_of(string.format('%d', seqs[i]))
    end
    return found, #seqs > count
end

local TALLIED = { 's', 'p', 'r', 'c', 'f', 'x' }

-- Every queue: name, record, and by class the numbers of its jobs in each state; with the queues that live workers serve.
function reading.queues()
    local queues, serving = {}, {}
    for _, pool in ipairs(call('SMEMBERS', S.p .. 'pools')) do
        for _, who in ipairs(presence.of_pool(pool)) do
            if who.state == 'live' and who.expires > S.mono then
                serving[#serving + 1] = who.queues or {}
            end
        end
    end
    local all = call('HGETALL', S.p .. 'queues')
    for i = 1, #all, 2 do
        local number = all[i + 1]
        local classes = {}
        for class = 0, 2 do
            local counts = {}
            for k, column in ipairs(TALLIED) do
                counts[k] = step.tallied(number, class, column)
            end
            classes[class + 1] = counts
        end
        queues[#queues + 1] = { all[i], step.get('queue', number), classes }
    end
    return { queues = queues, serving = serving }
end

-- The lanes of a queue that have work, with what waits and what runs, the longest backlog first.
-- What has no lane comes first, without a name.
function reading.lanes(name, limit)
    local queue = catalog.known(name)
    if not queue then
        step.refuse('not_found', "there is no queue '" .. name .. "'")
    end
    local number = queue.number
    local pending, running = 0, 0
    for class = 0, 2 do
        pending = pending + step.tallied(number, class, 'p')
        running = running + step.tallied(number, class, 'r')
    end
    local waiting, busy = entries.in_backlog(call('HGET', keys.tally(number), entries.IN_LANES))
    local found = {}
    if pending > waiting or running > busy then
        found[1] = { false, pending - waiting, running - busy }
    end
    local stored = call('ZRANGE', S.p .. 'backlog:' .. number, 0, limit - 1, 'WITHSCORES')
    for i = 1, #stored, 2 do
        found[#found + 1] = { stored[i], entries.in_backlog(stored[i + 1]) }
    end
    return { lanes = found, settings = step.get('queue', number).settings or '{}' }
end

local function tie_of(seq)
    local tie = bindings.get(seq)
    local job = tie.cleanup and (entries.look(tie.cleanup) or outcomes.get(tie.cleanup))
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
            if (not pool or tie.pool == pool) and (not key or tie.key == key) and fits(tie) then
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

function reading.schedules()
    local found = {}
    local all = call('HGETALL', S.p .. 'schedule')
    for i = 1, #all, 2 do
        found[#found + 1] = { all[i], all[i + 1], call('HGET', S.p .. 'schedule_job', all[i]) }
    end
    return found
end
