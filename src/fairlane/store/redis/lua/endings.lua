-- How jobs end or go back to waiting: every way out of running or waiting, with all its consequences in the same step.

local CRASH_ERROR = 'The process that ran it died, or lost contact for longer than its lease.'
local HANDED_BACK_ERROR = 'It was handed back too often: more than three times in a row its worker stopped before its body ended, '
    .. 'and no attempt is left.'
local KEPT_ATTEMPTS, MOST_HAND_BACKS = 20, 3
local SHORTEST_DECLINE, LONGEST_DECLINE = 0.25, 15 -- as in `states.decline_delay`

local function is_declined(attempt)
    return attempt and attempt.outcome == MOVE.DECLINE
end

-- Add an ended claim to the history of a job that goes on. The last claim of all is recorded in the outcome.
function endings.record(e, who, outcome, state, reason, message)
    local attempts = step.get('attempts', e.seq) or {}
    if outcome == MOVE.DECLINE and is_declined(attempts[#attempts]) and is_declined(attempts[#attempts - 1]) then
        -- Of consecutive declines only the first and the last are kept: there may be many, and they are alike.
        table.remove(attempts)
    end
    attempts[#attempts + 1] = {
        fence = e.fence,
        attempt = e.attempt,
        session = who.id,
        worker = sessions.worker(who),
        started_at = e.started_at or S.now,
        ended_at = S.now,
        outcome = outcome,
        state = state,
        reason = reason,
        error = message,
        refused = e.refused,
    }
    while #attempts > KEPT_ATTEMPTS do
        table.remove(attempts, 1)
    end
    step.put('attempts', e.seq, attempts)
    e.refused = nil
end

-- A running job leaves. If its queue has a limit, another job may start, in any inbox. One notification per step is
-- enough.
function endings.notify_room(queue)
    if not S.roomy[queue] then
        S.roomy[queue] = true
        if queue_cache.number(queue).slots then
            endings.notify_queue(queue)
        end
    end
end

function endings.notify_queue(queue)
    step.notify('queue:' .. queue_cache.number(queue).name)
    fair_order.save_lines()
    for _, domain in ipairs(call('SMEMBERS', S.p .. 'domains:' .. queue)) do
        local inbox = string.match(domain, '^%d+%.%d%.(.+)$')
        if inbox and call('EXISTS', S.p .. 'line:' .. domain) == 1 then
            step.notify('worker:' .. inbox)
        end
    end
end

-- The outcome of a job, and its result, which follows the outcome in the record.
function endings.get(seq)
    local raw = write_buffer.hget(S.p .. 'outcome', type(seq) == 'string' and seq or write_buffer.text(seq))
    if not raw then
        return nil
    end
    local is_packed, record, result = pcall(packed_job_record.read_ended, raw)
    if is_packed and record then
        return record, result
    end
    -- The offset behind the map is -1 when nothing follows.
    local done, length, map = pcall(cmsgpack.unpack_one, raw)
    if not done or type(map) ~= 'table' then
        return nil
    end
    return map, map.result and (length < 0 and '' or string.sub(raw, length + 1)) or nil
end

function endings.put(member, record, result)
    write_buffer.hset(S.p .. 'outcome', member, result and pack(record) .. result or pack(record))
end

-- Make a job final, and release what it held: place, binding, unique key, parent. `ending` may have: reason, result,
-- error, group, move (how the last claim ended; nil for a job that ended while it waited).
function endings.finish(e, state, ending)
    local session = ending.move and (ending.session or e.session) or nil
    local member = write_buffer.text(e.seq)
    job_record.delete(e)
    endings.put(member, {
        id = e.id,
        task = e.task,
        kind = e.kind,
        queue = e.queue,
        class = e.class,
        lane_key = e.lane_key,
        sticky = e.sticky,
        uniq = e.uniq,
        parent = e.parent,
        direct = e.direct,
        state = state,
        reason = ending.reason,
        error = ending.error,
        group = ending.group,
        result = ending.result and true or nil,
        session = session,
        move = ending.move,
        arrival = e.arrival,
        attempt = e.attempt,
        fence = e.fence,
        started_at = e.started_at,
        finished_at = S.now,
        refused = e.refused,
        cancel = e.cancel,
        suspect = e.suspect,
        expires_at = e.expires_at or e.to_start_by,
        binding = e.binding,
        inbox = e.inbox,
    }, ending.result)
    write_buffer.zadd(keys.ended(e.queue, state), S.now, keys.padded(member))
    if state ~= STATE.COMPLETED then
        write_buffer.zadd(keys.by('state', state), member, member)
        write_buffer.zadd(S.p .. 'endings', step.next('ending'), member)
    end
    if ending.group then
        write_buffer.zadd(keys.by('group', ending.group), member, member)
    end
    if session then
        id_sets.add(keys.of_session(session), member)
    end
    step.count(e.queue, e.class, COLUMNS[e.state], -1)
    step.count(e.queue, e.class, COLUMNS[state], 1)
    if e.state == STATE.RUNNING then
        endings.notify_room(e.queue)
        if e.kind == KIND.TURN or e.kind == KIND.BROADCAST then
            step.count(e.queue, e.class, SLOTLESS, -1)
        end
    end
    step.notify_job(e.id)
    if e.flow and e.state ~= STATE.RUNNING then
        local flow = fair_order.flow_of(e)
        if flow.head == e.arrival then
            fair_order.find_head(flow)
        end
    end
    if e.uniq then
        enqueue.release_unique(e, state)
    end
    if e.lane then
        lane_limits.vacate(e)
    end
    if e.kind == KIND.CLEANUP then
        bindings.cleaned(e, state)
    elseif e.binding then
        bindings.used(e)
    end
    if e.parent then
        broadcasts.child_ended(e.parent)
    end
end

-- Bulk completion for jobs of a session with packed records. Removals are collected in lists by queue and class; the
-- caller grants their places to other jobs.
function endings.begin(session)
    return { session = session, has_listeners = step.has_listeners(), last = {} }
end

local function group_of(done, queue, class)
    for _, group in ipairs(done) do
        if group.queue == queue and group.class == class then
            return group
        end
    end
    local group = { queue = queue, class = class, count = 0, members = {}, records = {}, ended = {} }
    done[#done + 1] = group
    return group
end

function endings.complete(done, queue, class, lane, member, id, raw, result)
    local group = done.last
    if group.queue ~= queue or group.class ~= class then
        group = group_of(done, queue, class)
        done.last = group
    end
    local count = group.count + 1
    local at, ended, records = 2 * count, group.ended, group.records
    group.count = count
    group.members[count] = member
    records[at - 1], records[at] = member, packed_job_record.ended(raw, result)
    ended[at - 1], ended[at] = S.now, keys.padded(member)
    if lane ~= '' then
        job_record.left(queue, lane)
    end
    if done.has_listeners then
        step.notify_job(id)
    end
end

function endings.file(done)
    for _, group in ipairs(done) do
        local queue, class, blocks = group.queue, group.class, id_sets.by_block(group.members)
        id_sets.drop_all(S.alive, blocks)
        write_buffer.srem_all(keys.held(done.session, class), group.members)
        write_buffer.hdel_all(S.live, group.members)
        write_buffer.hset_all(S.p .. 'outcome', group.records)
        write_buffer.zadd_all(keys.ended(queue, STATE.COMPLETED), group.ended)
        id_sets.add_all(keys.of_session(done.session), blocks)
        step.count(queue, class, 'r', -group.count)
        step.count(queue, class, 'c', group.count)
        endings.notify_room(queue)
    end
end

-- Cancel a waiting job that expired.
function endings.expire(e)
    endings.finish(e, STATE.CANCELLED, { reason = REASON.EXPIRED })
end

local function go_back(e, delay, keep_arrival, inbox)
    lane_limit_changes.reach(e)
    endings.notify_room(e.queue)
    local lane = e.lane and lane_limits.lane(e.queue, e.lane_key)
    local keeps_place = lane and (lane.ordered or (keep_arrival and delay <= 0))
    job_record.move(e, delay > 0 and STATE.SCHEDULED or STATE.PENDING)
    e.session, e.claim, e.started_at, e.flow = nil, nil, nil, nil
    e.due = delay > 0 and S.now + delay or nil
    if not keeps_place then
        if not keep_arrival then
            e.arrival = nil
        end
        local granted = e.granted
        e.lane, e.granted = nil, nil
        if lane then
            job_record.save(e)
            if granted then
                lane.granted = lane.granted - 1
            end
            lane_limits.hand_on(lane)
        end
    end
    if delay <= 0 then
        bindings.assign_worker(e)
        e.inbox = inbox or e.inbox
        if keeps_place then
            lane_limits.resume(e)
        else
            lane_limits.arrive(e)
        end
    end
    job_record.save(e)
    if keeps_place then
        lane_limits.trim(lane)
        lane_limits.regrant(lane)
    end
    step.notify_job(e.id)
end

-- A job that has started does not expire any more.
local function has_started(e)
    e.to_start_by, e.expires_at = e.to_start_by or e.expires_at, nil
end

-- A retry or a snooze: the job has paid for its start. An ordered lane stays closed for it; in other lanes it arrives
-- anew. `crashed`: the holder saw the process of the job die. Any other end of a run clears the suspicion.
function endings.again(e, delay, crashed)
    e.crashes = (e.crashes or 0) + (crashed and 1 or 0)
    e.suspect = crashed or nil
    e.returns = nil
    has_started(e)
    e.paid, e.declined, e.offer = nil, nil, nil
    go_back(e, delay, false)
end

-- A hand-back or a rescue: the job starts next in its lane and does not pay again. `inbox`: where it waits.
local function back(e, delay, inbox)
    fair_order.give_back(e)
    go_back(e, delay, true, inbox)
end

-- Give a pending job its binding, its arrival and its place. The caller saves it.
function endings.admit(e)
    bindings.assign_worker(e)
    if e.lane and e.granted then
        lane_limits.resume(e)
    elseif not e.lane then
        lane_limits.arrive(e)
    end
end

-- A scheduled job is due: it arrives or, if it kept its place in an ordered lane, resumes it.
function endings.promote(e)
    job_record.move(e, STATE.PENDING)
    e.due = nil
    endings.admit(e)
    job_record.save(e)
    step.notify_job(e.id)
end

local function tie_is_lost(e)
    return e.kind == KIND.CLEANUP and not bindings.is_open(e.binding)
end

local function backoff_delay(e)
    local policy = e.backoff or {}
    local base, factor, most = policy.base or 1, policy.factor or 2, policy.most or 300
    local whole = base == 0 and 0 or math.min(most, base * factor ^ (e.attempt - 1))
    return policy.jitter == false and whole or whole * step.draw()
end

-- A run that is charged although the job function did not finish: the job runs again while its retries last.
local function charge(e, who, move, message)
    if tie_is_lost(e) then
        endings.finish(e, STATE.CANCELLED, { reason = REASON.WORKER_LOST, move = move })
        return STATE.CANCELLED
    end
    e.crashes = (e.crashes or 0) + 1
    if e.cancel then
        endings.finish(e, STATE.CANCELLED, { reason = REASON.BY_USER, move = move })
        return STATE.CANCELLED
    end
    if e.attempt > (e.retries or 3) then
        endings.finish(e, STATE.FAILED, { reason = REASON.CRASHED, error = message, group = move, move = move })
        return STATE.FAILED
    end
    local delay = e.crashes <= 1 and 0 or backoff_delay(e)
    local state = delay > 0 and STATE.SCHEDULED or STATE.PENDING
    endings.record(e, who, move, state, REASON.CRASHED)
    e.suspect, e.declined, e.offer = true, nil, nil
    has_started(e)
    back(e, delay)
    return state
end

-- The process that ran a job is gone. Returns the new state of the job.
function endings.crash(e, who)
    if e.kind == KIND.TURN then
        endings.finish(e, STATE.CANCELLED, { reason = REASON.WAITER_GONE, move = MOVE.CRASH })
        return STATE.CANCELLED
    end
    e.returns = nil
    return charge(e, who, MOVE.CRASH, CRASH_ERROR)
end

-- A claimed job that never began, or was handed back: it waits again, uncharged. Returns its state.
function endings.take_back(e, who, move, delay)
    if tie_is_lost(e) then
        endings.finish(e, STATE.CANCELLED, { reason = REASON.WORKER_LOST, move = move })
        return STATE.CANCELLED
    end
    if e.cancel then
        endings.finish(e, STATE.CANCELLED, { reason = REASON.BY_USER, move = move })
        return STATE.CANCELLED
    end
    local state = delay > 0 and STATE.SCHEDULED or STATE.PENDING
    endings.record(e, who, move, state)
    -- A claim that never began is not a run: earlier declines still count.
    e.declined = move == MOVE.TAKE_BACK and e.declined or nil
    e.attempt = e.attempt - 1
    back(e, delay)
    return state
end

-- A running job was stopped by its worker. The first hand-backs are not charged; further ones count as crashes.
function endings.hand_back(e, who)
    local returns = (e.returns or 0) + 1
    if returns > MOST_HAND_BACKS then
        return charge(e, who, MOVE.HAND_BACK, HANDED_BACK_ERROR)
    end
    e.returns = returns
    e.suspect = e.suspect or (returns == MOST_HAND_BACKS) or nil
    has_started(e)
    return endings.take_back(e, who, MOVE.HAND_BACK, 0)
end

-- The session does not know the task: the job goes back uncharged, or fails when that went on for `t.delay` seconds.
function endings.decline(e, who, t)
    if tie_is_lost(e) then
        endings.finish(e, STATE.CANCELLED, { reason = REASON.WORKER_LOST, move = t.move })
        return STATE.CANCELLED
    end
    local since = e.declined or S.now
    if S.now - since >= (t.delay or 0) then
        e.attempt = e.attempt - 1
        endings.finish(e, STATE.FAILED, { reason = t.reason, error = t.error, group = t.group, move = t.move })
        return STATE.FAILED
    end
    -- No other worker can take a job that is bound to this one, so it is scheduled for later.
    local state = e.inbox and STATE.SCHEDULED or STATE.PENDING
    endings.record(e, who, t.move, state, t.reason)
    e.declined = since
    e.attempt = e.attempt - 1
    if e.inbox then
        e.offer = nil
        back(e, math.min(LONGEST_DECLINE, math.max(SHORTEST_DECLINE, (S.now - since) / 2)))
    else
        e.offer = since + t.delay
        call('SADD', S.p .. 'unknown', e.queue .. ' ' .. e.task)
        back(e, 0, keys.unknown(e.task))
    end
    return state
end

-- Jobs that were declined for long enough are offered to all workers once more, and those may fail them.
function endings.offer_again(limit)
    local over = job_record.all(call('ZRANGEBYSCORE', S.p .. 'overdue', '-inf', S.now, 'LIMIT', 0, limit))
    for _, e in ipairs(over) do
        e.offer = nil
        if e.state == STATE.PENDING and keys.is_unknown(e.inbox) then
            bindings.reassign_worker(e)
        else
            job_record.save(e)
        end
    end
    return #over
end
