-- How jobs end and how they go back: every way out of running or waiting, with all that follows in the same step.

local CRASH_ERROR = 'The process that ran it died, or lost contact for longer than its lease.'
local HANDED_BACK_ERROR = 'It was handed back too often: more than three times in a row its worker stopped before its body ended, '
    .. 'and no attempt is left.'
local KEPT_ATTEMPTS, MOST_HAND_BACKS = 20, 3
local SHORTEST_DECLINE, LONGEST_DECLINE = 0.25, 15 -- as `states.decline_delay` has it

local function is_declined(attempt)
    return attempt and attempt.outcome == 'declined'
end

-- Add a claim that ends, while its job goes on, to the history. The last claim of all is told by the outcome.
function outcomes.record(e, who, outcome, state, reason, message)
    local attempts = step.get('attempts', e.seq) or {}
    if outcome == 'declined' and is_declined(attempts[#attempts]) and is_declined(attempts[#attempts - 1]) then
        -- Of declines in a row the first and the last are kept: they may be many, and all are alike.
        table.remove(attempts)
    end
    attempts[#attempts + 1] = {
        fence = e.fence,
        attempt = e.attempt,
        session = who.id,
        worker = presence.worker(who),
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

-- A running job leaves: where its queue has a limit, somebody else may start now, in any inbox. Once in a step will do.
function outcomes.tell_room(queue)
    if not S.roomy[queue] then
        S.roomy[queue] = true
        if catalog.number(queue).slots then
            outcomes.tell_queue(queue)
        end
    end
end

function outcomes.tell_queue(queue)
    step.tell('queue:' .. catalog.number(queue).name)
    step.save_lines()
    for _, domain in ipairs(call('SMEMBERS', S.p .. 'domains:' .. queue)) do
        local inbox = string.match(domain, '^%d+%.%d%.(.+)$')
        if inbox and call('EXISTS', S.p .. 'line:' .. domain) == 1 then
            step.tell('worker:' .. inbox)
        end
    end
end

-- What a job's end was, and its result, which stands behind it.
function outcomes.get(seq)
    local raw = writes.hget(S.p .. 'outcome', type(seq) == 'string' and seq or writes.text(seq))
    if not raw then
        return nil
    end
    local is_ticket, record, result = pcall(tickets.read_ended, raw)
    if is_ticket and record then
        return record, result
    end
    -- How far the map goes is -1 when nothing stands behind it.
    local done, length, map = pcall(cmsgpack.unpack_one, raw)
    if not done or type(map) ~= 'table' then
        return nil
    end
    return map, map.result and (length < 0 and '' or string.sub(raw, length + 1)) or nil
end

function outcomes.put(member, record, result)
    writes.hset(S.p .. 'outcome', member, result and pack(record) .. result or pack(record))
end

-- Make a job final. What it held goes on to the next: place, binding, unique value, parent. `ending` may have: reason, result,
-- error, group, move (how the claim ended that the job ended in; nil when it ended while it waited).
function outcomes.finish(e, state, ending)
    local session = ending.move and (ending.session or e.session) or nil
    local member = writes.text(e.seq)
    entries.delete(e)
    outcomes.put(member, {
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
    writes.zadd(keys.ended(e.queue, state), S.now, keys.padded(member))
    if state ~= COMPLETED then
        writes.zadd(keys.by('state', state), member, member)
    end
    if ending.group then
        writes.zadd(keys.by('group', ending.group), member, member)
    end
    if session then
        numbers.add(keys.of_session(session), member)
    end
    step.count(e.queue, e.class, COLUMNS[e.state], -1)
    step.count(e.queue, e.class, COLUMNS[state], 1)
    if e.state == RUNNING then
        outcomes.tell_room(e.queue)
        if e.kind == 'turn' or e.kind == 'broadcast' then
            step.count(e.queue, e.class, SLOTLESS, -1)
        end
    end
    step.tell_job(e.id)
    if e.flow and e.state ~= RUNNING then
        local flow = step.flow_of(e)
        if flow.head == e.arrival then
            flows.find_head(flow)
        end
    end
    if e.uniq then
        admission.release_unique(e, state)
    end
    if e.lane then
        places.vacate(e)
    end
    if e.kind == 'cleanup' then
        bindings.cleaned(e, state)
    elseif e.binding then
        bindings.used(e)
    end
    if e.parent then
        broadcasts.child_ended(e.parent)
    end
end

-- What follows is for the many jobs of a session that complete and had tickets. What they leave behind is gathered by queue and
-- class, in lists; the caller hands their places on.
function outcomes.begin(session)
    return { session = session, heard = step.is_heard(), last = {} }
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

function outcomes.complete(done, queue, class, lane, member, id, raw, result)
    local group = done.last
    if group.queue ~= queue or group.class ~= class then
        group = group_of(done, queue, class)
        done.last = group
    end
    local count = group.count + 1
    local at, ended, records = 2 * count, group.ended, group.records
    group.count = count
    group.members[count] = member
    records[at - 1], records[at] = member, tickets.ended(raw, result)
    ended[at - 1], ended[at] = S.now, keys.padded(member)
    if lane ~= '' then
        entries.left(queue, lane)
    end
    if done.heard then
        step.tell_job(id)
    end
end

function outcomes.file(done)
    for _, group in ipairs(done) do
        local queue, class, blocks = group.queue, group.class, numbers.by_block(group.members)
        numbers.drop_all(S.alive, blocks)
        writes.srem_all(keys.held(done.session, class), group.members)
        writes.hdel_all(S.live, group.members)
        writes.hset_all(S.p .. 'outcome', group.records)
        writes.zadd_all(keys.ended(queue, COMPLETED), group.ended)
        numbers.add_all(keys.of_session(done.session), blocks)
        step.count(queue, class, 'r', -group.count)
        step.count(queue, class, 'c', group.count)
        outcomes.tell_room(queue)
    end
end

-- Cancel a waiting job whose time to start has passed.
function outcomes.expire(e)
    outcomes.finish(e, CANCELLED, { reason = 'expired' })
end

local function go_back(e, delay, keep_arrival, inbox)
    limits.reach(e)
    outcomes.tell_room(e.queue)
    local lane = e.lane and step.lane(e.queue, e.lane_key)
    local keeps_place = lane and (lane.ordered or (keep_arrival and delay <= 0))
    entries.move(e, delay > 0 and SCHEDULED or PENDING)
    e.session, e.claim, e.started_at, e.flow = nil, nil, nil, nil
    e.due = delay > 0 and S.now + delay or nil
    if not keeps_place then
        if not keep_arrival then
            e.arrival = nil
        end
        local granted = e.granted
        e.lane, e.granted = nil, nil
        if lane then
            entries.save(e)
            if granted then
                lane.granted = lane.granted - 1
            end
            places.hand_on(lane)
        end
    end
    if delay <= 0 then
        bindings.place(e)
        e.inbox = inbox or e.inbox
        if keeps_place then
            places.resume(e)
        else
            places.arrive(e)
        end
    end
    entries.save(e)
    if keeps_place then
        places.trim(lane)
        places.settle(lane)
    end
    step.tell_job(e.id)
end

-- It has started, so it does not expire any more.
local function has_started(e)
    e.to_start_by, e.expires_at = e.to_start_by or e.expires_at, nil
end

-- A retry or a snooze: it paid for its start. An ordered lane stays closed for it; elsewhere it arrives anew. `crashed`: the
-- holder saw the process of the body die. Any other end of a run clears the suspicion.
function outcomes.again(e, delay, crashed)
    e.crashes = (e.crashes or 0) + (crashed and 1 or 0)
    e.suspect = crashed or nil
    e.returns = nil
    has_started(e)
    e.paid, e.declined, e.offer = nil, nil, nil
    go_back(e, delay, false)
end

-- A hand-back or a rescue: it starts next in its lane, without paying again. `inbox`: where it is to wait.
local function back(e, delay, inbox)
    flows.give_back(e)
    go_back(e, delay, true, inbox)
end

-- Give a pending job its binding, its arrival and its place. The caller saves it.
function outcomes.admit(e)
    bindings.place(e)
    if e.lane and e.granted then
        places.resume(e)
    elseif not e.lane then
        places.arrive(e)
    end
end

-- A job's time has come: it arrives, or, if it kept its place in an ordered lane, takes it up again.
function outcomes.promote(e)
    entries.move(e, PENDING)
    e.due = nil
    outcomes.admit(e)
    entries.save(e)
    step.tell_job(e.id)
end

local function tie_is_lost(e)
    return e.kind == 'cleanup' and not bindings.is_open(e.binding)
end

local function backoff_delay(e)
    local policy = e.backoff or {}
    local base, factor, most = policy.base or 1, policy.factor or 2, policy.most or 300
    local whole = base == 0 and 0 or math.min(most, base * factor ^ (e.attempt - 1))
    return policy.jitter == false and whole or whole * step.draw()
end

-- A job whose run counts although its body did not come to an end: it runs again while its budget lasts.
local function charge(e, who, move, message)
    if tie_is_lost(e) then
        outcomes.finish(e, CANCELLED, { reason = 'worker_lost', move = move })
        return CANCELLED
    end
    e.crashes = (e.crashes or 0) + 1
    if e.cancel then
        outcomes.finish(e, CANCELLED, { reason = 'by_user', move = move })
        return CANCELLED
    end
    if e.attempt > (e.retries or 3) then
        outcomes.finish(e, FAILED, { reason = 'crashed', error = message, group = move, move = move })
        return FAILED
    end
    local delay = e.crashes <= 1 and 0 or backoff_delay(e)
    local state = delay > 0 and SCHEDULED or PENDING
    outcomes.record(e, who, move, state, 'crashed')
    e.suspect, e.declined, e.offer = true, nil, nil
    has_started(e)
    back(e, delay)
    return state
end

-- The process of a job that had begun is gone. Returns what became of the job.
function outcomes.crash(e, who)
    if e.kind == 'turn' then
        outcomes.finish(e, CANCELLED, { reason = 'waiter_gone', move = 'crashed' })
        return CANCELLED
    end
    e.returns = nil
    return charge(e, who, 'crashed', CRASH_ERROR)
end

-- A claimed job that never began, or was handed back: it waits again and its run is not charged. Returns its state.
function outcomes.take_back(e, who, move, delay)
    if tie_is_lost(e) then
        outcomes.finish(e, CANCELLED, { reason = 'worker_lost', move = move })
        return CANCELLED
    end
    if e.cancel then
        outcomes.finish(e, CANCELLED, { reason = 'by_user', move = move })
        return CANCELLED
    end
    local state = delay > 0 and SCHEDULED or PENDING
    outcomes.record(e, who, move, state)
    -- A claim that nobody began is no run: what was declined before it counts as before.
    e.declined = move == 'taken_back' and e.declined or nil
    e.attempt = e.attempt - 1
    back(e, delay)
    return state
end

-- A body that had begun was stopped. Not charged at first, and no sign against the job; then as after a crash.
function outcomes.hand_back(e, who)
    local returns = (e.returns or 0) + 1
    if returns > MOST_HAND_BACKS then
        return charge(e, who, 'handed_back', HANDED_BACK_ERROR)
    end
    e.returns = returns
    e.suspect = e.suspect or (returns == MOST_HAND_BACKS) or nil
    has_started(e)
    return outcomes.take_back(e, who, 'handed_back', 0)
end

-- Its session does not know its task: it goes back uncharged, or fails when that went on for `t.delay` seconds.
function outcomes.decline(e, who, t)
    if tie_is_lost(e) then
        outcomes.finish(e, CANCELLED, { reason = 'worker_lost', move = t.move })
        return CANCELLED
    end
    local since = e.declined or S.now
    if S.now - since >= (t.delay or 0) then
        e.attempt = e.attempt - 1
        outcomes.finish(e, FAILED, { reason = t.reason, error = t.error, group = t.group, move = t.move })
        return FAILED
    end
    -- Nobody else could take what is bound to this worker. And who takes it from that inbox should have known it.
    local state = e.inbox and SCHEDULED or PENDING
    outcomes.record(e, who, t.move, state, t.reason)
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

-- Jobs that were declined long enough: everybody is offered them once more, and may fail them.
function outcomes.offer_again(limit)
    local over = entries.all(call('ZRANGEBYSCORE', S.p .. 'overdue', '-inf', S.now, 'LIMIT', 0, limit))
    for _, e in ipairs(over) do
        e.offer = nil
        if e.state == PENDING and keys.is_unknown(e.inbox) then
            bindings.replace(e)
        else
            entries.save(e)
        end
    end
    return #over
end
