-- The record of a plain job is bytes at known places, where that of any other job is a map. A claim and a completion put other
-- bytes before the same rest; taking a map apart and putting it together again cost more than all commands of a step.
--
--   waiting   'p' fence attempt                                       body
--   running   'r' fence attempt paid  claim started_at session        body
--   ended     'c' finished_at, whether there is a result, length of what follows up to the result; then as running from `fence`
--   body      class flags queue arrival id lane_key, and a map of what is needed seldom: task, pool, retries, backoff, cost, uniq
--
-- A map begins with another byte. `requests.py` reads the second of these.

local WAITING, RUNS, ENDED = 'p', 'r', 'c'
local IN_LIMITED_LANE, RANKED, GRANTED, CUSTOM_COST, HAS_UNIQUE_KEY = 1, 2, 4, 8, 16 -- bits of the flags
local NEW = 'p\0\0\0\0\0\0\0\0'
local FIRST = 'r\0\0\0\1\0\0\0\1\0\0\3\232' -- of a job that has not run before and costs what is usual, 1000
local BODY = '>BBI4dHc0Hc0'
local AT_BODY, AT_FLAGS = 10, 11
local MOST = 2 ^ 32
local SHORTEST = AT_BODY + 19 -- of a waiting job: an id of one byte, no lane, and a map

-- Fields of a job that a ticket has. All others must be nought.
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

-- The ticket of a job, nil for one that needs more than that.
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

-- What the tickets of new jobs have in common that differ in nothing but their ids and lanes: what comes before those, and what
-- is needed seldom.
function packed_job_record.before(new, queue, granted, limited, rank)
    local flags = flags_of({ granted = granted, lane = limited, rank = rank, cost = new.cost })
    return NEW .. bytes('>BBI4', new.class or 1, flags, queue)
end

packed_job_record.rest = rest_of

-- The ticket of a new job that comes to this lane, '' for none.
function packed_job_record.of_lane(before, arrival, id, lane, rest)
    return before .. bytes('>dHc0Hc0', arrival, #id, id, #lane, lane) .. rest
end

-- The same for one job, of which the end is known.
function packed_job_record.new(before, arrival, id, after)
    return before .. bytes('>dHc0', arrival, #id, id) .. after
end

-- What the end of a ticket says of a request.
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

-- A live job, out of its ticket or its map.
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

-- The same for one that has all its parts, as far as its length tells.
function packed_job_record.is_whole(raw)
    return raw and #raw >= SHORTEST and byte(raw, 1) == 112
end

function packed_job_record.is_ticket(raw)
    local kind = byte(raw, 1)
    return kind == 112 or kind == 114
end

local function at_flags(raw)
    return packed_job_record.is_waiting(raw) and AT_FLAGS or 33 + (parts('>H', raw, 30))
end

-- Where a job stands in its lane: its class, when it came, whether it has got a place, and whether it needs one.
function packed_job_record.standing(raw)
    local class, flags, _, arrival = parts('>BBI4d', raw, at_flags(raw) - 1)
    return class, arrival, flags % 8 >= GRANTED, flags % 2 == 1
end

-- The ticket of a job whose lane is limited now, or is not any more.
function packed_job_record.placed(raw, limited, rank, granted)
    local at = at_flags(raw)
    local kept = byte(raw, at) - byte(raw, at) % 8
    local flags = kept + flags_of({ lane = limited, rank = rank, granted = granted })
    return sub(raw, 1, at - 1) .. string.char(flags) .. sub(raw, at + 1)
end

-- Whether this is a waiting job whose start costs what is usual.
function packed_job_record.is_cheap(raw)
    return packed_job_record.is_whole(raw) and byte(raw, AT_FLAGS) % 16 < CUSTOM_COST
end

-- The class of a waiting job, and when it came to its lane.
function packed_job_record.place(raw)
    local class, _, _, arrival = parts('>BBI4d', raw, AT_BODY)
    return class, arrival
end

-- Whether the lane of a waiting job is limited, and what it costs to start it.
function packed_job_record.terms(raw)
    local flags = byte(raw, AT_FLAGS)
    return flags % 2 == 1, flags % 16 >= CUSTOM_COST and packed_job_record.read(raw).cost or 1
end

function packed_job_record.id(raw)
    return (parts('>Hc0', raw, AT_BODY + 14))
end

-- The ticket of a waiting job that has got a place.
function packed_job_record.granted(raw)
    return sub(raw, 1, AT_FLAGS - 1) .. string.char(byte(raw, AT_FLAGS) + GRANTED) .. sub(raw, AT_FLAGS + 1)
end

-- What the tickets of all jobs that one claim starts have in common.
function packed_job_record.claim(session, number)
    return bytes('>ddHc0', number, S.now, #session, session)
end

-- The ticket of a job that starts.
function packed_job_record.started(raw, claim, paid)
    if paid == PRICE and sub(raw, 1, AT_BODY - 1) == NEW then
        return FIRST .. claim .. sub(raw, AT_BODY)
    end
    local fence, attempt = parts('>I4I4', raw, 2)
    return bytes('>c1I4I4I4', RUNS, fence + 1, attempt + 1, paid) .. claim .. sub(raw, AT_BODY)
end

-- How the tickets of all jobs that a session runs name it.
function packed_job_record.holder(session)
    return bytes('>Hc0', #session, session)
end

-- What a job has that runs under this fence for this holder: its class, queue and lane, and whether that is limited. Nothing
-- when it does not, is no ticket, or holds more than its place. `length`: of its id.
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
    -- Past arrival and id, which need not be taken out.
    local at_lane = at + 16 + length
    local high, low = byte(raw, at_lane, at_lane + 1)
    local lane = high + low > 0 and sub(raw, at_lane + 2, at_lane + 1 + 256 * high + low) or ''
    return class, queue, lane, flags % 2 == 1
end

-- What is kept of a job that has completed.
function packed_job_record.ended(raw, result)
    local head = bytes('>c1dBI4', ENDED, S.now, result and 1 or 0, #raw - 1) .. sub(raw, 2)
    return result and head .. result or head
end

-- A job that has completed out of what was kept of it, and its result; nil for what is no ticket.
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
