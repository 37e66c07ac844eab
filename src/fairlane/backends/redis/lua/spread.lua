-- One job of each lane: what a claim comes to where many lanes wait. It does what `dispatch` does job by job, for jobs that have
-- tickets and cost what is usual, without a table for each lane: those were half of such a claim (measured).

local PRICE = 1000 -- of a start, where neither job nor lane says otherwise
local AT_FIRST = 27 -- of a flow as it is stored, see `step.flow_bytes`

-- The jobs that come first in these flows, and their tickets; nothing if there is anything unusual about one.
local function firsts_of(queue, lanes, flow_keys)
    local firsts, is_ruled = {}, #queue.rules > 0
    for i, raw in ipairs(writes.hmget(S.p .. 'flow', flow_keys)) do
        firsts[i] = sub(raw, AT_FIRST)
    end
    local raws = writes.hmget(S.live, firsts)
    for i, raw in ipairs(raws) do
        if not tickets.is_cheap(raw) or (is_ruled and catalog.terms(queue, lanes[i]).weight ~= 1) then
            return nil
        end
    end
    return firsts, raws
end

-- Take a job out of its flow; returns the one that comes next, and when it came. A lane with a single place has none.
local function leave(ready, member, is_single)
    if is_single then
        writes.zrem(ready, member)
        return nil
    end
    local next_ = call('ZRANGE', ready, 1, 1, 'WITHSCORES')
    redis.call('ZREM', ready, member)
    return next_[1], next_[2]
end

-- Start the first job of each flow of `line`, members and tags, in that order. Returns false, and does nothing, if another order
-- may hold: a lane that comes again before the last of them, or a job or lane that is not usual.
function spread.take(c, queue, domain, line)
    local count = #line / 2
    local last = tonumber(line[2 * count])
    if last >= tonumber(line[2]) + PRICE then
        return false
    end
    step.put_flows()
    local lanes, flow_keys, before = {}, {}, keys.flow(domain.key, '')
    for i = 1, count do
        local lane = sub(line[2 * i - 1], 17)
        lanes[i], flow_keys[i] = lane, before .. lane
    end
    local firsts, raws = firsts_of(queue, lanes, flow_keys)
    if not firsts then
        return false
    end
    local lives, held, gone, back, flows_ = {}, {}, {}, {}, {}
    local readies, is_ruled, is_heard = S.p .. 'ready:' .. before, #queue.rules > 0, step.is_heard()
    for i = 1, count do
        local lane, member = lanes[i], firsts[i]
        local ticket, finish = tickets.started(raws[i], c.ticket, PRICE), tonumber(line[2 * i]) + PRICE
        local next_, arrival = leave(readies .. lane, member, is_ruled and catalog.terms(queue, lane).limit == 1)
        gone[i] = line[2 * i - 1]
        if next_ then
            back[#back + 1], back[#back + 2] = finish, keys.padded(arrival) .. lane
        end
        flows_[2 * i - 1], flows_[2 * i] = flow_keys[i], step.flow_bytes(finish, next_ and finish, arrival, next_)
        lives[2 * i - 1], lives[2 * i] = member, ticket
        held[2 * i - 1], held[2 * i] = member, member
        entries.forget_indexed(member)
        if lane ~= '' then
            entries.begun(domain.queue, lane)
        end
        if is_heard then
            dispatch.tell_start(raws[i], domain.queue, lane)
        end
        dispatch.note(c, member, ticket)
    end
    writes.hset_all(S.live, lives)
    writes.zadd_all(keys.held(c.who.id, domain.class), held)
    writes.hset_all(S.p .. 'flow', flows_)
    writes.zrem_all(domain.line, gone)
    writes.zadd_all(domain.line, back)
    step.count(domain.queue, domain.class, 'p', -count)
    step.count(domain.queue, domain.class, 'r', count)
    step.set_clock(domain, math.max(domain.clock, last))
    return true
end
