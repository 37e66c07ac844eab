-- Queues and their settings, remembered between steps. They change rarely; a counter tells when.

local known = {} -- by prefix: {mark, names, numbers, tasks, keys}

-- Keys that do not depend on the job.
local function key_names()
    local found = {}
    for _, name in ipairs({ 'flow', 'topics', 'id', 'job', 'live', 'alive', 'headers', 'session', 'jobs' }) do
        found[name] = S.p .. name
    end
    return found
end

local function refresh()
    local mark = S.generation .. ' ' .. S.settings
    local found = known[S.p]
    if not found or found.mark ~= mark then
        found = { mark = mark, names = {}, numbers = {}, tasks = {}, keys = key_names() }
        -- What has no generation yet cannot be told from what comes after the next loss.
        known[S.p] = S.generation ~= '' and found or nil
    end
    S.catalog, S.fresh = found, true
end

local function remember(number, record)
    local settings = record.settings and cjson.decode(record.settings) or {}
    local queue = {
        number = number,
        name = record.name,
        settings = settings,
        rules = settings.lanes or {},
        terms = {},
        terms_count = 0,
        single = {}, -- see single.lua
        paused = settings.paused,
        max_pending = settings.max_pending,
        closed = settings.closed and #settings.closed > 0 and settings.closed or nil,
    }
    queue.refuses = queue.closed or queue.max_pending or #queue.rules > 0
    if settings.limit then
        local reserved = settings.reserved or {}
        queue.slots = { total = settings.limit, high = reserved.high or 0, normal = reserved.normal or 0 }
    end
    S.catalog.names[record.name] = queue
    S.catalog.numbers[number] = queue
    return queue
end

-- The queue of a name if it was looked up before.
function catalog.remembered(name)
    if not S.fresh then
        refresh()
    end
    return S.catalog.names[name]
end

-- The queue of a name, nil when it is new: who only looks must not write.
function catalog.known(name)
    if not S.fresh then
        refresh()
    end
    local found = S.catalog.names[name]
    if not found then
        local number = tonumber(call('HGET', S.p .. 'queues', name) or nil)
        found = number and remember(number, step.get('queue', number))
    end
    return found
end

-- The same, made when it is new.
function catalog.queue(name)
    local found = catalog.known(name)
    if not found then
        local number = step.next('queue')
        call('HSET', S.p .. 'queues', name, number)
        step.put('queue', number, { name = name, version = 0, declared = '{}' })
        found = remember(number, { name = name })
    end
    return found
end

-- What a queue is that nobody has used: it has no settings, and no number yet.
function catalog.unknown(name)
    return { name = name, rules = {}, terms = {} }
end

function catalog.number(number)
    if not S.fresh then
        refresh()
    end
    return S.catalog.numbers[number] or remember(number, step.get('queue', number))
end

-- Which tasks a queue has jobs of, for who looks for jobs.
function catalog.note_task(name)
    if not S.fresh then
        refresh()
    end
    if not S.catalog.tasks[name] then
        S.catalog.tasks[name] = true
        call('SADD', S.p .. 'tasks', name)
    end
end

function catalog.changed()
    S.settings = step.next('settings')
    S.fresh = false
end

local OPEN = { weight = 1 }
local MOST_TERMS = 10000

local function matches(rule, key)
    local pattern = rule.pattern
    if string.sub(pattern, -1) == '*' then
        local prefix = string.sub(pattern, 1, -2)
        return string.sub(key, 1, #prefix) == prefix, 2 * #prefix
    end
    return key == pattern, 2 * #pattern + 1
end

-- What holds for a lane; '' is the lane of jobs without one. The longest literal prefix wins, an exact key before a prefix.
function catalog.terms(queue, key)
    if key == '' or #queue.rules == 0 then
        return OPEN
    end
    local found = queue.terms[key]
    if found then
        return found
    end
    local best, closeness = nil, -1
    for _, rule in ipairs(queue.rules) do
        local fits, close = matches(rule, key)
        if fits and close > closeness then
            best, closeness = rule, close
        end
    end
    if not best then
        found = OPEN
    else
        local ordered = best.ordered
        if ordered == nil or ordered == cjson.null then
            ordered = best.limit == 1
        end
        found = {
            limit = best.paused and 0 or best.limit,
            weight = best.weight or 1,
            ordered = ordered,
            max_pending = best.max_pending,
            paused = best.paused,
        }
    end
    if queue.terms_count >= MOST_TERMS then
        queue.terms, queue.terms_count = {}, 0
    end
    queue.terms[key] = found
    queue.terms_count = queue.terms_count + 1
    return found
end

-- How many more jobs of a class may start, given what runs of each class (from 0 on).
function catalog.room(slots, running, class)
    local high, normal, low = running[0], running[1], running[2]
    local room = slots.total - high - normal - low
    if class >= 1 then
        room = math.min(room, slots.total - slots.high - normal - low)
    end
    if class == 2 then
        room = math.min(room, slots.total - slots.high - slots.normal - low)
    end
    return math.max(0, room)
end
