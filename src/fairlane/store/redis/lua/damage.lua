-- Jobs whose records are missing or cannot be read: a disk, an operator or a bug of another version can damage any
-- record. Such a job fails with what is left of its record, and does not block others.

local MOST_SCANNED = 100 -- pages of ids that are searched for the id of a job
local ERROR_TEXT = 'the stored record cannot be read (record: it is missing or damaged)'

-- Decode bytes; nil when they are not MessagePack.
function damage.unpacked(raw)
    local done, value = pcall(unpacked, raw)
    if done then
        return value
    end
    return nil
end

-- A live job from its record; nil when that cannot be read.
function damage.entry(raw, seq)
    local done, e = pcall(job_record.read, raw, seq)
    return done and type(e) == 'table' and e.id and e.queue and e.class and e.state and e or nil
end

-- The id of a job by its number, or a made-up one if it is not found soon.
local function id_of(member)
    local cursor = '0'
    for _ = 1, MOST_SCANNED do
        local found = call('HSCAN', S.p .. 'id', cursor, 'COUNT', 1000)
        for i = 1, #found[2], 2 do
            if found[2][i + 1] == member then
                return found[2][i]
            end
        end
        cursor = found[1]
        if cursor == '0' then
            break
        end
    end
    local id = 'lost-' .. member
    write_buffer.hset(S.p .. 'id', id, member)
    return id
end

-- The first fields of a job's content, see `encoding.Content`: task, queue, kind, class, lane. The fields behind them
-- hold bytes, which cannot be decoded here. The content follows 8 bytes of time and a list header of 3 bytes.
local function content_of(member)
    local raw = write_buffer.hget(S.p .. 'job', member)
    local done, _, content = pcall(cmsgpack.unpack_one, '\149' .. sub(raw or '', 12))
    return done and type(content) == 'table' and content or {}
end

-- The unique key in the content of a job: behind six fields, its payload, retries, back-off and timeout.
local function read_unique(raw)
    local content = sub(raw, 12)
    local at = job_content.skip_bytes(content, (cmsgpack.unpack_limit(content, 6)))
    at = job_content.skip_bytes(content, (cmsgpack.unpack_limit(content, 1, at)))
    local _, _, value = cmsgpack.unpack_limit(content, 2, at)
    return value
end

-- Task and unique key of a job, from its content or else from all held keys; nil when it holds none, or it is not found
-- soon.
local function unique_of(member, task)
    local done, value = pcall(read_unique, write_buffer.hget(S.p .. 'job', member) or '')
    if done and task then
        return task, type(value) == 'string' and value or nil
    end
    local cursor = '0'
    for _ = 1, MOST_SCANNED do
        local found = call('HSCAN', S.p .. 'unique', cursor, 'COUNT', 1000)
        for i = 1, #found[2], 2 do
            local holder = damage.unpacked(found[2][i + 1])
            if type(holder) == 'table' and holder.seq == tonumber(member) then
                return string.match(found[2][i], '^(%Z*)%z(.*)$')
            end
        end
        cursor = found[1]
        if cursor == '0' then
            break
        end
    end
    return nil
end

-- Fail a live job whose record cannot be read. `known`: what the index has about it: queue, class, lane_key, inbox,
-- arrival, state, flow, granted, lane, rank, session, and sets, other keys that contain it.
function damage.fail(seq, known)
    local member = write_buffer.text(tonumber(seq))
    for _, set in ipairs(known.sets or {}) do
        write_buffer.zrem(set, member)
    end
    local content = content_of(member)
    local queue = not known.queue and content[2] and queue_cache.known(content[2])
    local number = known.queue or queue and queue.number
    if not number or write_buffer.hget(S.p .. 'outcome', member) then
        write_buffer.hdel(S.live, member)
        return
    end
    local e = {
        seq = tonumber(member), id = id_of(member), task = content[1] or 'lost', queue = number, class = known.class or content[4] or 1,
        lane_key = known.lane_key or content[5] or nil, inbox = known.inbox, state = known.state or STATE.PENDING,
        flow = known.flow, granted = known.granted, lane = known.lane, rank = known.rank, arrival = known.arrival,
        session = known.session,
    }
    local task, value = unique_of(member, content[1])
    if value then
        e.task, e.uniq = task, value
    end
    local limited = e.state == STATE.RUNNING and e.lane_key and lane_limits.lane(number, e.lane_key)
    if limited then
        -- A running job of a limited lane has one of its places.
        e.lane, e.granted, e.rank = true, true, job_record.rank(limited.ordered, e.class)
    end
    job_record.adopt(e)
    endings.finish(e, STATE.FAILED, { reason = REASON.BAD_PAYLOAD, error = ERROR_TEXT, group = REASON.BAD_PAYLOAD })
    S.damaged[#S.damaged + 1] = e.id
end
