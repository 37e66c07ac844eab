-- Data loss: a server was emptied, replaced, or returned to an earlier state. Clients detect it by the generation and
-- the number of steps in the signature of answers, and report it here.

local MOST_KEPT = 20

-- Repeat a completion that the server has lost. A job with a lower fence than that of its completion has lost the claim
-- as well, so it must not start again. `stamp` is when it was stored: a later job with the same id has another.
local function complete_again(session, id, fence, stamp, result)
    local seq = job_record.number(id)
    local e = seq and job_record.get(seq)
    if not e or (e.fence or 0) > fence or ((e.fence or 0) == fence and e.session ~= session) then
        return 0
    end
    local came = string.gsub(string.sub(call('HGET', S.p .. 'job', seq), 1, 8), '.', function(byte)
        return string.format('%02x', string.byte(byte))
    end)
    if came ~= stamp then
        return 0
    end
    e.fence, e.attempt = fence, math.max(e.attempt or 0, 1)
    e.started_at = e.started_at or S.now
    endings.finish(e, STATE.COMPLETED, { result = result, move = MOVE.COMPLETE, session = session })
    return 1
end

-- What was found when a generation was lost, if it was reported before.
local function noted(generation)
    for _, raw in ipairs(call('LRANGE', S.p .. 'lost', 0, -1)) do
        local loss = unpacked(raw)
        if loss.generation == generation then
            return loss.what
        end
    end
    return nil
end

-- Record the loss of a generation, once for all clients, and begin a new generation, so that clients that have not
-- called since detect it too. Returns how many completions were repeated, and what was found first.
function data_loss.report(generation, what, completed, args)
    local repeated = 0
    for _, each in ipairs(completed) do
        repeated = repeated + complete_again(each[1], each[2], each[3], each[4], each[5] > 0 and args[each[5]] or nil)
    end
    local first = noted(generation)
    if generation == S.generation or not first then
        first = what
        call('LPUSH', S.p .. 'lost', pack({ generation = generation, at = S.now, what = what }))
        call('LTRIM', S.p .. 'lost', 0, MOST_KEPT - 1)
    end
    if generation == S.generation or S.generation == '' then
        step.begin_generation()
    end
    return { completed = repeated, what = first }
end
