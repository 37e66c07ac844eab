-- Queues and their settings, cached between steps. They change rarely; a counter shows when.

local known = {} -- by prefix: {mark, names, numbers, tasks, keys, steps, blocks}

-- Keys that do not depend on the job.
local function key_names()
    local found = {}
    for _, name in ipairs({ 'flow', 'topics', 'id', 'job', 'live', 'headers', 'session', 'jobs', 'lane' }) do
        found[name] = S.p .. name
    end
    found.alive = S.p .. 'alive/'
    return found
end

local function refresh()
    local mark = S.generation .. ' ' .. S.settings
    local found = known[S.p]
    if not found or found.mark ~= mark then
        found = { mark = mark, names = {}, numbers = {}, tasks = {}, keys = key_names(), blocks = {} }
        -- Without a generation, the cache could not be distinguished from that of other data after a loss.
        known[S.p] = S.generation ~= '' and found or nil
    end
    S.cached, S.fresh = found, true
end

-- The name of a queue by its number.
local function name_of(number)
    local all = call('HGETALL', S.p .. 'queues')
    for i = 1, #all, 2 do
        if tonumber(all[i + 1]) == tonumber(number) then
            return all[i]
        end
    end
    return 'lost-' .. number
end

-- The record of a queue. A missing or damaged record counts as one without settings.
function queue_cache.record(number, name)
    local record = step.get('queue', number)
    if record and type(record.name) == 'string' then
        return record
    end
    return { name = name or name_of(number), version = 0, declared = '', settings = '' }
end

local function is_number(value)
    return value == nil or type(value) == 'number'
end

-- The effective settings in a record; empty if they cannot be read.
local function settings_of(record)
    local done, settings = pcall(cjson.decode, record.settings or '{}')
    if not done or type(settings) ~= 'table' then
        return {}
    end
    local reserved, lanes, closed = settings.reserved or {}, settings.lanes or {}, settings.closed or {}
    if not (is_number(settings.limit) and is_number(settings.max_pending) and type(reserved) == 'table' and type(lanes) == 'table'
        and type(closed) == 'table' and is_number(reserved.high) and is_number(reserved.normal)) then
        return {}
    end
    for _, rule in ipairs(lanes) do
        if type(rule) ~= 'table' or type(rule.pattern) ~= 'string' or not (is_number(rule.limit) and is_number(rule.weight)
            and is_number(rule.max_pending)) then
            return {}
        end
    end
    return settings
end

local function remember(number, record)
    local settings = settings_of(record)
    local queue = {
        number = number,
        name = record.name,
        settings = settings,
        rules = settings.lanes or {},
        single = {}, -- see enqueue_one.lua
        settling = {}, -- lanes that are being changed, see lane_limit_changes.lua
        paused = settings.paused,
        max_pending = settings.max_pending,
        closed = settings.closed and #settings.closed > 0 and settings.closed or nil,
    }
    queue.bounded = queue.closed or queue.max_pending -- whether enqueue must check limits
    for _, rule in ipairs(queue.rules) do
        queue.bounded = queue.bounded or rule.max_pending
    end
    if settings.limit then
        local reserved = settings.reserved or {}
        queue.slots = { total = settings.limit, high = reserved.high or 0, normal = reserved.normal or 0 }
    end
    for _, lane in ipairs(call('HKEYS', S.p .. 'settling:' .. number)) do
        queue.settling[lane] = true
    end
    S.cached.names[record.name] = queue
    S.cached.numbers[number] = queue
    return queue
end

-- The queue of a name, if it is cached.
function queue_cache.remembered(name)
    if not S.fresh then
        refresh()
    end
    return S.cached.names[name]
end

-- The queue of a name, nil when it is new: verbs that read must not write.
function queue_cache.known(name)
    if not S.fresh then
        refresh()
    end
    local found = S.cached.names[name]
    if not found then
        local number = tonumber(call('HGET', S.p .. 'queues', name) or nil)
        found = number and remember(number, queue_cache.record(number, name))
    end
    return found
end

-- The queue of a name, created when it is new.
function queue_cache.queue(name)
    local found = queue_cache.known(name)
    if not found then
        local number = step.next('queue')
        call('HSET', S.p .. 'queues', name, number)
        step.put('queue', number, { name = name, version = 0, declared = '{}' })
        found = remember(number, { name = name })
    end
    return found
end

-- A queue that does not exist yet: without settings and number.
function queue_cache.unknown(name)
    return { name = name, rules = {}, settling = {} }
end

function queue_cache.number(number)
    if not S.fresh then
        refresh()
    end
    return S.cached.numbers[number] or remember(number, queue_cache.record(number))
end

-- Record that a queue has jobs of a task, for searches.
function queue_cache.note_task(name)
    if not S.fresh then
        refresh()
    end
    if not S.cached.tasks[name] then
        S.cached.tasks[name] = true
        call('SADD', S.p .. 'tasks', name)
    end
end

-- The block of each id set that was recorded last (see id_sets.lua). Valid only while every step since ran on this
-- server: another server that was in charge meanwhile, or a copy of other data, may not have the block.
function queue_cache.blocks()
    if not S.fresh then
        refresh()
    end
    local found = S.cached
    if found.steps ~= S.steps then
        found.steps, found.blocks = S.steps, {}
    end
    return found.blocks
end

function queue_cache.forget_blocks()
    queue_cache.blocks()
    S.cached.blocks = {}
end

-- The current step is counted as written.
function queue_cache.wrote()
    local found = known[S.p]
    if found and found.steps == S.steps then
        found.steps = S.steps + 1
    end
end

function queue_cache.changed()
    S.settings = step.next('settings')
    S.fresh = false
end

local OPEN = { weight = 1 }

local function terms_of(rule)
    local ordered = rule.ordered
    if ordered == nil or ordered == cjson.null then
        ordered = rule.limit == 1
    end
    return {
        limit = rule.paused and 0 or rule.limit,
        weight = rule.weight or 1,
        ordered = ordered,
        max_pending = rule.max_pending,
        paused = rule.paused,
    }
end

-- The rules of a queue, compiled for lookup: exact keys, and prefixes by length, the longest first.
local function compiled(rules)
    local exact, prefixes, lengths = {}, {}, {}
    for _, rule in ipairs(rules) do
        local pattern = rule.pattern
        if string.sub(pattern, -1) == '*' then
            local length = #pattern - 1
            if not prefixes[length] then
                prefixes[length] = {}
                lengths[#lengths + 1] = length
            end
            local prefix = string.sub(pattern, 1, length)
            prefixes[length][prefix] = prefixes[length][prefix] or terms_of(rule)
        else
            exact[pattern] = exact[pattern] or terms_of(rule)
        end
    end
    table.sort(lengths, function(a, b)
        return a > b
    end)
    return { exact = exact, prefixes = prefixes, lengths = lengths }
end

-- The rule of a lane; '' is the lane of jobs without one. The longest literal prefix wins, and an exact key before a
-- prefix. Not cached by lane: the garbage collector would traverse a table of thousands of lanes each time.
function queue_cache.rule(queue, key)
    if key == '' or #queue.rules == 0 then
        return OPEN
    end
    local of = queue.compiled
    if not of then
        of = compiled(queue.rules)
        queue.compiled = of
    end
    local found = of.exact[key]
    if found then
        return found
    end
    for _, length in ipairs(of.lengths) do
        found = of.prefixes[length][sub(key, 1, length)]
        if found then
            return found
        end
    end
    return OPEN
end

-- The settling lanes of a queue, see lane_limit_changes.lua.
function queue_cache.settling(queue)
    return queue.settling
end

-- The terms of a lane: those of its rule, unless it is settling.
function queue_cache.terms(queue, key)
    local found = queue_cache.rule(queue, key)
    if queue.settling[key] then
        return {
            limit = lane_limit_changes.UNSETTLED, ordered = found.ordered, weight = found.weight, max_pending = found.max_pending,
            paused = found.paused,
        }
    end
    return found
end

-- How many more jobs of a class may start, given the running jobs by class.
function queue_cache.room(slots, running, class)
    local high, normal, low = running[0], running[1], running[2]
    local room = slots.total - high - normal - low
    if class >= CLASS.NORMAL then
        room = math.min(room, slots.total - slots.high - normal - low)
    end
    if class == CLASS.LOW then
        room = math.min(room, slots.total - slots.high - slots.normal - low)
    end
    return math.max(0, room)
end
