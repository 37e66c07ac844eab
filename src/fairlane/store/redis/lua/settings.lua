-- Settings of queues and lanes, schedules, tokens and leadership: small records shared by all processes.

-- Refuse a user that lacks any of these commands on the keys and channels of the namespace: functions run with the
-- rights of their caller, so a step would stop halfway.
function settings.check_rights(commands)
    for _, command in ipairs(commands) do
        local name, part = string.match(command, '^(%u+)|?(%u*)$')
        local allowed
        if part == '' then
            allowed = redis.acl_check_cmd(name, S.p .. 'any')
        else
            allowed = redis.acl_check_cmd(name, part, S.p .. 'any')
        end
        if not allowed then
            step.refuse('not_allowed', command)
        end
    end
end

-- Create the namespace if it is new. Returns its schema; refuses one that is newer than `schema`.
function settings.open(schema)
    local stored = tonumber(call('HGET', S.p .. 'counter', 'schema') or nil)
    if not stored then
        call('HSET', S.p .. 'counter', 'schema', schema)
        return schema
    end
    if stored > schema then
        step.refuse('newer', 'the namespace has schema ' .. stored .. ', and this code knows ' .. schema)
    end
    return stored
end

-- Give limited lanes that have jobs their new limits, at once if nothing else changes. Returns which lanes were
-- limited. `unsettled`: collects the lanes that have to settle.
local function resize_lanes(queue, unsettled)
    local lanes, names, limited = call('SMEMBERS', S.p .. 'lanes:' .. queue.number), {}, {}
    for i, key in ipairs(lanes) do
        names[i] = keys.lane(queue.number, key)
    end
    for i, raw in ipairs(write_buffer.hmget(S.p .. 'lane', names)) do
        local key = lanes[i]
        local terms, most, ordered = queue_cache.rule(queue, key), lane_limits.read_lane(raw)
        limited[key] = true
        if not terms.limit or ordered ~= terms.ordered or most < 0 then
            unsettled[#unsettled + 1] = key
        elseif most ~= terms.limit then
            lane_limits.resize(lane_limits.lane(queue.number, key), terms.limit)
        end
    end
    return limited
end

-- Apply the rules to the lanes that have jobs. All such lanes are read, but only those with another limit are changed.
local function apply(queue, changed)
    if changed then
        local unsettled = {}
        local were_limited = resize_lanes(queue, unsettled)
        for _, key in ipairs(call('ZRANGE', S.p .. 'backlog:' .. queue.number, 0, -1)) do
            if queue_cache.rule(queue, key).limit and not were_limited[key] then
                unsettled[#unsettled + 1] = key
            end
        end
        lane_limit_changes.begin(queue, unsettled)
    end
    endings.notify_queue(queue.number)
end

-- Store settings that the client has merged, unless they changed since it read them. Returns whether they are stored,
-- and whether more than `most` jobs of lanes are left to change.
function settings.configure(seen, changes, most)
    if tonumber(S.settings) ~= seen then
        return false, false
    end
    for _, change in ipairs(changes) do
        local queue = queue_cache.queue(change.queue)
        local record = queue_cache.record(queue.number, change.queue)
        record.version, record.declared, record.override = change.version, change.declared, change.override
        record.settings = change.settings
        step.put('queue', queue.number, record)
        queue_cache.changed()
        apply(queue_cache.queue(change.queue), change.lanes_changed)
    end
    return true, lane_limit_changes.settle(most)
end

-- Store schedules; a changed timetable starts over.
function settings.declare(schedules, args)
    for _, new in ipairs(schedules) do
        local old = step.get('schedule', new.name)
        local same = old and old.timetable == new.timetable
        step.put('schedule', new.name, {
            timetable = new.timetable,
            stored_at = same and old.stored_at or S.now,
            declared_at = S.now,
            last_slot = old and old.last_slot,
        })
        call('HSET', S.p .. 'schedule_job', new.name, args[new.job])
    end
end

function settings.fired(name, slot)
    local schedule = step.get('schedule', name)
    if schedule then
        schedule.last_slot = math.max(schedule.last_slot or 0, slot)
        step.put('schedule', name, schedule)
    end
end

-- Store a token, unless its id is taken; returns the stored one. `lasts`: its validity in seconds, nil for ever.
function settings.add_token(token, lasts)
    local old = step.get('token', token.id)
    if old then
        return old
    end
    token.created_at = S.now
    token.expires_at = lasts and S.now + lasts or nil
    step.put('token', token.id, token)
    return token
end

-- Revoke a token; returns whether this call did, nil when there is no such token.
function settings.revoke_token(id)
    local token = step.get('token', id)
    if not token then
        return nil
    elseif token.revoked_at then
        return false
    end
    token.revoked_at = S.now
    step.put('token', id, token)
    return true
end

function settings.tokens()
    local found = {}
    for i, raw in ipairs(call('HVALS', S.p .. 'token')) do
        found[i] = raw
    end
    return found
end

-- The current or last leader; nil when there is none, or the record cannot be read.
function settings.leader()
    local raw = call('GET', S.p .. 'leader')
    local leader = raw and damage.unpacked(raw)
    return type(leader) == 'table' and leader.term and leader.expires and leader or nil
end

-- Stand for leadership, or extend a term. Returns the current term with what remains of it: also that of another session
-- to one that stands; nil to one whose term has ended.
function settings.lead(session, lease, term)
    local leader = settings.leader()
    local over = not leader or not leader.session or leader.expires <= S.mono
    local number
    if not term then
        if over then
            -- Stored twice: a leader record that cannot be read must not bring an old number back.
            number = math.max(leader and leader.term or 0, tonumber(call('HGET', S.p .. 'counter', 'term') or 0)) + 1
            call('HSET', S.p .. 'counter', 'term', number)
        elseif leader.session == session then
            number = leader.term -- it leads already: the reply to its call was lost
        else
            return { leader.term, leader.session, leader.lease, leader.expires - S.mono }
        end
    else
        if over or leader.term ~= term or leader.session ~= session then
            return nil
        end
        number = term
    end
    call('SET', S.p .. 'leader', pack({ term = number, session = session, lease = lease, expires = S.mono + lease }))
    return { number, session, lease, lease }
end

-- Resign from a term; its number is kept, so that the next one is higher.
function settings.resign(term)
    local leader = settings.leader()
    if leader and leader.term == term and leader.session then
        leader.session = nil
        call('SET', S.p .. 'leader', pack(leader))
        step.notify('leader')
    end
end
