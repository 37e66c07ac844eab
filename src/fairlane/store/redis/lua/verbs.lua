-- The verbs of the port, one function of the library each. KEYS: the prefix of the namespace. ARGV: the time and the
-- time for leases, both empty outside of tests, then the arguments listed here; `m` is a MessagePack value. The answer
-- is a MessagePack map, {refused = …} when nothing was done. `claim` and `finish` answer with a list: first the
-- verdicts, then three parts for each claimed job.

-- Flags: a server whose memory is full rejects a verb without `allow-oom` before it begins. That holds for verbs that
-- store data of any size. Verbs that work off jobs are allowed, and so are the small declarations of a starting
-- process: otherwise no process could start that makes room.
local function verb(name, flags, run)
    redis.register_function({
        function_name = NAME .. '_' .. name,
        flags = flags,
        callback = function(names, args)
            return step.run(run, names, args)
        end,
    })
end

-- the schema that the caller knows, m commands that the functions use
verb('open', { 'allow-oom' }, function(args)
    settings.check_rights(unpacked(args[4]))
    return step.signed({ schema = settings.open(tonumber(args[3])) })
end)

-- the generation, what was found, m what to complete {session, id, fence, stamp, argument number of its result or 0},
-- then the results
verb('lost', { 'allow-oom' }, function(args)
    return step.signed(data_loss.report(args[3], args[4], unpacked(args[5]), args))
end)

-- m requests, then content and headers of each
verb('enqueue', {}, function(args)
    return step.signed({ answers = enqueue.enqueue(unpacked(args[3]), args, 4) })
end)

-- id, queue, class, task, the end of its packed record, content, headers, and its lane if it has one; answers like
-- `enqueue`, or with the signature alone
redis.register_function({
    function_name = NAME .. '_enqueue_one',
    callback = function(names, args)
        step.begin_alone(names, args)
        local id, queue, class, task, after = args[3], args[4], tonumber(args[5]), args[6], args[7]
        if enqueue_one.enqueue(id, queue, class, task, args[10] or '', after, args[8], args[9]) then
            return { S.generation, write_buffer.text(S.steps) }
        end
        return step.run(function()
            local new = packed_job_record.request(after)
            new.id, new.queue, new.class, new.task = id, queue, class, task
            return step.signed({ answers = enqueue.enqueue({ new }, args, 8) })
        end, names, args)
    end,
})

-- m session, most
verb('register', { 'allow-oom' }, function(args)
    return step.signed({ more = not sessions.register(unpacked(args[3]), tonumber(args[4])) })
end)

-- session, m held, claim, stopping
verb('renew', { 'allow-oom' }, function(args)
    return step.signed(sessions.renew(args[3], unpacked(args[4]), tonumber(args[5]), args[6] == '1'))
end)

-- session, m begun or empty, most
verb('leave', { 'allow-oom' }, function(args)
    local begun = args[4] ~= '' and unpacked(args[4]) or nil
    return pack({ more = sessions.leave(args[3], begun, tonumber(args[5])) })
end)

-- most
verb('lose', { 'allow-oom' }, function(args)
    local _, more = sessions.lose(tonumber(args[3]))
    return pack({ more = more })
end)

-- session, m {number, total, asks, whether the next claim may be answered by a push, bytes of the answer}
verb('claim', { 'allow-oom' }, function(args)
    local call_ = unpacked(args[4])
    local who = claim.check(args[3], call_[1])
    return claim.claim(who, unpack(call_))
end)

-- session, m transitions, m as for `claim` or empty, then results
verb('finish', { 'allow-oom' }, function(args)
    local call_ = args[5] ~= '' and unpacked(args[5])
    if call_ then
        claim.check(args[3], call_[1])
    end
    local verdicts = finish.finish(args[3], unpacked(args[4]), args)
    local answer = call_ and claim.claim(sessions.get(args[3]), unpack(call_)) or {}
    table.insert(answer, 1, step.signed({ verdicts = verdicts }))
    return answer
end)

-- session, m reports {id, fence, argument number of its bytes}, then the bytes
verb('progress', {}, function(args)
    return pack({ verdicts = finish.progress(args[3], unpacked(args[4]), args) })
end)

-- m ids
verb('cancel', { 'allow-oom' }, function(args)
    return pack({ states = finish.cancel(unpacked(args[3])) })
end)

-- pool, key, m request or empty, content, headers
verb('release', {}, function(args)
    local new = args[5] ~= '' and unpacked(args[5]) or nil
    return pack({ release = enqueue.release(args[3], args[4], new, args[6], args[7]) })
end)

-- term, limit
verb('promote', { 'allow-oom' }, function(args)
    step.check_term(args[3])
    return pack(maintenance.promote(tonumber(args[4])))
end)

-- term, limit
verb('admit', { 'allow-oom' }, function(args)
    step.check_term(args[3])
    return pack(maintenance.admit(tonumber(args[4])))
end)

-- term, limit, declare, most
verb('rescue', { 'allow-oom' }, function(args)
    step.check_term(args[3])
    return pack(sessions.rescue(tonumber(args[4]), args[5] == '1', tonumber(args[6])))
end)

-- term, limit, m retention
verb('prune', { 'allow-oom' }, function(args)
    step.check_term(args[3])
    return pack(prune.prune(unpacked(args[5]), tonumber(args[4])))
end)

-- m ids, m retention
verb('forget', { 'allow-oom' }, function(args)
    return pack({ gone = prune.forget(unpacked(args[3]), unpacked(args[4])) })
end)

-- session, lease, term
verb('lead', { 'allow-oom' }, function(args)
    return pack({ leader = settings.lead(args[3], tonumber(args[4]), tonumber(args[5])) or false })
end)

-- term
verb('resign', { 'allow-oom' }, function(args)
    settings.resign(tonumber(args[3]))
    return pack({ done = true })
end)

-- the counter of settings that was seen, m changes
verb('configure', { 'allow-oom' }, function(args)
    local done, more = settings.configure(tonumber(args[3]), unpacked(args[4]), tonumber(args[5]))
    return pack({ done = done, more = more })
end)

-- most
verb('settle', { 'allow-oom' }, function(args)
    return pack({ more = lane_limit_changes.settle(tonumber(args[3])) })
end)

-- m schedules {name, timetable, argument number of its job}, then the jobs
verb('declare', { 'allow-oom' }, function(args)
    settings.declare(unpacked(args[3]), args)
    return pack({ done = true })
end)

-- m token, its validity in seconds or empty
verb('add_token', {}, function(args)
    return pack({ token = settings.add_token(unpacked(args[3]), tonumber(args[4])) })
end)

-- id
verb('revoke_token', { 'allow-oom' }, function(args)
    local revoked = settings.revoke_token(args[3])
    return pack({ known = revoked ~= nil, revoked = revoked or false })
end)

verb('tokens', { 'no-writes' }, function()
    return settings.tokens()
end)

-- m ids
verb('get', { 'no-writes' }, function(args)
    return find.by_ids(unpacked(args[3]))
end)

-- session or empty for all
verb('sessions', { 'no-writes' }, function(args)
    local sessions = reading.sessions(args[3] ~= '' and args[3] or nil)
    return pack({ sessions = sessions, task_sets = reading.task_sets(sessions) })
end)

verb('leader', { 'no-writes' }, function()
    local leader = settings.leader()
    local leads = leader and leader.session and leader.expires > S.mono
    return pack({ leader = leads and { leader.term, leader.session, leader.lease, leader.expires - S.mono } or false })
end)

-- the number below which to read, m sets, how many, 1: only completed jobs
verb('scan', { 'no-writes' }, function(args)
    local found, more = find.scan(unpacked(args[4]), args[3], tonumber(args[5]), args[6] == '1')
    found[#found + 1] = more and '1' or ''
    return found
end)

-- how many lanes of a queue to read
verb('queues', { 'no-writes' }, function(args)
    return reading.queues(tonumber(args[3]))
end)

-- queue, limit, m {waiting, running, lane} after which to continue, or empty
verb('lanes', { 'no-writes' }, function(args)
    return reading.lanes(args[3], tonumber(args[4]), args[5] ~= '' and unpacked(args[5]) or nil)
end)

-- queue, lane or empty, m {whether to include running jobs, by class the arrival after which to continue or false, how
-- many}
verb('lane_line', { 'no-writes' }, function(args)
    return reading.lane_line(args[3], args[4], unpacked(args[5]))
end)

-- queue or empty, task or empty, how many to skip, how many to read, bytes of an error
verb('failures', { 'no-writes' }, function(args)
    return pack(reading.failures(args[3], args[4], tonumber(args[5]), tonumber(args[6]), tonumber(args[7])))
end)

-- generation and number after which to continue, the number empty for the present; limit
verb('ended', { 'no-writes' }, function(args)
    return pack(ended.read(args[3], tonumber(args[4]), tonumber(args[5])))
end)

-- pool or empty, key or empty, limit
verb('bindings', { 'no-writes' }, function(args)
    local pool, key = args[3] ~= '' and args[3] or nil, args[4] ~= '' and args[4] or nil
    return pack({ bindings = reading.bindings(pool, key, tonumber(args[5])) })
end)

verb('schedules', { 'no-writes' }, function()
    return reading.schedules()
end)

verb('recount', { 'allow-oom' }, function(args)
    return pack(recount.recount(tonumber(args[3])))
end)

-- limit, how many jobs to read
verb('declined', { 'no-writes' }, function(args)
    return pack({ declined = positions.declined(tonumber(args[3]), tonumber(args[4])) })
end)

-- queue, class
verb('service', { 'no-writes' }, function(args)
    return pack(positions.service(args[3], tonumber(args[4])))
end)

-- m ids, m limits
verb('positions', { 'no-writes' }, function(args)
    return pack(positions.of(unpacked(args[3]), unpacked(args[4])))
end)
