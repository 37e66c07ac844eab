-- Writes of sessions about jobs they hold, fenced by (job, fence, session), and cancel requests of users.

local FINAL = { [MOVE.COMPLETE] = STATE.COMPLETED, [MOVE.FAIL] = STATE.FAILED, [MOVE.CANCEL] = STATE.CANCELLED }

-- Whether a write repeats the one that ended a claim. A requested cancel replaces every move except a completion.
local function is_same(move, outcome)
    return move and (outcome == move or (outcome == MOVE.CANCEL and move ~= MOVE.COMPLETE))
end

-- The verdict on a write by a session that does not hold the job: repeated or stale. Returns acceptance and state.
local function judge(session, id, fence, move)
    local seq = job_record.number(id)
    if not seq then
        return { 'stale' }
    end
    local live = job_record.get(seq)
    local outcome, result = endings.get(seq)
    local state = live and live.state or outcome and outcome.state
    if outcome and outcome.fence == fence and outcome.move then
        if outcome.session == session and is_same(move, outcome.move) then
            return { 'repeated', state }
        end
        outcome.refused = (outcome.refused or 0) + 1
        endings.put(seq, outcome, result)
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
    if live and live.fence == fence and live.state == STATE.RUNNING then
        live.refused = (live.refused or 0) + 1
        job_record.save(live)
    end
    return { 'stale', state }
end

-- Apply a transition of the holder. A requested cancel replaces every move except a completion.
local function apply(e, t, who)
    local move, reason = t.move, t.reason
    if e.cancel and move ~= MOVE.COMPLETE then
        move, reason = MOVE.CANCEL, REASON.BY_USER
    elseif e.kind == KIND.TURN and move == MOVE.RETRY then
        move = MOVE.FAIL
    elseif e.kind == KIND.TURN and (move == MOVE.SNOOZE or move == MOVE.HAND_BACK or move == MOVE.TAKE_BACK or move == MOVE.DECLINE) then
        move, reason = MOVE.CANCEL, REASON.BY_USER
    end
    if move == MOVE.HAND_BACK then
        return endings.hand_back(e, who)
    end
    if move == MOVE.TAKE_BACK then
        return endings.take_back(e, who, move, t.delay or 0)
    end
    if move == MOVE.DECLINE then
        return endings.decline(e, who, t)
    end
    if move == MOVE.RETRY or move == MOVE.SNOOZE then
        local delay = t.delay or 0
        local state = delay > 0 and STATE.SCHEDULED or STATE.PENDING
        endings.record(e, who, move, state, reason, t.error)
        if move == MOVE.SNOOZE then
            e.attempt = e.attempt - 1
        end
        if t.payload then
            job_content.replace_payload(e.seq, t.payload)
        end
        endings.again(e, delay, reason == REASON.CRASHED)
        return state
    end
    local state = FINAL[move]
    endings.finish(e, state, { reason = reason, result = t.result, error = t.error, group = t.group, move = move })
    return state
end

-- Pop the first waiting job of each limited lane that has lost exactly one job and is full otherwise. Returns numbers,
-- scores and the index of the lane of each; other lanes are added to `rest`.
local function pop_waiting(names, rest)
    local times, members, scores, at = {}, {}, {}, {}
    for _, name in ipairs(names) do
        times[name] = (times[name] or 0) + 1
    end
    for i, raw in ipairs(write_buffer.hmget(S.p .. 'lane', names)) do
        local name = names[i]
        local is_simple = times[name] == 1 and not S.lanes[name] and raw and lane_limits.is_full(raw)
        local popped = is_simple and call('ZPOPMIN', S.p .. 'wait:' .. name) or {}
        if popped[1] then
            local n = #at + 1
            members[n], scores[n], at[n] = popped[1], popped[2], i
        else
            rest[#rest + 1] = i
        end
    end
    return members, scores, at
end

-- Add a job that was granted a place to its flow; `record` is the stored flow. Returns false, without changes, if the
-- job comes before others there.
local function join(lists, domain, lane, flow_key, record, member, arrival)
    local finish, tag, head = 0, nil, nil
    if record then
        finish, tag, head = fair_order.read_flow(record)
    end
    if tag and arrival < head then
        return false
    end
    if not tag then
        tag = math.max(domain.clock, finish)
        local records, line = lists.records, lists.lines[domain] or {}
        lists.lines[domain] = line
        records[#records + 1], records[#records + 2] = flow_key, fair_order.flow_bytes(finish, tag, arrival, member)
        line[#line + 1], line[#line + 2] = tag, fair_order.line_member(arrival, lane)
        step.notify(domain.topic)
    end
    call('ZADD', S.p .. 'ready:' .. flow_key, arrival, member)
    return true
end

-- Jobs with packed records have left these limited lanes: grant each place to the next job of its lane.
local function hand_on_places(queues, lanes)
    local names, rest, lists = {}, {}, { lives = {}, records = {}, lines = {} }
    for i, lane in ipairs(lanes) do
        names[i] = keys.lane(queues[i], lane)
    end
    fair_order.put_flows()
    local members, scores, at = pop_waiting(names, rest)
    local raws, flow_keys, classes, arrivals = write_buffer.hmget(S.live, members), {}, {}, {}
    for n, raw in ipairs(raws) do
        flow_keys[n], classes[n] = '', false
        if packed_job_record.is_whole(raw) then
            classes[n], arrivals[n] = packed_job_record.class_and_arrival(raw)
            flow_keys[n] = keys.flow(fair_order.domain(queues[at[n]], classes[n], '').key, lanes[at[n]])
        end
    end
    for n, record in ipairs(write_buffer.hmget(S.p .. 'flow', flow_keys)) do
        local i, member, class = at[n], members[n], classes[n]
        local domain = class and fair_order.domain(queues[i], class, '')
        if domain and join(lists, domain, lanes[i], flow_keys[n], record, member, arrivals[n]) then
            local lives = lists.lives
            lives[#lives + 1], lives[#lives + 2] = member, packed_job_record.granted(raws[n])
            job_record.forget_indexed(member)
            step.notify_lane(queues[i], lanes[i])
        else
            write_buffer.zadd(S.p .. 'wait:' .. names[i], scores[n], member)
            rest[#rest + 1] = i
        end
    end
    write_buffer.hset_all(S.live, lists.lives)
    write_buffer.hset_all(S.p .. 'flow', lists.records)
    for domain, line in pairs(lists.lines) do
        write_buffer.zadd_all(domain.line, line)
    end
    for _, i in ipairs(rest) do
        lane_limits.leave(queues[i], lanes[i])
    end
end

-- Complete a job that has no packed record, or that the session does not hold.
local function complete_one(session, present, id, fence, result)
    local e = present and job_record.by_id(id)
    if e and e.session == session and e.fence == fence then
        endings.finish(e, STATE.COMPLETED, { result = result, move = MOVE.COMPLETE })
        return { 'applied', STATE.COMPLETED }
    end
    return judge(session, id, fence, MOVE.COMPLETE)
end

-- Complete jobs of a session, each once. `batch` has ids, fences and results, which are argument numbers or 0. Returns
-- no verdicts when all were applied, which is the usual case.
function finish.complete(session, batch, args)
    local present, holder = sessions.is_present(sessions.get(session)), packed_job_record.holder(session)
    local ids, fences, results, others = batch.ids, batch.fences, batch.results, {}
    local seqs = write_buffer.hmget(S.p .. 'id', ids)
    for i, seq in ipairs(seqs) do
        seqs[i] = seq or ''
    end
    local done, queues, lanes = endings.begin(session), {}, {}
    for i, raw in ipairs(write_buffer.hmget(S.live, seqs)) do
        local class, queue, lane, limited
        if raw and present then
            class, queue, lane, limited = packed_job_record.held(raw, holder, fences[i], #ids[i])
        end
        if class then
            endings.complete(done, queue, class, lane, seqs[i], ids[i], raw, args[results[i]])
            if limited then
                local i = #lanes + 1
                queues[i], lanes[i] = queue, lane
            end
        else
            others[#others + 1] = i
        end
    end
    endings.file(done)
    hand_on_places(queues, lanes)
    if #others == 0 then
        return {}
    end
    local verdicts = {}
    for i = 1, #ids do
        verdicts[i] = { 'applied', STATE.COMPLETED }
    end
    for _, i in ipairs(others) do
        verdicts[i] = complete_one(session, present, ids[i], fences[i], args[results[i]])
    end
    return verdicts
end

-- Apply the transitions of a session. A transition has: id, fence, move, delay, reason, error, group, and result and
-- payload, which are argument numbers.
function finish.finish(session, transitions, args)
    if transitions.ids then
        return finish.complete(session, transitions, args)
    end
    local who = sessions.get(session)
    local present = sessions.is_present(who)
    local verdicts = {}
    for i, t in ipairs(transitions) do
        local e = present and job_record.by_id(t.id) or nil
        if e and e.session == session and e.fence == t.fence then
            t.result, t.payload = t.result and args[t.result], t.payload and args[t.payload]
            verdicts[i] = { 'applied', apply(e, t, who) }
        else
            verdicts[i] = judge(session, t.id, t.fence, t.move)
        end
    end
    return verdicts
end

-- Store the latest progress of running jobs.
function finish.progress(session, reports, args)
    local present = sessions.is_present(sessions.get(session))
    local verdicts = {}
    for i, r in ipairs(reports) do
        local e = present and job_record.by_id(r[1]) or nil
        if e and e.session == session and e.fence == r[2] then
            call('HSET', S.p .. 'progress', e.seq, args[r[3]])
            step.notify_job(e.id)
            verdicts[i] = { 'applied', STATE.RUNNING }
        else
            verdicts[i] = judge(session, r[1], r[2])
        end
    end
    return verdicts
end

-- Cancel a live job: at once while it waits, by request while it runs.
function finish.cancel_entry(e)
    if e.state ~= STATE.RUNNING then
        endings.finish(e, STATE.CANCELLED, { reason = REASON.BY_USER })
        return STATE.CANCELLED
    end
    if e.kind == KIND.BROADCAST then
        return broadcasts.cancel(e)
    end
    if not e.cancel then
        e.cancel = true
        job_record.save(e)
        step.notify('session:' .. e.session)
        step.notify_job(e.id)
    end
    return STATE.RUNNING
end

-- Cancel jobs; if one of them is unknown, none is cancelled. Turns come first: the end of another job would grant its place of
-- a lane to a turn that waits for it, and the turn would start at once.
function finish.cancel(ids)
    local seqs, states, turns, others = {}, {}, {}, {}
    for i, id in ipairs(ids) do
        seqs[i] = job_record.number(id)
        if not seqs[i] then
            step.refuse('not_found', "there is no job '" .. id .. "'")
        end
    end
    for i, seq in ipairs(seqs) do
        local e = job_record.look(seq)
        local group = e and e.kind == KIND.TURN and turns or others
        group[#group + 1] = i
    end
    for _, group in ipairs({ turns, others }) do
        for _, i in ipairs(group) do
            local e = job_record.get(seqs[i])
            local outcome = not e and endings.get(seqs[i])
            if not (e or outcome) then
                damage.fail(seqs[i], {})
            end
            states[i] = e and finish.cancel_entry(e) or outcome and outcome.state or STATE.FAILED
        end
    end
    return states
end
