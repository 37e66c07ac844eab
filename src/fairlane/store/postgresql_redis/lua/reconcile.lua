-- Compare tokens with claimable jobs: add missing tokens, and remove surplus ones.
-- KEYS: state, lists, alive, then the lists of queues that were counted.
-- ARGV: '1' if all queues were counted, the slots of all workers, tokens lost since the last call, a name for a new generation,
-- the generation that was last seen ('': none) and the sweeps it had then, and the claimable jobs of each list.
-- Returns the generation, its sweeps, and how many lists were looked at, tokens pushed and trimmed.
local time = redis.call('TIME')
local stamp = string.format('%s%06d', time[1], tonumber(time[2]))
local old = tonumber(stamp) - 2000000
local state, lists, alive = KEYS[1], KEYS[2], KEYS[3]
local all, cap = ARGV[1] == '1', tonumber(ARGV[2])
local scanned, pushed, trimmed = 0, 0, 0

local function level(key, wanted)
    local length = redis.call('LLEN', key)
    scanned = scanned + 1
    wanted = math.min(wanted, cap)
    for _ = length + 1, wanted do
        redis.call('RPUSH', key, stamp .. ' -')
    end
    if length < wanted then
        pushed = pushed + wanted - length
        redis.call('PEXPIRE', key, LIST_MILLISECONDS)
        redis.call('SADD', lists, key)
    end
    -- A younger token may be that of a job that was stored after the jobs were counted.
    while all and length > wanted do
        local token = redis.call('LINDEX', key, 0)
        if not token or tonumber(string.match(token, '^%d+') or 0) > old then
            break
        end
        redis.call('LPOP', key)
        length = length - 1
        trimmed = trimmed + 1
    end
    if wanted == 0 and length == 0 then
        redis.call('SREM', lists, key)
    end
end

local counted = {}
for i = 4, #KEYS do
    counted[KEYS[i]] = true
    level(KEYS[i], tonumber(ARGV[i + 3]))
end
redis.call('HINCRBY', state, 'pushed', pushed)
if ARGV[3] ~= '0' then
    redis.call('HINCRBY', state, 'failed', ARGV[3])
end
if not all then
    return {'', 0, scanned, pushed, trimmed}
end
for _, key in ipairs(redis.call('SMEMBERS', lists)) do
    if not counted[key] then
        level(key, 0)
    end
end
-- If the generation is missing or has fewer sweeps than before, this server was flushed, replaced or rolled back.
local generation = redis.call('HGET', state, 'generation')
local sweeps = tonumber(redis.call('HGET', state, 'sweeps') or 0)
if not generation or (generation == ARGV[5] and sweeps < tonumber(ARGV[6])) then
    generation = ARGV[4]
    redis.call('HSET', state, 'generation', generation)
    redis.call('HINCRBY', state, 'generations', 1)
end
sweeps = redis.call('HINCRBY', state, 'sweeps', 1)
redis.call('HSET', state, 'cap', cap)
redis.call('HINCRBY', state, 'scanned', scanned)
redis.call('HINCRBY', state, 'trimmed', trimmed)
redis.call('SET', alive, generation, 'PX', ALIVE_MILLISECONDS)
return {generation, sweeps, scanned, pushed, trimmed}
