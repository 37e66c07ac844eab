-- Enqueueing. A whole call is checked first, and refused before anything is written.
--
-- A request has: id, task, queue, class, kind, lane_key, cost, pool, sticky, direct, retries, backoff, uniq,
-- unique_for, delay, run_at, expires, waiter, ttl, schedule, slot. For jobs that differ in nothing else it has ids
-- instead of an id, and lanes instead of a lane_key. The content is opaque here; equal content has equal bytes.

local function state_of(seq)
    local live = job_record.look(seq)
    if live then
        return live.state
    end
    local outcome = endings.get(seq)
    return outcome and outcome.state
end

-- The answer for an id that exists; refused unless the content is the same.
local function existing(new, content)
    local seq = job_record.number(new.id)
    local same, state
    if seq then
        same, state = job_content.is_same(seq, content), state_of(seq)
    else
        local remembered = unpacked(sub(write_buffer.hget(S.p .. 'id', new.id), 2))
        if remembered.until_ <= S.now then
            return nil
        end
        same, state = remembered.mark == redis.sha1hex(content), remembered.state
    end
    if not same then
        step.refuse('conflict', "job '" .. new.id .. "' exists already with other content; choose another id")
    end
    return { new.id, false, state }
end

local function unique_field(task, value)
    return task .. '\0' .. value
end

local function unique_holder(new)
    local holder = step.get('unique', unique_field(new.task, new.uniq))
    if not holder then
        return nil
    end
    if holder.state then
        return holder.until_ and holder.until_ > S.now and { holder.id, false, holder.state } or nil
    end
    return { holder.id, false, state_of(holder.seq) }
end

-- The job is final. A unique key that is held for a time is kept even when the job is forgotten.
function enqueue.release_unique(e, state)
    local field = unique_field(e.task, e.uniq)
    local holder = step.get('unique', field)
    if not holder or holder.seq ~= e.seq then
        return
    end
    if holder.until_ and holder.until_ > S.now then
        holder.state = state
        step.put('unique', field, holder)
        call('ZADD', S.p .. 'uniques_over', holder.until_, field)
    else
        step.drop('unique', field)
    end
end

-- Refuse a job that the queue does not accept. `more`: how many jobs of this call the queue has accepted before.
local function check(new, queue, more)
    local key = new.lane_key
    if queue.closed then
        local fits = false
        for _, lane in ipairs(queue.closed) do
            fits = fits or lane == key
        end
        if not fits then
            local shown = key and "'" .. key .. "'" or 'None'
            step.refuse('invalid', shown .. " is not one of the lanes of queue '" .. queue.name .. "'", 'lane')
        end
    end
    local terms = queue_cache.terms(queue, key or '')
    if queue.max_pending then
        local waiting = more.queue
        for class = CLASS.HIGH, CLASS.LOW do
            waiting = waiting + step.tallied(queue.number, class, 'p') + step.tallied(queue.number, class, 's')
        end
        if waiting >= queue.max_pending then
            step.refuse('full', waiting, { queue = queue.name, class = new.class, most = queue.max_pending })
        end
    end
    if terms.max_pending then
        local waiting = more.lane + job_record.in_backlog(call('ZSCORE', S.p .. 'backlog:' .. queue.number, key))
        if waiting >= terms.max_pending then
            local detail = { queue = queue.name, class = new.class, most = terms.max_pending, lane = key, limit = terms.limit }
            step.refuse('full', waiting, detail)
        end
    end
    if new.kind == KIND.TURN then
        if not terms.limit and not terms.paused then
            local call_for_it = "app.queue('" .. queue.name .. "').lane('" .. key .. "', limit=1)"
            step.refuse('invalid', 'a turn needs a lane with a limit; set one with ' .. call_for_it, 'lane')
        end
        if not sessions.is_present(sessions.get(new.waiter)) then
            step.refuse('invalid', 'the session that waits is not live; register it first', 'waiter')
        end
    end
    if new.kind == KIND.BROADCAST then
        for _, index in ipairs(sessions.live(new.pool or 'default')) do
            local id = broadcasts.child_id(new.id, index)
            if broadcasts.exists(id) then
                step.refuse('conflict', "job '" .. id .. "' exists already, and a copy of this broadcast needs that id")
            end
        end
    end
end

local function file(e, content, headers)
    local member = write_buffer.text(e.seq)
    write_buffer.hset(S.p .. 'id', e.id, member)
    write_buffer.hset(S.p .. 'job', member, S.stamp .. content)
    if headers and headers ~= '' then
        write_buffer.hset(S.p .. 'headers', member, headers)
    end
    id_sets.add(keys.of_task(e.queue, e.task), member)
    if e.lane_key then
        call('ZADD', S.p .. 'by:lane:' .. keys.lane(e.queue, e.lane_key), member, member)
    end
    if e.sticky then
        write_buffer.zadd(keys.by('sticky', e.sticky), member, member)
    end
end

-- Store one new job and admit it if it is due. `tie`: the binding whose clean-up it is.
local function store(new, content, headers, tie)
    local due = new.run_at or (S.now + (new.delay or 0))
    local later = due > S.now
    local e = {
        seq = step.new_seq(),
        id = new.id,
        task = new.task,
        queue = queue_cache.queue(new.queue).number,
        class = new.class or 1,
        kind = new.kind,
        lane_key = new.lane_key,
        cost = new.cost,
        pool = new.pool,
        sticky = new.sticky,
        direct = new.direct,
        retries = new.retries,
        backoff = new.backoff,
        uniq = new.uniq,
        parent = new.parent,
        waiter = new.waiter,
        state = later and STATE.SCHEDULED or STATE.PENDING,
        due = later and due or nil,
        expires_at = new.expires and S.now + new.expires or nil,
    }
    file(e, content, headers)
    if new.parent then
        call('ZADD', S.p .. 'children:' .. new.parent, e.seq, e.seq)
    end
    if new.uniq then
        local until_ = new.unique_for and S.now + new.unique_for or nil
        local field = unique_field(new.task, new.uniq)
        step.put('unique', field, { seq = e.seq, id = e.id, until_ = until_ })
        call('ZREM', S.p .. 'uniques_over', field) -- the key is held again, after the hold of an earlier job has ended
    end
    if new.schedule then
        settings.fired(new.schedule, new.slot)
    end
    if tie then
        e.binding, e.inbox, e.gate = tie.seq, keys.worker(tie.pool, tie.index), GATE.CLEANUP
    end
    if new.kind == KIND.BROADCAST then
        e.state, e.gate, e.started_at = STATE.RUNNING, GATE.PARENT, S.now
        e.due = (new.ttl or 0) > 0 and S.now + new.ttl or nil
        step.count(e.queue, e.class, SLOTLESS)
    end
    step.count(e.queue, e.class, COLUMNS[e.state])
    if e.state == STATE.PENDING then
        if tie then
            lane_limits.arrive(e)
        else
            endings.admit(e)
        end
    end
    if e.state ~= STATE.PENDING or not job_record.add(e) then
        job_record.save(e)
    end
    if new.kind == KIND.BROADCAST then
        broadcasts.begin(e)
        if not job_record.get(e.seq) then
            e.state = STATE.COMPLETED -- there were no workers to send it to
        end
    end
    return e
end

-- One request for each job, from requests that stand for several.
local function each_of(requests)
    local all = {}
    for _, new in ipairs(requests) do
        if new.id then
            all[#all + 1] = new
        end
        for i, id in ipairs(new.ids or {}) do
            local one = {}
            for name, value in pairs(new) do
                one[name] = value
            end
            one.id, one.ids, one.lane_key, one.lanes = id, nil, new.lanes and new.lanes[i], nil
            all[#all + 1] = one
        end
    end
    return all
end

-- Read the flows of the plain jobs of a large call together.
local function load_flows(requests)
    local jobs = {}
    for _, new in ipairs(requests) do
        local queue = new.lane_key and queue_cache.known(new.queue)
        if queue and not (new.sticky or new.direct or new.kind) then
            jobs[#jobs + 1] = { queue = queue.number, class = new.class or 1, lane_key = new.lane_key }
        end
    end
    fair_order.load(jobs)
end

-- Store the jobs that have no answer yet; returns them by position.
local function store_all(requests, answers, parts, first)
    local stored = {}
    S.direct = #requests == 1 and not requests[1].kind
    load_flows(requests)
    for i, new in ipairs(requests) do
        if not answers[i] then
            stored[i] = store(new, parts[first + 2 * i - 2], parts[first + 2 * i - 1])
        end
    end
    S.direct = false
    return stored
end

-- Store jobs and admit those that are due, all or none. `parts`: content and headers of each job, alternating, from
-- `first` on. Returns id, whether it was created, and the state for each; nothing when all are new and pending.
function enqueue.enqueue(requests, parts, first)
    if #requests > 0 and enqueue_batch.are_alike(requests) then
        S.direct = #requests == 1 and #requests[1].ids == 1
        for _, new in ipairs(requests) do
            if not enqueue_batch.store(new, parts, first) then
                store_all(each_of({ new }), {}, parts, first)
            end
            first = first + 2 * #new.ids
        end
        S.direct = false
        return {}
    end
    requests = each_of(requests)
    local answers, mine, uniques, more, ids = {}, {}, {}, {}, {}
    for i, new in ipairs(requests) do
        ids[i] = new.id
    end
    local known, count = write_buffer.hmget(S.p .. 'id', ids), 0
    for i, new in ipairs(requests) do
        local content = parts[first + 2 * i - 2]
        local earlier = mine[new.id]
        if earlier then
            if parts[first + 2 * earlier - 2] ~= content then
                step.refuse('conflict', "job '" .. new.id .. "' exists already with other content; choose another id")
            end
            answers[i] = { same_as = earlier }
        elseif known[i] then
            answers[i] = existing(new, content)
        end
        local field = not answers[i] and new.uniq and unique_field(new.task, new.uniq)
        if field then
            answers[i] = uniques[field] and { same_as = uniques[field] } or unique_holder(new)
            if answers[i] and new.schedule then
                answers[i].fired = true
            end
        end
        if not answers[i] then
            local queue = queue_cache.known(new.queue)
            count = count + 1
            if queue and (queue.bounded or new.kind) then
                local name = new.queue
                local lane = keys.lane(name, new.lane_key or '')
                check(new, queue, { queue = more[name] or 0, lane = more[lane] or 0 })
                local counts = new.kind == KIND.BROADCAST and 0 or 1
                more[name] = (more[name] or 0) + counts
                more[lane] = (more[lane] or 0) + counts
            elseif not queue and (new.kind == KIND.TURN or new.kind == KIND.BROADCAST) then
                check(new, queue_cache.unknown(new.queue), { queue = 0, lane = 0 })
            end
            mine[new.id] = i
            if field then
                uniques[field] = i
            end
        end
    end
    local stored = store_all(requests, answers, parts, first)
    local usual = count == #requests
    for _, e in pairs(stored) do
        usual = usual and e.state == STATE.PENDING
    end
    if usual then
        return {}
    end
    for i, new in ipairs(requests) do
        local answer = answers[i]
        if not answer then
            answers[i] = { new.id, true, stored[i].state }
        else
            if answer.fired then
                settings.fired(new.schedule, new.slot)
            end
            if answer.same_as then
                answers[i] = { requests[answer.same_as].id, false, stored[answer.same_as].state }
            else
                answers[i] = { answer[1], answer[2], answer[3] }
            end
        end
    end
    return answers
end

-- One child of a broadcast, for one worker. Its content is that of its parent; the worker is in its record only.
function enqueue.add_child(parent, index)
    local headers = call('HGET', S.p .. 'headers', parent.seq)
    store({
        id = broadcasts.child_id(parent.id, index),
        task = parent.task,
        queue = queue_cache.number(parent.queue).name,
        class = parent.class,
        cost = parent.cost,
        expires = parent.expires_at and math.max(0, parent.expires_at - S.now) or nil,
        retries = parent.retries,
        backoff = parent.backoff,
        pool = parent.pool,
        direct = index,
        parent = parent.seq,
    }, job_content.get(parent.seq), headers or '')
end

-- Start releasing a sticky key. A clean-up that is already stored is not stored again.
function enqueue.release(pool, key, new, content, headers)
    if not new then
        return bindings.release(pool, key)
    end
    if call('HEXISTS', S.p .. 'id', new.id) == 1 then
        existing(new, content)
        -- Repeated: answer with the current state of the release.
        local tie = bindings.of(pool, key)
        if tie and tie.state == 'open' then
            step.refuse('conflict', "clean-up '" .. new.id .. "' was cancelled when the key was used again; give a new id")
        end
        return tie and 'draining' or 'nothing'
    end
    return bindings.release(pool, key, function(tie)
        return store(new, content, headers, tie).seq
    end)
end
