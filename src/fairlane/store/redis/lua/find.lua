-- Jobs with everything stored about them: by their ids, and page by page by one index.

-- A job with everything stored about it: seq, content with its time, headers, live record, outcome, attempts, progress,
-- result, the session it runs or ended in, its parent's id, its id and the name of its queue; '' for absent parts.
local function job_of(seq)
    local function part(hash)
        return call('HGET', S.p .. hash, seq) or ''
    end
    local live, outcome, result = job_record.look(seq), '', ''
    local record = live
    if live then
        live.seq = nil
        live = pack(live)
    else
        record, result = endings.get(seq)
        if not record then
            return nil -- nothing is left to show; a recount ends it
        end
        live, outcome = '', pack(record)
    end
    local who = record.session and call('HGET', S.p .. 'session', record.session) or ''
    local parent = ''
    if record.parent then
        local above = job_record.look(record.parent) or endings.get(record.parent)
        parent = above and above.id or ''
    end
    return {
        tostring(seq), part('job'), part('headers'), live, outcome, part('attempts'), part('progress'), result or '', who,
        parent, record.id, queue_cache.number(record.queue).name,
    }
end

function find.by_ids(ids)
    local found = {}
    for _, id in ipairs(ids) do
        local seq = job_record.number(id)
        local job = seq and job_of(seq)
        if job then
            found[#found + 1] = job
        end
    end
    return found
end

-- The highest numbers of a set below `before`, at least `count` of them. Sets of held jobs are read as a whole.
local function below(set, before, count)
    local key = S.p .. set
    if string.sub(set, -1) == '/' then
        return id_sets.below(key, tonumber(before), count)
    elseif string.sub(set, 1, 5) == 'held:' then
        return call('SMEMBERS', key)
    end
    return call('ZREVRANGEBYSCORE', key, '(' .. before, '-inf', 'LIMIT', 0, count)
end

-- The completed jobs of a set of numbers: those of its jobs that are neither waiting, running, scheduled, failed nor
-- cancelled.
local function completed_among(seqs)
    local found, failed, cancelled = {}, keys.by('state', STATE.FAILED), keys.by('state', STATE.CANCELLED)
    for _, seq in ipairs(seqs) do
        if call('HEXISTS', S.p .. 'outcome', seq) == 1 and not call('ZSCORE', failed, seq) and not call('ZSCORE', cancelled, seq) then
            found[#found + 1] = seq
        end
    end
    return found
end

local MOST_BLOCKS = 32 -- of a call for completed jobs; it may look at each number in them

-- Jobs in any of these sets, by number from below `before` downwards, at most `count`. Returns them and whether there
-- are more. `completed`: only completed jobs, so that a backlog in front of them is passed in blocks.
function find.scan(sets, before, count, completed)
    local seqs, seen, floor = {}, {}, 0
    local most = math.max(1, math.floor(MOST_BLOCKS / #sets))
    for _, set in ipairs(sets) do
        local members, rest
        if completed then
            members, rest = id_sets.below_without(S.p .. set, S.alive, tonumber(before), count + 1, most)
            members, floor = completed_among(members), math.max(floor, rest or 0)
        else
            members = below(set, before, count + 1)
        end
        for _, seq in ipairs(members) do
            if not seen[seq] and tonumber(seq) < tonumber(before) then
                seen[seq] = true
                seqs[#seqs + 1] = tonumber(seq)
            end
        end
    end
    table.sort(seqs, function(a, b)
        return a > b
    end)
    local found, more = {}, #seqs > count
    for i = 1, math.min(count, #seqs) do
        if seqs[i] < floor then
            more = false
            break -- another set may have higher numbers that were not read
        end
        -- A number without a job is returned alone: the client skips it, but continues from there.
        local member = string.format('%d', seqs[i])
        found[i] = job_of(member) or { member }
    end
    if floor > 0 and not more then
        found[#found + 1], more = { string.format('%d', floor) }, true
    end
    return found, more
end
