-- Bulk enqueue of plain jobs by lists (see claim_batch.lua): each costs little more than its record. They are due, may
-- run anywhere and have no unique key, and differ only in their ids and lanes.

-- Whether all jobs of a call are plain and new, and their queues have no limits on what they accept.
function enqueue_batch.are_alike(requests)
    local seen, all = {}, {}
    for _, new in ipairs(requests) do
        local queue = new.ids and queue_cache.known(new.queue)
        if not new.ids or (queue and queue.bounded) then
            return false
        end
        for _, id in ipairs(new.ids) do
            if seen[id] then
                return false
            end
            seen[id] = true
            all[#all + 1] = id
        end
    end
    for _, known in ipairs(write_buffer.hmget(S.p .. 'id', all)) do
        if known then
            return false
        end
    end
    return true
end

-- The distinct lanes of the jobs, as parallel lists: `name` its key, `flow` its flow, `limit` the terms of a limited
-- one; `of_job` is the lane of each job, and `times` the number of jobs per lane. No table for each lane: a call may
-- have one lane per job.
local function lanes_of(queue, domain, lanes, count)
    local a = { name = {}, flow = {}, limit = {}, times = {}, of_job = {}, limited = {} }
    local places_of, before = {}, keys.flow(domain.key, '')
    for i = 1, count do
        local lane = lanes and lanes[i] or ''
        local n = places_of[lane]
        if not n then
            n = #a.name + 1
            local terms = queue_cache.terms(queue, lane)
            places_of[lane], a.name[n], a.flow[n], a.times[n] = n, lane, before .. lane, 0
            if terms.limit then
                a.limit[n], a.limited[#a.limited + 1] = terms, n
            end
        end
        a.of_job[i], a.times[n] = n, a.times[n] + 1
    end
    return a
end

-- Read how many places the limited lanes have, and how many are taken. Returns false if this step has already changed
-- one.
local function load_places(queue, a)
    local names = {}
    a.key, a.places, a.ordered, a.taken, a.was_taken, a.is_firm = {}, {}, {}, {}, {}, {}
    for i, n in ipairs(a.limited) do
        names[i] = keys.lane(queue.number, a.name[n])
        a.key[n] = names[i]
        if S.lanes[names[i]] ~= nil then
            return false
        end
    end
    for i, raw in ipairs(write_buffer.hmget(S.p .. 'lane', names)) do
        local n = a.limited[i]
        local most, ordered, taken = a.limit[n].limit, a.limit[n].ordered, 0
        if raw then
            most, ordered, taken = lane_limits.read_lane(raw)
        end
        a.places[n], a.ordered[n], a.taken[n], a.was_taken[n] = most, ordered, taken, raw and taken
    end
    return true
end

-- Whether a job of a lower class may hold a place of this lane without having started.
local function has_weaker(queue, class, a, n)
    if a.ordered[n] or class == CLASS.LOW or a.taken[n] == 0 or a.is_firm[n] then
        return false
    end
    for _, set in ipairs(lane_limits.weaker(queue.number, a.name[n], class)) do
        if call('EXISTS', set) == 1 then
            return true
        end
    end
    a.is_firm[n] = true
    return false
end

-- Which of the jobs are granted a place; nil if one could take the place of a job of a lower class.
local function grant_all(queue, class, a)
    local granted = {}
    for i, n in ipairs(a.of_job) do
        local taken = a.taken[n]
        granted[i] = not taken or taken < a.places[n]
        if not granted[i] and has_weaker(queue, class, a, n) then
            return nil
        elseif taken and granted[i] then
            a.taken[n] = taken + 1
        end
    end
    return granted
end

-- Add a job to a sorted set: at once if it is the only one of its lane, else with the others. `lists`: by set.
local function add(lists, times, set, score, member)
    if times == 1 then
        call('ZADD', set, score, member)
        return
    end
    local list = lists[set]
    if not list then
        list = {}
        lists[set] = list
    end
    list[#list + 1], list[#list + 2] = score, member
end

-- Add the first startable job of each lane to the line, where the flow is not in line yet. `heads`: the job by lane.
local function join_all(domain, a, heads, member, arrival)
    local records, line = {}, {}
    for n, stored in ipairs(write_buffer.hmget(S.p .. 'flow', a.flow)) do
        local i, finish, tag = heads[n], 0, nil
        if stored then
            finish, tag = fair_order.read_flow(stored)
        end
        if i and not tag then
            tag = math.max(domain.clock, finish)
            records[#records + 1], records[#records + 2] = a.flow[n], fair_order.flow_bytes(finish, tag, arrival[i], member[i])
            line[#line + 1], line[#line + 2] = tag, fair_order.line_member(arrival[i], a.name[n])
        end
    end
    write_buffer.hset_all(S.p .. 'flow', records)
    write_buffer.zadd_all(domain.line, line)
    if line[1] then
        step.notify(domain.topic)
    end
end

-- Add the jobs to their lanes.
local function add_to_lanes(queue, class, domain, a, granted, member, arrival)
    local lists, heads, number = {}, {}, queue.number
    local readies, waits, by_lane = S.p .. 'ready:', S.p .. 'wait:', S.p .. 'by:lane:' .. keys.lane(number, '')
    for i, n in ipairs(a.of_job) do
        local times, lane = a.times[n], a.name[n]
        if granted[i] then
            heads[n] = heads[n] or i
            add(lists, times, readies .. a.flow[n], arrival[i], member[i])
        else
            local rank = job_record.rank(a.ordered[n], class)
            add(lists, times, waits .. a.key[n], job_record.turn(rank, arrival[i]), member[i])
        end
        if lane ~= '' then
            add(lists, times, by_lane .. lane, member[i], member[i])
        end
    end
    for set, list in pairs(lists) do
        write_buffer.zadd_all(set, list)
    end
    for n, lane in ipairs(a.name) do
        if lane ~= '' then
            job_record.came(number, lane, a.times[n])
        end
    end
    join_all(domain, a, heads, member, arrival)
end

-- Write how many places of limited lanes are taken now.
local function save_places(queue, a)
    local records, made = {}, {}
    for _, n in ipairs(a.limited) do
        if a.taken[n] ~= a.was_taken[n] then
            local record = { places = a.places[n], ordered = a.ordered[n], granted = a.taken[n] }
            records[#records + 1], records[#records + 2] = a.key[n], lane_limits.lane_bytes(record)
        end
        if not a.was_taken[n] then
            made[#made + 1] = a.name[n]
        end
    end
    write_buffer.hset_all(S.p .. 'lane', records)
    write_buffer.sadd_all(S.p .. 'lanes:' .. queue.number, made)
end

-- Write the jobs. `parts`: content and headers of each, alternating, from `first` on. Returns their numbers and arrivals.
local function write_jobs(new, queue, class, a, granted, parts, first)
    local ids, contents, lives, headers, members, came = {}, {}, {}, {}, {}, {}
    local free, rest, befores = packed_job_record.before(new, queue.number, true), packed_job_record.rest(new), {}
    for i, id in ipairs(new.ids) do
        local member, arrival, n, before = write_buffer.text(step.new_seq()), step.next_arrival(), a.of_job[i], free
        if a.limit[n] then
            local rank = job_record.rank(a.ordered[n], class)
            local kind = (granted[i] and 2 or 0) + (rank and 1 or 0)
            before = befores[kind] or packed_job_record.before(new, queue.number, granted[i], true, rank)
            befores[kind] = before
        end
        local last = 2 * i
        members[i], came[i] = member, arrival
        ids[last - 1], ids[last] = id, member
        contents[last - 1], contents[last] = member, S.stamp .. parts[first + last - 2]
        lives[last - 1], lives[last] = member, packed_job_record.of_lane(before, arrival, id, a.name[n], rest)
        if parts[first + last - 1] ~= '' then
            headers[#headers + 1], headers[#headers + 2] = member, parts[first + last - 1]
        end
    end
    write_buffer.hset_all(S.p .. 'id', ids)
    write_buffer.hset_all(S.p .. 'job', contents)
    write_buffer.hset_all(S.p .. 'headers', headers)
    write_buffer.hset_all(S.live, lives)
    local first_seq = S.seq - #members + 1
    id_sets.add_run(S.alive, members, first_seq)
    id_sets.add_run(keys.of_task(queue.number, new.task), members, first_seq)
    return members, came
end

-- Store plain jobs. Returns false, without changes, if the lane of one needs the general way.
function enqueue_batch.store(new, parts, first)
    fair_order.put_flows()
    local queue, class, count = queue_cache.queue(new.queue), new.class, #new.ids
    local domain = fair_order.domain(queue.number, class, '')
    local a = lanes_of(queue, domain, new.lanes, count)
    local granted = load_places(queue, a) and grant_all(queue, class, a)
    if not granted then
        return false
    end
    local member, arrival = write_jobs(new, queue, class, a, granted, parts, first)
    add_to_lanes(queue, class, domain, a, granted, member, arrival)
    save_places(queue, a)
    step.count(queue.number, class, 'p', count)
    return true
end
