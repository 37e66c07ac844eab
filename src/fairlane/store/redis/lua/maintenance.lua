-- Passes of the leader: promoting due jobs, and repairs.

local MOST_DUE = 20000

-- The next jobs of a class that are due, by due time, then id.
local function due_of(class, limit)
    local set = S.p .. 'due:' .. class
    local found = call('ZRANGEBYSCORE', set, '-inf', S.now, 'WITHSCORES', 'LIMIT', 0, limit)
    local seqs, last = {}, found[2 * limit]
    for i = 1, #found, 2 do
        if found[i + 1] ~= last then
            seqs[#seqs + 1] = found[i]
        end
    end
    if last then
        -- The page ends among jobs of one due time, which are sorted by number. All of them are read, up to a limit.
        for _, seq in ipairs(call('ZRANGEBYSCORE', set, last, last, 'LIMIT', 0, math.max(limit, MOST_DUE))) do
            seqs[#seqs + 1] = seq
        end
    end
    local jobs = job_record.all(seqs)
    if #jobs < #seqs then
        for _, seq in ipairs(seqs) do
            if not job_record.look(seq) then
                damage.fail(seq, { class = class, state = STATE.SCHEDULED, sets = { set, S.p .. 'later' } })
            end
        end
    end
    table.sort(jobs, function(a, b)
        if a.due ~= b.due then
            return a.due < b.due
        end
        return a.id < b.id
    end)
    for i = #jobs, limit + 1, -1 do
        jobs[i] = nil
    end
    return jobs
end

-- Cancel expired jobs, then promote due ones: by class, then due time, then id.
function maintenance.promote(limit)
    local expired = call('ZRANGEBYSCORE', S.p .. 'expiry', '-inf', S.now, 'LIMIT', 0, limit)
    lane_limits.defer_grants()
    for _, seq in ipairs(expired) do
        -- Read one by one: the end of one job can make another claimable, such as a clean-up.
        local e = job_record.get(seq)
        if not e then
            damage.fail(seq, { sets = { S.p .. 'expiry' } })
        elseif e.state ~= STATE.RUNNING then
            endings.expire(e)
        end
    end
    lane_limits.grant_deferred()
    local promoted, late = 0, nil
    for class = CLASS.HIGH, CLASS.LOW do
        local arriving = due_of(class, limit - promoted)
        if arriving[1] then
            late = math.max(late or 0, S.now - arriving[1].due)
        end
        for _, e in ipairs(arriving) do
            endings.promote(e)
        end
        promoted = promoted + #arriving
    end
    local closed = broadcasts.close_joining(limit)
    local soonest
    for _, set in ipairs({ 'expiry', 'due:0', 'due:1', 'due:2', 'joining' }) do
        local first = call('ZRANGE', S.p .. set, 0, 0, 'WITHSCORES')
        if first[2] then
            soonest = math.min(soonest or math.huge, tonumber(first[2]))
        end
    end
    return {
        promoted = promoted,
        expired = #expired,
        more = #expired == limit or promoted == limit or closed == limit,
        next_due = soonest and math.max(0, soonest - S.now) or nil,
        late = late,
        damaged = S.damaged,
    }
end

-- Bind unbound jobs, move idle grants, and repair lanes. No job is ever stored without being admitted, so that count is
-- 0.
function maintenance.admit(limit)
    local bound = 0
    for _, pool in ipairs(call('SMEMBERS', S.p .. 'pools')) do
        bound = bound + bindings.bind_unbound(pool, limit)
    end
    local offered = endings.offer_again(limit)
    local moved = lane_limits.move_idle_grants(limit)
    local repaired = 0
    for _, name in ipairs(call('SRANDMEMBER', S.p .. 'short', limit)) do
        local queue, key = string.match(name, '^(%d+)|(.*)$')
        local lane = lane_limits.lane(tonumber(queue), key)
        repaired = repaired + (lane and lane_limits.hand_on(lane) or 0)
        if S.lanes[name] then
            lane_limits.save_room(lane) -- a job that has come since may have taken the last place
        else
            call('SREM', S.p .. 'short', name)
        end
    end
    -- The process that changed the rules does this, unless it has died.
    local unsettled = lane_limit_changes.settle(MOST_LOOKED_AT)
    return { admitted = 0, moved = moved, repaired = repaired, more = bound == limit or offered == limit or unsettled }
end
