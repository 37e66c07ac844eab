-- Members and fields are always strings: a number would be a different key of a Lua table, and costs the server a
-- conversion each time.

local MOST_ARGUMENTS = 1000

-- Commands that change nothing.
local READS = {
    EXISTS = true, GET = true, HEXISTS = true, HGET = true, HGETALL = true, HKEYS = true, HLEN = true, HMGET = true,
    HSCAN = true, HVALS = true, LRANGE = true, PUBLISH = true, SCARD = true, SDIFF = true, SMEMBERS = true,
    SRANDMEMBER = true, ZCARD = true, ZCOUNT = true, ZMSCORE = true, ZRANGE = true, ZRANGEBYSCORE = true, ZRANK = true,
    ZREVRANGE = true, ZREVRANGEBYSCORE = true, ZSCORE = true,
}

-- The buffer of a key: `put` and, if there are any, `gone`, and `new` for members of `put` that were absent before.
-- Tables are created on demand, because many keys have only one change.
local function buffered(key, kind)
    local found = { kind = kind, put = {} }
    S.dirty = true
    S.writes[key] = found
    return found
end

local function put(found, name, value)
    found.put[name] = value
    if found.gone then
        found.gone[name] = nil
    end
end

local function drop(found, name)
    found.put[name] = nil
    if found.new and found.new[name] then
        found.new[name] = nil
        return
    end
    if not found.gone then
        found.gone = {}
    end
    found.gone[name] = true
end

-- A step for one job does not buffer additions (`S.direct`): the tables would cost more than they save. Removals are
-- buffered even then, because the member may have been added just before.

-- A number as a member.
function write_buffer.text(number)
    return string.format('%.0f', number)
end

-- Bulk variants: take a list of distinct members, which is faster than a table entry for each. If the key has a buffer,
-- they add to it, so that the order of the writes is kept.

local function send_list(command, key, list, first, last)
    S.dirty = true
    last = last or #list
    for from = first or 1, last, MOST_ARGUMENTS do
        redis.call(command, key, unpack(list, from, math.min(last, from + MOST_ARGUMENTS - 1)))
    end
end

-- `name`, `value`: the offsets of both in each pair, as the command expects them.
local function put_all(command, key, list, name, value)
    local found = S.writes[key]
    if not found then
        return send_list(command, key, list)
    end
    for i = 0, #list - 1, 2 do
        put(found, list[i + name], list[i + value])
    end
end

-- `list`: alternating fields and values.
function write_buffer.hset_all(key, list)
    put_all('HSET', key, list, 1, 2)
end

-- `list`: alternating scores and members.
function write_buffer.zadd_all(key, list)
    put_all('ZADD', key, list, 2, 1)
end

-- `list`: members, all of them or those from `first` to `last`.
function write_buffer.sadd_all(key, list, first, last)
    local found = S.writes[key]
    if not found then
        return send_list('SADD', key, list, first, last)
    end
    for i = first or 1, last or #list do
        put(found, list[i], true)
    end
end

local function drop_all(command, key, list)
    local found = S.writes[key]
    if not found then
        return send_list(command, key, list)
    end
    for _, name in ipairs(list) do
        drop(found, name)
    end
end

function write_buffer.zrem_all(key, list)
    drop_all('ZREM', key, list)
end

function write_buffer.hdel_all(key, list)
    drop_all('HDEL', key, list)
end

function write_buffer.srem_all(key, list)
    drop_all('SREM', key, list)
end

function write_buffer.zadd(key, score, member)
    if S.direct then
        return write_buffer.call('ZADD', key, score, member)
    end
    put(S.writes[key] or buffered(key, 'z'), member, score)
end

-- `zadd` for a member that is absent: if it is removed again in the same step, nothing is sent.
function write_buffer.zadd_new(key, score, member)
    if S.direct then
        return write_buffer.call('ZADD', key, score, member)
    end
    local found = S.writes[key] or buffered(key, 'z')
    found.put[member] = score
    if found.gone and found.gone[member] then
        found.gone[member] = nil -- it was there when the step began
        return
    end
    if not found.new then
        found.new = {}
    end
    found.new[member] = true
end

function write_buffer.zrem(key, member)
    drop(S.writes[key] or buffered(key, 'z'), member)
end

function write_buffer.hset(key, field, value)
    if S.direct then
        return write_buffer.call('HSET', key, field, value)
    end
    put(S.writes[key] or buffered(key, 'h'), field, value)
end

function write_buffer.hdel(key, field)
    drop(S.writes[key] or buffered(key, 'h'), field)
end

function write_buffer.sadd(key, member)
    if S.direct then
        return write_buffer.call('SADD', key, member)
    end
    put(S.writes[key] or buffered(key, 's'), member, true)
end

function write_buffer.srem(key, member)
    drop(S.writes[key] or buffered(key, 's'), member)
end

-- A sorted set is empty, apart from removals of this step: from now on, the buffer has all of its members.
function write_buffer.begin(key)
    if not S.direct then
        local found = S.writes[key] or buffered(key, 'z')
        found.whole = true
    end
end

-- The members and scores of a sorted set whose members are all buffered, in the order of ZRANGE. Nil for other sets.
function write_buffer.buffered(key)
    local found = S.writes[key]
    if not found or not found.whole then
        return nil
    end
    local members = {}
    for member in pairs(found.put) do
        members[#members + 1] = member
    end
    table.sort(members, function(a, b)
        return found.put[a] < found.put[b]
    end)
    local all = {}
    for i, member in ipairs(members) do
        all[2 * i - 1], all[2 * i] = member, found.put[member]
    end
    return all
end

-- A field of a hash, without sending the buffer.
function write_buffer.hget(key, field)
    local found = S.writes[key]
    if found then
        local value = found.put[field]
        if value then
            return value
        end
        if found.gone and found.gone[field] then
            return false
        end
    end
    return redis.call('HGET', key, field)
end

-- Fields of a hash, without sending the buffer.
function write_buffer.hmget(key, fields)
    local values = {}
    for from = 1, #fields, MOST_ARGUMENTS do
        local part = redis.call('HMGET', key, unpack(fields, from, math.min(#fields, from + MOST_ARGUMENTS - 1)))
        for i = 1, #part do
            values[from + i - 1] = part[i]
        end
    end
    local found = S.writes[key]
    if found then
        for i, field in ipairs(fields) do
            if found.put[field] then
                values[i] = found.put[field]
            elseif found.gone and found.gone[field] then
                values[i] = false
            end
        end
    end
    return values
end

-- The scores of members; false for absent ones.
function write_buffer.zmscore(key, members)
    local scores = {}
    for from = 1, #members, MOST_ARGUMENTS do
        local part = write_buffer.call('ZMSCORE', key, unpack(members, from, math.min(#members, from + MOST_ARGUMENTS - 1)))
        for i = 1, #part do
            scores[from + i - 1] = part[i]
        end
    end
    return scores
end

-- The commands by kind of key: hash, sorted set, set.
local PUT = { h = 'HSET', z = 'ZADD', s = 'SADD' }
local GONE = { h = 'HDEL', z = 'ZREM', s = 'SREM' }

local function send_put(key, found)
    local kind = found.kind
    local command, arguments, count = PUT[kind], {}, 0
    for name, value in pairs(found.put) do
        if kind == 's' then
            arguments[count + 1] = name
            count = count + 1
        else
            local sorted = kind == 'z'
            arguments[count + 1], arguments[count + 2] = sorted and value or name, sorted and name or value
            count = count + 2
        end
        if count >= MOST_ARGUMENTS then
            redis.call(command, key, unpack(arguments, 1, count))
            count = 0
        end
    end
    if count > 0 then
        redis.call(command, key, unpack(arguments, 1, count))
    end
end

local function send_gone(key, found)
    if not found.gone then
        return
    end
    local command, arguments, count = GONE[found.kind], {}, 0
    for name in pairs(found.gone) do
        count = count + 1
        arguments[count] = name
        if count >= MOST_ARGUMENTS then
            redis.call(command, key, unpack(arguments, 1, count))
            count = 0
        end
    end
    if count > 0 then
        redis.call(command, key, unpack(arguments, 1, count))
    end
end

local function send(key, found)
    S.writes[key] = nil
    send_put(key, found)
    send_gone(key, found)
end

-- Run a Redis command. The buffer of its key is sent first.
function write_buffer.call(command, key, ...)
    local found = S.writes[key]
    if found then
        send(key, found)
    end
    S.dirty = S.dirty or not READS[command]
    return redis.call(command, key, ...)
end

-- Send all buffers.
function write_buffer.flush()
    local all = S.writes
    S.writes = {}
    for key, found in pairs(all) do
        send_put(key, found)
        send_gone(key, found)
    end
end
