-- Add tokens for jobs that have become claimable, up to as many as workers have slots.
-- KEYS: state, lists, then the lists. ARGV: channel, tokens lost since the last call, then count, topic and trace of each list.
local time = redis.call('TIME')
local stamp = string.format('%s%06d', time[1], tonumber(time[2]))
local state, lists = KEYS[1], KEYS[2]
local cap = tonumber(redis.call('HGET', state, 'cap') or USUAL_CAP)
local pushed = 0
for i = 3, #KEYS do
    local key, at = KEYS[i], 3 * (i - 3) + 3
    local count = math.min(tonumber(ARGV[at]), cap - redis.call('LLEN', key))
    for _ = 1, count do
        redis.call('RPUSH', key, stamp .. ' ' .. ARGV[at + 2])
    end
    if count > 0 then
        pushed = pushed + count
        redis.call('PEXPIRE', key, LIST_MILLISECONDS)
        redis.call('SADD', lists, key)
    end
    redis.call('PUBLISH', ARGV[1], ARGV[at + 1])
end
redis.call('HINCRBY', state, 'pushed', pushed)
if ARGV[2] ~= '0' then
    redis.call('HINCRBY', state, 'failed', ARGV[2])
end
return pushed
