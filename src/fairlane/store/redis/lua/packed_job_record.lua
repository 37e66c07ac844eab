-- The packed record of a plain job: bytes at fixed offsets, where any other job has a map. A claim and a completion replace
-- the first bytes and copy the rest; decoding and encoding a map cost more than all commands of a step.
--   waiting   'p' fence attempt                                       body
--   running   'r' fence attempt paid  claim started_at session        body
--   ended     'c' finished_at, whether there is a result, length of what follows up to the result; then as running from `fence`
--   body      class flags queue arrival id lane_key, and a map of rare fields: task, pool, retries, backoff, cost, uniq
-- A map begins with another byte. `encoding.py` reads the second of these.

local WAITING, RUNS, ENDED = 'p', 'r', 'c'
local IN_LIMITED_LANE, RANKED, GRANTED, CUSTOM_COST, HAS_UNIQUE_KEY = 1, 2, 4, 8, 16 -- bits of the flags
local NEW = 'p\0\0\0\0\0\0\0\0'
local FIRST = 'r\0\0\0\1\0\0\0\1\0\0\3\232' -- of a job that has not run before and has the default charge, 1000
local BODY = '>BBI4dHc0Hc0'
local AT_BODY, AT_FLAGS = 10, 11
local MOST = 2 ^ 32
local SHORTEST = AT_BODY + 19 -- of a waiting job: an id of one byte, no lane, and a map

-- The fields that a packed record can hold. All others must be absent.
local FIELDS = {
    seq = true, id = true, task = true, queue = true, class = true, lane_key = true, pool = true, retries = true, backoff = true,
    cost = true, uniq = true, state = true, flow = true, lane = true, rank = true, granted = true, arrival = true, session = true,
    claim = true, fence = true, attempt = true, paid = true, started_at = true,
}

local function flags_of(e)
    return (e.lane and IN_LIMITED_LANE or 0) + (e.rank and RANKED or 0) + (e.granted and GRANTED or 0) + (e.cost and CUSTOM_COST or 0)
        + (e.uniq and HAS_UNIQUE_KEY or 0)
end

local function rest_of(e)
    return pack({ task = e.task, pool = e.pool, retries = e.retries, backoff = e.backoff, cost = e.cost, uniq = e.uniq })
end

local function body_of(e)
    local lane = e.lane_key or ''
    return bytes(BODY, e.class, flags_of(e), e.queue, e.arrival, #e.id, e.id, #lane, lane) .. rest_of(e)
end

local function fits(e)
    for name, value in pairs(e) do
        if value and value ~= 0 and not FIELDS[name] then
            return false
        end
    end
    if not e.arrival or (e.rank and e.rank ~= e.class) or (e.flow or false) ~= (e.granted or false) then
        return false
    end
    if e.state == STATE.RUNNING then
        return e.session and e.claim and e.granted and (e.paid or 0) < MOST
    end
    return e.state == STATE.PENDING and not (e.session or e.claim or e.paid or e.started_at)
end

-- The packed record of a job; nil for a job with other fields.
function packed_job_record.of(e)
    if not fits(e) then
        return nil
    end
    if e.state == STATE.PENDING then
        return bytes('>c1I4I4', WAITING, e.fence or 0, e.attempt or 0) .. body_of(e)
    end
    local head = bytes('>c1I4I4I4ddHc0', RUNS, e.fence, e.attempt, e.paid or 0, e.claim, e.started_at, #e.session, e.session)
    return head .. body_of(e)
end

-- The common parts of the packed records of new jobs that differ only in ids and lanes: what precedes those, and the
-- map of rare fields.
function packed_job_record.before(new, queue, granted, limited, rank)
    local flags = flags_of({ granted = granted, lane = limited, rank = rank, cost = new.cost })
    return NEW .. bytes('>BBI4', new.class or 1, flags, queue)
end

packed_job_record.rest = rest_of

-- The packed record of a new job of this lane, '' for none.
function packed_job_record.of_lane(before, arrival, id, lane, rest)
    return before .. bytes('>dHc0Hc0', arrival, #id, id, #lane, lane) .. rest
end

-- The packed record of one new job whose end was made by the client.
function packed_job_record.new(before, arrival, id, after)
    return before .. bytes('>dHc0', arrival, #id, id) .. after
end

-- The request fields at the end of a packed record.
function packed_job_record.request(after)
    local lane, at = parts('>Hc0', after)
    local new = unpacked(sub(after, at))
    new.lane_key = lane ~= '' and lane or nil
    return new
end

local function read_body(raw, from)
    local class, flags, queue, arrival, id, lane, at = parts(BODY, raw, from)
    local e, limited = unpacked(sub(raw, at)), flags % 2 == 1
    e.id, e.class, e.queue, e.arrival, e.lane_key = id, class, queue, arrival, lane ~= '' and lane or nil
    e.lane = limited or nil
    e.rank = flags % 4 >= RANKED and class or nil
    e.granted = flags % 8 >= GRANTED or nil
    e.flow = e.granted
    return e
end

local function read_running(raw, from)
    local fence, attempt, paid, claim, started_at, session, at = parts('>I4I4I4ddHc0', raw, from)
    local e = read_body(raw, at)
    e.state, e.fence, e.attempt, e.paid = STATE.RUNNING, fence, attempt, paid
    e.claim, e.started_at, e.session = claim, started_at, session
    return e
end

-- A live job, from its packed record or its map.
function packed_job_record.read(raw)
    local kind = sub(raw, 1, 1)
    if kind == WAITING then
        local e = read_body(raw, AT_BODY)
        e.state, e.fence, e.attempt = STATE.PENDING, parts('>I4I4', raw, 2)
        e.fence, e.attempt = e.fence > 0 and e.fence or nil, e.attempt > 0 and e.attempt or nil
        return e
    end
    return kind == RUNS and read_running(raw, 2) or unpacked(raw)
end

function packed_job_record.is_waiting(raw)
    return byte(raw, 1) == 112
end

-- Whether this is a complete packed record of a live job, judging by its length.
function packed_job_record.is_whole(raw)
    return raw and #raw >= SHORTEST and byte(raw, 1) == 112
end

function packed_job_record.is_packed(raw)
    local kind = byte(raw, 1)
    return kind == 112 or kind == 114
end

local function at_flags(raw)
    return packed_job_record.is_waiting(raw) and AT_FLAGS or 33 + (parts('>H', raw, 30))
end

-- The state of a job in its lane: class, arrival, whether it has a place, and whether it needs one.
function packed_job_record.lane_state(raw)
    local class, flags, _, arrival = parts('>BBI4d', raw, at_flags(raw) - 1)
    return class, arrival, flags % 8 >= GRANTED, flags % 2 == 1
end

-- The packed record of a job whose lane has become limited or unlimited.
function packed_job_record.placed(raw, limited, rank, granted)
    local at = at_flags(raw)
    local kept = byte(raw, at) - byte(raw, at) % 8
    local flags = kept + flags_of({ lane = limited, rank = rank, granted = granted })
    return sub(raw, 1, at - 1) .. string.char(flags) .. sub(raw, at + 1)
end

-- Whether this is a waiting job with the default cost.
function packed_job_record.has_default_cost(raw)
    return packed_job_record.is_whole(raw) and byte(raw, AT_FLAGS) % 16 < CUSTOM_COST
end

-- Class and arrival of a waiting job.
function packed_job_record.class_and_arrival(raw)
    local class, _, _, arrival = parts('>BBI4d', raw, AT_BODY)
    return class, arrival
end

-- Whether the lane of a waiting job is limited, and the cost of the job.
function packed_job_record.terms(raw)
    local flags = byte(raw, AT_FLAGS)
    return flags % 2 == 1, flags % 16 >= CUSTOM_COST and packed_job_record.read(raw).cost or 1
end

function packed_job_record.id(raw)
    return (parts('>Hc0', raw, AT_BODY + 14))
end

-- The packed record of a waiting job that is granted a place.
function packed_job_record.granted(raw)
    return sub(raw, 1, AT_FLAGS - 1) .. string.char(byte(raw, AT_FLAGS) + GRANTED) .. sub(raw, AT_FLAGS + 1)
end

-- The common part of the packed records of all jobs that one claim starts.
function packed_job_record.claim(session, number)
    return bytes('>ddHc0', number, S.now, #session, session)
end

-- The packed record of a job that starts.
function packed_job_record.started(raw, claim, paid)
    if paid == PRICE and sub(raw, 1, AT_BODY - 1) == NEW then
        return FIRST .. claim .. sub(raw, AT_BODY)
    end
    local fence, attempt = parts('>I4I4', raw, 2)
    return bytes('>c1I4I4I4', RUNS, fence + 1, attempt + 1, paid) .. claim .. sub(raw, AT_BODY)
end

-- The bytes by which packed records name a session.
function packed_job_record.holder(session)
    return bytes('>Hc0', #session, session)
end

-- Class, queue and lane of a job that runs under this fence for this holder, and whether the lane is limited. Nil if it
-- does not, has no packed record, or has a unique key. `length`: of its id.
function packed_job_record.held(raw, holder, fence, length)
    if byte(raw, 1) ~= 114 or parts('>I4', raw, 2) ~= fence then
        return nil
    end
    local at = 30 + #holder
    if sub(raw, 30, at - 1) ~= holder then
        return nil
    end
    local class, flags, queue = parts('>BBI4', raw, at)
    if flags >= HAS_UNIQUE_KEY then
        return nil
    end
    -- Skip arrival and id.
    local at_lane = at + 16 + length
    local high, low = byte(raw, at_lane, at_lane + 1)
    local lane = high + low > 0 and sub(raw, at_lane + 2, at_lane + 1 + 256 * high + low) or ''
    return class, queue, lane, flags % 2 == 1
end

-- The record of a completed job.
function packed_job_record.ended(raw, result)
    local head = bytes('>c1dBI4', ENDED, S.now, result and 1 or 0, #raw - 1) .. sub(raw, 2)
    return result and head .. result or head
end

-- A completed job from its record, and its result; nil if the record is not packed.
function packed_job_record.read_ended(raw)
    if sub(raw, 1, 1) ~= ENDED then
        return nil
    end
    local finished_at, has_result, length, at = parts('>dBI4', raw, 2)
    local e = read_running(sub(raw, 1, at + length - 1), at)
    e.state, e.move, e.finished_at, e.result = STATE.COMPLETED, MOVE.COMPLETE, finished_at, has_result == 1 or nil
    e.lane, e.rank, e.granted, e.flow, e.paid, e.claim = nil, nil, nil, nil, nil, nil
    return e, e.result and sub(raw, at + length) or nil
end
