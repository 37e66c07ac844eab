-- Broadcasts: one child for each worker of a pool, and a parent that runs until all children are final.
--
-- A child is a job for one index; its id is that of its parent with the index appended, so a restarted worker finds the
-- same child. Workers that register before the parent's joining time is over get one too.

local WORDS = { [STATE.COMPLETED] = MOVE.COMPLETE, [STATE.FAILED] = MOVE.FAIL, [STATE.CANCELLED] = MOVE.CANCEL }

function broadcasts.child_id(parent, index)
    return parent .. '/' .. index
end

-- As long as an id is reserved, its child is not created again.
function broadcasts.exists(id)
    if call('HEXISTS', S.p .. 'id', id) == 1 then
        return true
    end
    return call('HEXISTS', S.p .. 'remembered', id) == 1
end

local function children_of(parent)
    return call('ZRANGE', S.p .. 'children:' .. parent, 0, -1)
end

-- End a parent whose children are all final, once no worker can join any more.
local function finish_if_over(parent)
    if parent.due and parent.due > S.now and not parent.cancel then
        return
    end
    local texts = {}
    for _, seq in ipairs(children_of(parent.seq)) do
        if call('HEXISTS', S.p .. 'live', seq) == 1 then
            return
        end
    end
    if parent.cancel then
        endings.finish(parent, STATE.CANCELLED, { reason = REASON.BY_USER })
        return
    end
    local ended = {}
    for _, seq in ipairs(children_of(parent.seq)) do
        ended[#ended + 1] = endings.get(seq)
    end
    table.sort(ended, function(a, b)
        return a.direct < b.direct
    end)
    for _, child in ipairs(ended) do
        local worker = cjson.encode(keys.worker(parent.pool or 'default', child.direct))
        texts[#texts + 1] = string.gsub(worker, '\\/', '/') .. ':"' .. WORDS[child.state] .. '"'
    end
    endings.finish(parent, STATE.COMPLETED, { result = '{' .. table.concat(texts, ',') .. '}' })
end

-- Start a parent whose record is stored as running: create children for the present workers.
function broadcasts.begin(parent)
    for _, index in ipairs(sessions.live(parent.pool or 'default')) do
        enqueue.add_child(parent, index)
    end
    if not parent.due then
        finish_if_over(parent)
    end
end

-- A worker has registered: create its children for broadcasts it may still join, unless it has them from before.
function broadcasts.join(pool, index)
    local joining = job_record.all(call('ZRANGEBYSCORE', S.p .. 'joining', '(' .. string.format('%.17g', S.now), '+inf'))
    -- They are indexed by the end of their joining time, and are joined in the order in which they were sent.
    table.sort(joining, function(a, b)
        return a.seq < b.seq
    end)
    for _, parent in ipairs(joining) do
        local fits = (parent.pool or 'default') == pool and not parent.cancel
        if fits and not broadcasts.exists(broadcasts.child_id(parent.id, index)) then
            enqueue.add_child(parent, index)
        end
    end
end

-- A child is final: its parent may be over.
function broadcasts.child_ended(seq)
    local parent = job_record.get(seq)
    if parent then
        step.notify_job(parent.id)
        finish_if_over(parent)
    end
end

-- Cancel a broadcast: waiting children are final at once, running ones are requested to stop.
function broadcasts.cancel(parent)
    parent.cancel = true
    job_record.save(parent)
    local children = job_record.all(children_of(parent.seq))
    for _, child in ipairs(children) do
        finish.cancel_entry(child)
    end
    if #children == 0 then
        finish_if_over(parent)
    end
    return job_record.get(parent.seq) and STATE.RUNNING or STATE.CANCELLED
end

-- The joining time is over: end parents whose children are all final.
function broadcasts.close_joining(limit)
    local over = call('ZRANGEBYSCORE', S.p .. 'joining', '-inf', S.now, 'LIMIT', 0, limit)
    for _, parent in ipairs(job_record.all(over)) do
        parent.due = nil
        job_record.save(parent)
        finish_if_over(parent)
    end
    return #over
end

-- Cancel children that wait for a dead worker, of broadcasts that no worker can join any more.
function broadcasts.abandon()
    for _, parent in ipairs(job_record.all(step.page(S.p .. 'parents', '+inf'))) do
        if not parent.due then
            for _, child in ipairs(job_record.all(children_of(parent.seq))) do
                if child.state ~= STATE.RUNNING and not sessions.serves(child.pool or 'default', child.direct) then
                    endings.finish(child, STATE.CANCELLED, { reason = REASON.WORKER_LOST })
                end
            end
        end
    end
end
