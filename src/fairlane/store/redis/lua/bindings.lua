-- Sticky keys: binding them to workers, draining and releasing them, and losing them with their worker.
--
-- `bindings.assign_worker` decides where a job goes, before it arrives. A binding's clean-up waits behind GATE.CLEANUP until it
-- is alone; jobs that come while it runs wait behind the same gate.
--
-- A worker may have any number of keys, so it loses them in steps. A key whose jobs all fit into a step moves in one. A
-- lost binding with more jobs is listed in `ties_lost:WORKER` and in `lost:POOL KEY` until its last job has moved.
-- Until then that worker's index is not assigned again, because its inbox still has the other jobs, and the key is not
-- cleaned up.
--
-- A binding has: seq, pool, key, index, state (open, draining, released, lost), opened_at, used_at, closed_at, cleanup,
-- failed.

local USED_RESOLUTION = 60 -- `used_at` is written at most this often: it only serves to find bindings that were unused for a day
local IDLE_SECONDS = 86400

local function is_open(tie)
    return tie and (tie.state == 'open' or tie.state == 'draining')
end

local function damaged_tie(seq, worker)
    local pool, index = string.match(worker, '^(.*)/(%d+)$')
    return {
        seq = tonumber(seq), pool = pool, key = 'lost-' .. seq, index = tonumber(index), state = 'open', opened_at = S.now, used_at = S.now,
    }
end

-- What is left of a binding whose record is missing or cannot be read: its worker, and its key if that is still bound.
-- It counts as open and without a clean-up. Nil when it was closed.
local function recovered(seq)
    for _, worker in ipairs(call('SMEMBERS', S.p .. 'bound_workers')) do
        if call('ZSCORE', S.p .. 'ties_of:' .. worker, seq) then
            local tie = damaged_tie(seq, worker)
            local bound = call('HGETALL', S.p .. 'bound:' .. tie.pool)
            for i = 1, #bound, 2 do
                if bound[i + 1] == tostring(seq) then
                    tie.key = bound[i]
                end
            end
            return tie
        end
    end
    return nil
end

function bindings.get(seq)
    local tie = seq and step.get('binding', seq)
    if seq and not (tie and tie.pool and tie.key and tie.index and tie.state) then
        tie = recovered(seq)
    end
    return tie or nil
end

function bindings.is_open(seq)
    return is_open(bindings.get(seq))
end

function bindings.of(pool, key)
    return bindings.get(call('HGET', S.p .. 'bound:' .. pool, key) or nil)
end

-- The key of a worker's lost bindings that still have jobs.
local function lost_by(worker)
    return S.p .. 'ties_lost:' .. worker
end

-- The same for a sticky key; mostly empty.
local function lost_of(tie)
    return S.p .. 'lost:' .. tie.pool .. ' ' .. tie.key
end

-- Whether a worker has no keys, and no jobs of keys that it has lost.
local function is_clear(worker)
    return call('EXISTS', S.p .. 'ties_of:' .. worker) + call('EXISTS', lost_by(worker)) == 0
end

local function forget_worker(worker)
    if is_clear(worker) then
        call('SREM', S.p .. 'bound_workers', worker)
    end
end

-- Write a binding and its indexes.
local function save(tie)
    local worker = keys.worker(tie.pool, tie.index)
    step.put('binding', tie.seq, tie)
    call('ZADD', S.p .. 'ties', tie.seq, tie.seq)
    call('ZADD', S.p .. 'ties:' .. tie.pool .. ' ' .. tie.key, tie.seq, tie.seq)
    if is_open(tie) then
        call('HSET', S.p .. 'bound:' .. tie.pool, tie.key, tie.seq)
        call('ZADD', S.p .. 'ties_of:' .. worker, tie.seq, tie.seq)
        call('SADD', S.p .. 'bound_workers', worker)
        call('ZADD', S.p .. 'ties_open', tie.seq, tie.seq)
    else
        call('HDEL', S.p .. 'bound:' .. tie.pool, tie.key)
        call('ZREM', S.p .. 'ties_of:' .. worker, tie.seq)
        call('ZREM', S.p .. 'ties_open', tie.seq)
        call('ZADD', S.p .. 'ties_closed', tie.closed_at, tie.seq)
        forget_worker(worker)
    end
    if tie.state == 'open' then
        call('ZADD', S.p .. 'ties_used', tie.used_at, tie.seq)
    else
        call('ZREM', S.p .. 'ties_used', tie.seq)
    end
end

-- Draining bindings do not count towards the load of a worker.
local function recount(tie, by)
    call('HINCRBY', S.p .. 'load:' .. tie.pool, tie.index, by)
end

local function set_state(tie, state)
    local counted = tie.state == 'open'
    tie.state = state
    if (state == 'open') ~= counted then
        recount(tie, state == 'open' and 1 or -1)
    end
end

local function close(tie, state, failed)
    set_state(tie, state)
    tie.closed_at = S.now
    tie.failed = tie.failed or failed or nil
    save(tie)
end

local function touch(tie)
    if S.now - tie.used_at > USED_RESOLUTION then
        tie.used_at = S.now
        save(tie)
    end
end

local function bind(pool, key)
    local best, fewest
    for _, index in ipairs(sessions.live(pool)) do
        local load = tonumber(call('HGET', S.p .. 'load:' .. pool, index) or 0)
        if not best or load < fewest then
            best, fewest = index, load
        end
    end
    if not best then
        return nil
    end
    local tie = { seq = step.next('binding'), pool = pool, key = key, index = best, opened_at = S.now, used_at = S.now }
    set_state(tie, 'open')
    save(tie)
    return tie
end

-- A job for a draining binding. Before the clean-up has started, the job cancels it; afterwards the job waits behind
-- it.
local function reopen(tie, e)
    local cleanup = tie.cleanup and job_record.get(tie.cleanup)
    -- Once claimed, the clean-up counts as started even if it was handed back: jobs may already wait behind it.
    if cleanup and (cleanup.fence or 0) > 0 then
        e.gate = GATE.CLEANUP
        return
    end
    set_state(tie, 'open')
    tie.cleanup, tie.used_at = nil, S.now
    save(tie)
    if cleanup then
        endings.finish(cleanup, STATE.CANCELLED, { reason = REASON.REOPENED })
    end
end

-- Decide the inbox and the gate of a job that arrives. The caller saves it.
function bindings.assign_worker(e)
    local pool = e.pool or 'default'
    if e.kind == KIND.CLEANUP then
        e.gate = nil
        return
    end
    e.gate = nil
    if e.direct then
        e.inbox = keys.worker(pool, e.direct)
        return
    end
    if not e.sticky then
        e.inbox = nil
        return
    end
    if e.binding then
        -- The job comes back (a retry, a rescue) and still belongs to its binding: it does not reopen it.
        local tie = bindings.get(e.binding)
        if is_open(tie) then
            e.inbox = keys.worker(tie.pool, tie.index)
            return
        end
        e.binding = nil
    end
    local tie = bindings.of(pool, e.sticky)
    if not tie then
        tie = bind(pool, e.sticky)
    elseif tie.state == 'draining' then
        reopen(tie, e)
    end
    if not tie then
        e.gate, e.inbox, e.binding = GATE.UNBOUND, pool .. '/', nil
        return
    end
    e.binding = tie.seq
    e.inbox = keys.worker(tie.pool, tie.index)
    touch(tie)
end

-- Whether a key has pending, running or retrying jobs besides the clean-up.
local function is_busy(tie, besides)
    local most = call('ZRANGE', S.p .. 'tied:' .. tie.seq, 0, 1)
    for _, seq in ipairs(most) do
        if tonumber(seq) ~= besides then
            return true
        end
    end
    return call('EXISTS', lost_of(tie)) == 1
end

-- Advance a draining binding as far as possible; true when it is released.
local function drain(tie)
    if is_busy(tie, tie.cleanup) then
        return false
    end
    if not tie.cleanup then
        close(tie, 'released')
        return true
    end
    local cleanup = job_record.get(tie.cleanup)
    if cleanup and cleanup.state == STATE.PENDING and cleanup.gate == GATE.CLEANUP then
        lane_limits.ungate(cleanup)
        job_record.save(cleanup)
    end
    return false
end

-- A job of a binding is final, or has left it: the release may continue.
function bindings.used(e)
    local tie = bindings.get(e.binding)
    if is_open(tie) then
        touch(tie)
        if tie.state == 'draining' then
            drain(tie)
        end
    end
end

-- The clean-up of a binding is final.
function bindings.cleaned(e, state)
    local tie = bindings.get(e.binding)
    if not tie or tie.state ~= 'draining' or tie.cleanup ~= e.seq then
        return
    end
    local failed = state ~= STATE.COMPLETED
    local held = {}
    for _, other in ipairs(job_record.all(call('ZRANGE', S.p .. 'tied:' .. tie.seq, 0, -1))) do
        if other.gate == GATE.CLEANUP then
            held[#held + 1] = other
        end
    end
    if #held == 0 then
        if is_busy(tie, e.seq) then
            -- It was cancelled before it could start: the release continues without it.
            tie.cleanup = nil
            save(tie)
        else
            close(tie, 'released', failed)
        end
        return
    end
    -- Jobs came while the clean-up ran: reopen the binding for them.
    set_state(tie, 'open')
    tie.cleanup, tie.used_at, tie.failed = nil, S.now, failed or nil
    save(tie)
    for _, waiting in ipairs(held) do
        lane_limits.ungate(waiting)
        job_record.save(waiting)
    end
end

-- Start releasing a sticky key, or return the release that is in progress. `store` stores the clean-up and returns its
-- number.
function bindings.release(pool, key, store)
    local tie = bindings.of(pool, key)
    if not tie then
        return 'nothing'
    end
    if tie.state ~= 'open' then
        return 'draining'
    end
    set_state(tie, 'draining')
    tie.cleanup = store and store(tie) or nil
    save(tie)
    return drain(tie) and 'released' or 'draining'
end

-- Move a pending job of a lost binding, or a declined one, to where it belongs now. It keeps its arrival and its grant,
-- and does not reopen a binding.
function bindings.reassign_worker(e)
    fair_order.withdraw(e)
    local tie = e.sticky and bindings.of(e.pool or 'default', e.sticky)
    e.binding = tie and tie.seq
    bindings.assign_worker(e)
    if not e.gate and e.granted then
        fair_order.enter(e)
    elseif e.granted and e.lane then
        e.granted_at = S.now
    end
    job_record.save(e)
end

-- Move up to `most` jobs of a lost binding. Running jobs are handled by the end of their session. Returns how many were
-- read.
local function move_jobs(tie, worker, most)
    local jobs = call('ZRANGE', S.p .. 'tied:' .. tie.seq, 0, most - 1)
    for _, e in ipairs(job_record.all(jobs)) do
        if e.state == STATE.PENDING then
            bindings.reassign_worker(e)
        elseif e.state ~= STATE.RUNNING then
            -- It waits for its retry, and is placed when it arrives.
            e.binding, e.inbox = nil, nil
            job_record.save(e)
        end
    end
    if #jobs == most then
        call('ZADD', lost_by(worker), tie.seq, tie.seq)
        call('ZADD', lost_of(tie), tie.seq, tie.seq)
        call('SADD', S.p .. 'bound_workers', worker)
    elseif call('ZREM', lost_by(worker), tie.seq) == 1 then
        call('ZREM', lost_of(tie), tie.seq)
        local now = bindings.of(tie.pool, tie.key)
        if now and now.state == 'draining' then
            drain(now)
        end
    end
    return #jobs
end

-- Close a binding as lost, cancel its clean-up, and assign up to `most` of its waiting jobs to workers again. Returns how many keys
-- and jobs that was.
local function lose_key(tie, worker, most)
    close(tie, 'lost')
    local cleanup = tie.cleanup and job_record.get(tie.cleanup)
    if cleanup and cleanup.state ~= STATE.RUNNING then
        endings.finish(cleanup, STATE.CANCELLED, { reason = REASON.WORKER_LOST })
    end
    return 1 + move_jobs(tie, worker, most)
end

-- Continue with lost bindings that had more jobs than one step moves. Returns how much of `most` is left.
local function go_on(worker, most)
    local seq = call('ZRANGE', lost_by(worker), 0, 0)[1]
    while seq and most > 0 do
        most = most - math.max(1, move_jobs(bindings.get(seq) or damaged_tie(seq, worker), worker, most))
        seq = call('ZRANGE', lost_by(worker), 0, 0)[1]
    end
    return most
end

-- A worker is gone: close its bindings, up to `most` keys and jobs. Bindings whose clean-up is in `held` are closed in
-- any case, because the clean-up ends with the worker. Returns how many keys were lost, and how much of `most` is left.
function bindings.lose(pool, index, most, held)
    local worker, lost = keys.worker(pool, index), 0
    local left = go_on(worker, most)
    for _, e in ipairs(held or {}) do
        local tie = e.kind == KIND.CLEANUP and bindings.get(e.binding)
        if is_open(tie) then
            left = left - lose_key(tie, worker, math.max(1, left))
            lost = lost + 1
        end
    end
    while left > 0 do
        local seq = call('ZRANGE', S.p .. 'ties_of:' .. worker, 0, 0)[1]
        -- A key that fits into one step waits for a step with enough room.
        local jobs = seq and call('ZCARD', S.p .. 'tied:' .. seq)
        if not seq or (jobs + 1 > left and left < most) then
            break
        end
        left = left - lose_key(bindings.get(seq), worker, left)
        lost = lost + 1
    end
    forget_worker(worker)
    return lost, left
end

-- Whether jobs are left of a key that this worker has lost.
function bindings.is_losing(pool, index)
    return call('EXISTS', lost_by(keys.worker(pool, index))) == 1
end

-- Whether an index has no keys and jobs of a previous worker.
function bindings.is_clear(pool, index)
    return is_clear(keys.worker(pool, index))
end

-- A pool has a live worker: bind the jobs that waited for one, in order of arrival.
function bindings.bind_unbound(pool, limit)
    local bound = 0
    for _, e in ipairs(job_record.all(call('ZRANGE', S.p .. 'unbound:' .. pool, 0, limit - 1))) do
        bindings.assign_worker(e)
        if e.gate == GATE.UNBOUND then
            break
        end
        if not e.gate then
            lane_limits.ungate(e)
        end
        job_record.save(e)
        bound = bound + 1
    end
    return bound
end

-- Drain open bindings that were unused for a day; one that still has jobs counts as used.
function bindings.drain_idle(limit)
    local drained = 0
    local idle = call('ZRANGEBYSCORE', S.p .. 'ties_used', '-inf', S.now - IDLE_SECONDS, 'LIMIT', 0, limit)
    for _, seq in ipairs(idle) do
        local tie = bindings.get(seq)
        if not tie then
            call('ZREM', S.p .. 'ties_used', seq)
        elseif is_busy(tie, nil) then
            tie.used_at = S.now
            save(tie)
        else
            set_state(tie, 'draining')
            save(tie)
            drain(tie)
            drained = drained + 1
        end
    end
    return drained
end

-- Forget a closed binding, unless it has jobs to move.
function bindings.forget(tie)
    if call('EXISTS', lost_of(tie)) == 1 then
        return
    end
    step.drop('binding', tie.seq)
    call('ZREM', S.p .. 'ties', tie.seq)
    call('ZREM', S.p .. 'ties:' .. tie.pool .. ' ' .. tie.key, tie.seq)
    call('ZREM', S.p .. 'ties_closed', tie.seq)
end
