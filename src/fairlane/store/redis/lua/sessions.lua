-- Sessions: registering, renewing, leaving and being declared dead, with the consequences for their jobs and bindings.
--
-- A session has: seq, id, kind, state (live, stopping, ended, dead), host, pid, pool, index, named, queues, slots
-- {total, high, normal}, started_at, ended_at, lease, expires, claim, task_set (nil: its tasks are unknown), ahead (the
-- last claim was answered by a push, see idle_workers.lua).

local MOST_BOUND = 1000

-- A session; nil if there is none, or its record cannot be read.
function sessions.get(id)
    local who = step.get('session', id)
    return who and who.id and who.pool and type(who.expires) == 'number' and type(who.lease) == 'number' and who or nil
end

local function save(who)
    step.put('session', who.id, who)
end

function sessions.is_present(who)
    return who and (who.state == 'live' or who.state == 'stopping')
end

-- The name of a session in the history: pool and index of a worker, otherwise the host.
function sessions.worker(who)
    return who.index and keys.worker(who.pool, who.index) or who.host
end

-- The current or last session of an index.
local function last_at(pool, index)
    local id = call('HGET', S.p .. 'pool:' .. pool, index)
    return id and sessions.get(id) or nil
end

-- The live worker that an inbox belongs to; nil if there is none.
function sessions.at(inbox)
    local pool, index = string.match(inbox, '^(.*)/(%d+)$')
    local who = pool and last_at(pool, index)
    return sessions.is_present(who) and who or nil
end

function sessions.serves_queue(who, queue)
    for _, name in ipairs(who.queues or {}) do
        if name == queue then
            return true
        end
    end
    return false
end

-- Whether a session knows a task, or its tasks are unknown.
function sessions.knows(who, task)
    local known = not who.task_set or call('HGET', S.p .. 'task_set', who.task_set)
    return known == true or (known and string.find(known, '\n' .. task .. '\n', 1, true) ~= nil) or false
end

-- Running jobs of a worker, by class.
function sessions.running(who)
    local p = S.p .. 'held:' .. who.id .. ':'
    return { [0] = call('SCARD', p .. '0'), call('SCARD', p .. '1'), call('SCARD', p .. '2') }
end

-- The last session of every index of a pool, by index.
function sessions.of_pool(pool)
    local found, all = {}, call('HGETALL', S.p .. 'pool:' .. pool)
    for i = 1, #all, 2 do
        local who = sessions.get(all[i + 1])
        if who then
            found[#found + 1] = who
        end
    end
    table.sort(found, function(a, b)
        return a.index < b.index
    end)
    return found
end

-- Whether an index is taken: its session is present, or is a named one that may come back.
local function keeps_index(who)
    return sessions.is_present(who) or (who.state == 'ended' and who.named and who.expires > S.mono)
end

-- The indexes that a key may be bound to.
function sessions.live(pool)
    local found = {}
    for _, who in ipairs(sessions.of_pool(pool)) do
        if who.state == 'live' and who.expires > S.mono then
            found[#found + 1] = who.index
        end
    end
    return found
end

-- Whether a worker serves an index, or may come back to it.
function sessions.serves(pool, index)
    local who = last_at(pool, index)
    return who and keeps_index(who)
end

-- What a session holds, in order of arrival.
local function held_by(who)
    local found = {}
    for _, class in ipairs({ '0', '1', '2', 't' }) do
        for _, e in ipairs(job_record.all(call('SMEMBERS', keys.held(who.id, class)))) do
            found[#found + 1] = e
        end
    end
    table.sort(found, function(a, b)
        return (a.arrival or 0) < (b.arrival or 0)
    end)
    return found
end

-- Cancel the turns that a session waits for, before ending those it holds; otherwise the next would start in a dead
-- session.
local function waiter_gone(who)
    local gone = 0
    for _, seq in ipairs(call('ZRANGE', S.p .. 'waits:' .. who.id, 0, -1)) do
        -- Read again: the end of one turn may have started the next. Running ones are ended with the rest of what it
        -- holds.
        local e = job_record.get(seq)
        if e and e.state ~= STATE.RUNNING then
            endings.finish(e, STATE.CANCELLED, { reason = REASON.WAITER_GONE })
            gone = gone + 1
        end
    end
    return gone
end

-- Fail the jobs of a session whose records cannot be read.
local function fail_damaged(who)
    for _, class in ipairs({ '0', '1', '2', 't' }) do
        local set = keys.held(who.id, class)
        for _, seq in ipairs(call('SMEMBERS', set)) do
            if not job_record.look(seq) then
                call('SREM', set, seq)
                damage.fail(seq, { state = STATE.RUNNING, session = who.id, class = tonumber(class) })
            end
        end
    end
end

local function close(who, state)
    fail_damaged(who)
    who.state, who.ended_at = state, S.now
    save(who)
    call('ZREM', S.p .. 'present', who.id)
    call('LTRIM', S.p .. 'ahead:' .. who.id, 1, 0)
    call('ZADD', S.p .. 'sessions_over', S.now, who.id)
end

-- Declare a session dead, for good. Up to `most` of its bindings are closed first, so that their jobs are placed again
-- at once. Returns how many bindings were lost, and how much of `most` is left.
local function declare_dead(who, keep_bindings, fates, most)
    close(who, 'dead')
    fates[STATE.CANCELLED] = (fates[STATE.CANCELLED] or 0) + waiter_gone(who)
    local held, lost, left = held_by(who), 0, most
    if who.index and not keep_bindings then
        lost, left = bindings.lose(who.pool, who.index, most, held)
    end
    for _, e in ipairs(held) do
        local fate = endings.crash(e, who)
        fates[fate] = (fates[fate] or 0) + 1
    end
    return lost, left
end

-- Free an index for a new session. On the same host it is the old worker restarted, which keeps its keys; otherwise up
-- to `most` of them are lost first. Returns false if there are more.
local function make_room(new, index, most)
    local old = last_at(new.pool, index)
    -- Keys are not kept if their state is on another machine, if it was given up, or if other workers have begun to
    -- take the keys.
    local is_there, came_back = sessions.is_present(old), old and old.host == new.host and old.expires > S.mono
    local keeps = came_back and (is_there or old.named) and not bindings.is_losing(new.pool, index)
    if is_there then
        declare_dead(old, keeps, {}, most)
    elseif not keeps then
        bindings.lose(new.pool, index, most)
    end
    return keeps or bindings.is_clear(new.pool, index)
end

local function check_index(new)
    local old = new.index and last_at(new.pool, new.index)
    if sessions.is_present(old) and old.expires > S.mono and old.host ~= new.host then
        step.refuse(
            'index_taken',
            'index ' .. new.index .. " of pool '" .. new.pool .. "' belongs to a live worker on " .. old.host
                .. '; choose another index, or wait',
            old.expires - S.mono
        )
    end
end

local function lowest_free(pool)
    local index, taken = 0, {}
    for _, who in ipairs(sessions.of_pool(pool)) do
        taken[who.index] = keeps_index(who)
    end
    -- An index is also taken while a forgotten worker has keys to lose.
    while taken[index] or not bindings.is_clear(pool, index) do
        index = index + 1
    end
    return index
end

-- Extend a lease. If it had expired, bind the jobs that found no live worker meanwhile.
local function extend(who)
    local was_late = who.expires <= S.mono
    who.expires = S.mono + who.lease
    save(who)
    call('ZADD', S.p .. 'present', who.expires, who.id)
    if was_late and who.index then
        bindings.bind_unbound(who.pool, MOST_BOUND)
    end
end

-- Register a session, take over or assign an index, and bind the jobs that waited for a worker. Returns false if the
-- call must be repeated, because the previous worker of the index has more than `most` keys and jobs of those to lose.
function sessions.register(new, most)
    local known = sessions.get(new.id)
    if known then
        if not sessions.is_present(known) then
            step.refuse('session_lost', 'this session has ended or was declared dead; register under a new id')
        end
        extend(known)
        return true
    end
    local is_worker = new.kind == 'worker'
    if is_worker then
        check_index(new)
        new.named = new.index and true or nil
        new.index = new.index or lowest_free(new.pool)
        if not make_room(new, new.index, most) then
            return false
        end
    end
    if new.tasks then
        call('HSET', S.p .. 'task_set', new.task_set, new.tasks)
        call('ZADD', S.p .. 'task_sets', S.now, new.task_set)
        new.tasks = nil
    end
    new.seq = step.next('session')
    new.state, new.started_at, new.expires, new.claim = 'live', S.now, S.mono + new.lease, 0
    save(new)
    call('ZADD', S.p .. 'sessions', new.seq, new.id)
    call('ZADD', S.p .. 'present', new.expires, new.id)
    for _, queue in ipairs(new.queues or {}) do
        queue_cache.queue(queue)
    end
    if is_worker then
        call('HSET', S.p .. 'pool:' .. new.pool, new.index, new.id)
        call('SADD', S.p .. 'pools', new.pool)
        bindings.bind_unbound(new.pool, MOST_BOUND)
        broadcasts.join(new.pool, new.index)
    end
    return true
end

local function name_of(id, fence)
    return id .. ' ' .. fence
end

-- Extend a lease, and reconcile what the session believes it holds with what the store has.
function sessions.renew(id, held, claim, stopping)
    local who = sessions.get(id)
    if not sessions.is_present(who) then
        step.refuse('session_lost', 'this session is unknown, ended or declared dead; drop its jobs and register a new one')
    end
    if stopping and who.state == 'live' then
        who.state = 'stopping'
    end
    extend(who)
    local named, found, lost, cancel, taken_back = {}, {}, {}, {}, {}
    for _, h in ipairs(held) do
        named[name_of(h[1], h[2])] = true
    end
    for _, e in ipairs(held_by(who)) do
        local name = name_of(e.id, e.fence)
        if named[name] then
            found[name] = true
            if e.cancel then
                cancel[#cancel + 1] = e.id
            end
        elseif e.claim and e.claim <= claim then
            endings.take_back(e, who, MOVE.TAKE_BACK, 0)
            taken_back[#taken_back + 1] = e.id
        end
    end
    for index, h in ipairs(held) do
        if not found[name_of(h[1], h[2])] then
            lost[#lost + 1] = index - 1
        end
    end
    return { lost = lost, cancel = cancel, taken_back = taken_back, now = S.now }
end

-- Continue to release the keys of dead workers, up to `most` keys and jobs. Returns how many keys were lost, and
-- whether there are more.
function sessions.lose(most)
    local lost, left = 0, most
    for _, worker in ipairs(call('SMEMBERS', S.p .. 'bound_workers')) do
        local pool, index = string.match(worker, '^(.*)/(%d+)$')
        if not sessions.serves(pool, index) then
            if left <= 0 then
                return lost, true
            end
            local closed
            closed, left = bindings.lose(pool, index, left)
            lost = lost + closed
            if not bindings.is_clear(pool, index) then
                return lost, true
            end
        end
    end
    return lost, false
end

local function end_session(who, begun, most)
    close(who, 'ended')
    waiter_gone(who)
    local held, started = held_by(who), {}
    if who.index and not who.named then
        bindings.lose(who.pool, who.index, most, held)
    end
    for _, h in ipairs(begun or {}) do
        started[name_of(h[1], h[2])] = true
    end
    for _, e in ipairs(held) do
        if not begun or started[name_of(e.id, e.fence)] or not e.claim then
            endings.crash(e, who)
        else
            endings.take_back(e, who, MOVE.TAKE_BACK, 0)
        end
    end
end

-- End a session and take back what it holds. `begun` nil: all of it had begun. Returns whether more than `most` keys
-- and jobs of those are left to release.
function sessions.leave(id, begun, most)
    local who = sessions.get(id)
    if not who then
        step.refuse('not_found', "there is no session '" .. id .. "'")
    end
    if sessions.is_present(who) then
        end_session(who, begun, most)
    end
    -- Also when this call is repeated.
    return (who.index and not sessions.serves(who.pool, who.index) and not bindings.is_clear(who.pool, who.index)) or false
end

local function sum(fates)
    local all = 0
    for _, count in pairs(fates) do
        all = all + count
    end
    return all
end

-- Declare expired sessions dead, and close bindings that no worker serves. Everything a session holds is given back in
-- the step that ends it, so nothing stays with a session that is gone.
function sessions.rescue(limit, declare, most)
    local declared, lost, fates, more, left = {}, 0, {}, false, most
    if declare then
        for _, id in ipairs(call('ZRANGEBYSCORE', S.p .. 'present', '-inf', S.mono, 'LIMIT', 0, limit)) do
            if sum(fates) >= limit then
                more = true
                break
            end
            local who, its = sessions.get(id), 0
            if who then
                declared[#declared + 1] = id
                its, left = declare_dead(who, false, fates, left)
            else
                -- Its record cannot be read. What it holds is given back here, and its keys are released below with
                -- those that no worker serves.
                call('ZREM', S.p .. 'present', id)
                local lost_one = { id = id, host = 'unknown' }
                fail_damaged(lost_one)
                for _, e in ipairs(held_by(lost_one)) do
                    local fate = endings.crash(e, lost_one)
                    fates[fate] = (fates[fate] or 0) + 1
                end
            end
            lost = lost + its
        end
    end
    local others, loses = sessions.lose(left)
    broadcasts.abandon()
    local drained = bindings.drain_idle(limit)
    return {
        declared = declared,
        retried = (fates[STATE.PENDING] or 0) + (fates[STATE.SCHEDULED] or 0),
        failed = fates[STATE.FAILED] or 0,
        cancelled = fates[STATE.CANCELLED] or 0,
        lost_bindings = lost + others,
        drained = drained,
        more = more or loses or drained == limit,
        now = S.now,
    }
end
