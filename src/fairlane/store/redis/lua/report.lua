-- What sessions write about jobs they hold, fenced by (job, fence, session), and what users ask to be cancelled.

local FINAL = { completed = COMPLETED, failed = FAILED, cancelled = CANCELLED }

-- Whether a write repeats the one that ended a claim. A requested cancel turns all but a completion into its end.
local function is_same(move, outcome)
    return move and (outcome == move or (outcome == 'cancelled' and move ~= 'completed'))
end

-- A write by somebody who does not hold the job: a repetition, or stale. Answers acceptance and state.
local function judge(session, id, fence, move)
    local seq = entries.number(id)
    if not seq then
        return { 'stale' }
    end
    local live = entries.get(seq)
    local outcome, result = outcomes.get(seq)
    local state = live and live.state or outcome and outcome.state
    if outcome and outcome.fence == fence and outcome.move then
        if outcome.session == session and is_same(move, outcome.move) then
            return { 'repeated', state }
        end
        outcome.refused = (outcome.refused or 0) + 1
        outcomes.put(seq, outcome, result)
        return { 'stale', state }
    end
    local attempts = step.get('attempts', seq) or {}
    for _, attempt in ipairs(attempts) do
        if attempt.fence == fence then
            if attempt.session == session and is_same(move, attempt.outcome) then
                return { 'repeated', attempt.state }
            end
            attempt.refused = (attempt.refused or 0) + 1
            step.put('attempts', seq, attempts)
            return { 'stale', state }
        end
    end
    if live and live.fence == fence and live.state == RUNNING then
        live.refused = (live.refused or 0) + 1
        entries.save(live)
    end
    return { 'stale', state }
end

-- Carry out a transition of the holder; a requested cancel turns all but a completion into its end.
local function apply(e, t, who)
    local move, reason = t.move, t.reason
    if e.cancel and move ~= 'completed' then
        move, reason = 'cancelled', 'by_user'
    elseif e.kind == 'turn' and move == 'retry' then
        move = 'failed'
    elseif e.kind == 'turn' and (move == 'snoozed' or move == 'handed_back' or move == 'taken_back' or move == 'declined') then
        move, reason = 'cancelled', 'by_user'
    end
    if move == 'handed_back' then
        return outcomes.hand_back(e, who)
    end
    if move == 'taken_back' then
        return outcomes.take_back(e, who, move, t.delay or 0)
    end
    if move == 'declined' then
        return outcomes.decline(e, who, t)
    end
    if move == 'retry' or move == 'snoozed' then
        local delay = t.delay or 0
        local state = delay > 0 and SCHEDULED or PENDING
        outcomes.record(e, who, move, state, reason, t.error)
        if move == 'snoozed' then
            e.attempt = e.attempt - 1
        end
        outcomes.again(e, delay, reason == 'crashed')
        return state
    end
    local state = FINAL[move]
    outcomes.finish(e, state, { reason = reason, result = t.result, error = t.error, group = t.group, move = move })
    return state
end

-- Complete a job that has no ticket, or that the session does not hold.
local function complete_one(session, present, id, fence, result)
    local e = present and entries.by_id(id)
    if e and e.session == session and e.fence == fence then
        outcomes.finish(e, COMPLETED, { result = result, move = 'completed' })
        return { 'applied', COMPLETED }
    end
    return judge(session, id, fence, 'completed')
end

-- Complete jobs of a session, each once. `batch` has ids, fences, and results, the places of their bytes among the arguments or
-- 0. Returns no verdicts when all were accepted: nearly always so.
function report.complete(session, batch, args)
    local present, holder = presence.is_present(presence.get(session)), tickets.holder(session)
    local ids, fences, results, others = batch.ids, batch.fences, batch.results, {}
    local seqs = writes.hmget(S.p .. 'id', ids)
    for i, seq in ipairs(seqs) do
        seqs[i] = seq or ''
    end
    local done, queues, lanes = outcomes.begin(session), {}, {}
    for i, raw in ipairs(writes.hmget(S.live, seqs)) do
        local class, queue, lane, limited
        if raw and present then
            class, queue, lane, limited = tickets.held(raw, holder, fences[i], #ids[i])
        end
        if class then
            outcomes.complete(done, queue, class, lane, seqs[i], ids[i], raw, args[results[i]])
            if limited then
                local i = #lanes + 1
                queues[i], lanes[i] = queue, lane
            end
        else
            others[#others + 1] = i
        end
    end
    outcomes.file(done)
    batches.hand_on(queues, lanes)
    if #others == 0 then
        return {}
    end
    local verdicts = {}
    for i = 1, #ids do
        verdicts[i] = { 'applied', COMPLETED }
    end
    for _, i in ipairs(others) do
        verdicts[i] = complete_one(session, present, ids[i], fences[i], args[results[i]])
    end
    return verdicts
end

-- Apply what a session decided about its jobs. A transition has: id, fence, move, delay, reason, error, group, and result, the
-- place of its bytes among the arguments.
function report.finish(session, transitions, args)
    if transitions.ids then
        return report.complete(session, transitions, args)
    end
    local who = presence.get(session)
    local present = presence.is_present(who)
    local verdicts = {}
    for i, t in ipairs(transitions) do
        local e = present and entries.by_id(t.id) or nil
        if e and e.session == session and e.fence == t.fence then
            t.result = t.result and args[t.result]
            verdicts[i] = { 'applied', apply(e, t, who) }
        else
            verdicts[i] = judge(session, t.id, t.fence, t.move)
        end
    end
    return verdicts
end

-- Keep the latest progress of running jobs.
function report.progress(session, reports, args)
    local present = presence.is_present(presence.get(session))
    local verdicts = {}
    for i, r in ipairs(reports) do
        local e = present and entries.by_id(r[1]) or nil
        if e and e.session == session and e.fence == r[2] then
            call('HSET', S.p .. 'progress', e.seq, args[r[3]])
            step.tell_job(e.id)
            verdicts[i] = { 'applied', RUNNING }
        else
            verdicts[i] = judge(session, r[1], r[2])
        end
    end
    return verdicts
end

-- Cancel a live job: at once while it waits, by request while it runs.
function report.cancel_entry(e)
    if e.state ~= RUNNING then
        outcomes.finish(e, CANCELLED, { reason = 'by_user' })
        return CANCELLED
    end
    if e.kind == 'broadcast' then
        return broadcasts.cancel(e)
    end
    if not e.cancel then
        e.cancel = true
        entries.save(e)
        step.tell('session:' .. e.session)
        step.tell_job(e.id)
    end
    return RUNNING
end

-- Cancel jobs; nothing is cancelled when one of them is unknown.
function report.cancel(ids)
    local seqs, states = {}, {}
    for i, id in ipairs(ids) do
        seqs[i] = entries.number(id)
        if not seqs[i] then
            step.refuse('not_found', "there is no job '" .. id .. "'")
        end
    end
    for i, seq in ipairs(seqs) do
        local e = entries.get(seq)
        local outcome = not e and outcomes.get(seq)
        if not (e or outcome) then
            damage.fail(seq, {})
        end
        states[i] = e and report.cancel_entry(e) or outcome and outcome.state or FAILED
    end
    return states
end
