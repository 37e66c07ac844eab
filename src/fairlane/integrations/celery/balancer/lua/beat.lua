-- A worker reports what it consumes and runs. ARGV: host, milliseconds until it is considered dead, its queues
-- separated by commas, the number of its newest run, how many runs follow that have begun, those, then the runs that
-- have not. Executions that are counted for the host, are not reported and are not newer have ended.
-- Returns the begun runs that are not counted.
local host, lifetime, queues, newest, begun = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
redis.call('ZADD', P .. 'hosts', now + lifetime, host)
if redis.call('HGET', P .. 'consumes', host) ~= queues then
  redis.call('HSET', P .. 'consumes', host, queues)
  recompute_served()
else
  for queue in string.gmatch(queues, '%d+') do
    redis.call('ZADD', P .. 'served', 'GT', now + lifetime, queue)
  end
end
local reported, counted = {}, {}
for a = 6, #ARGV do reported[ARGV[a]] = true end
local runs = redis.call('HGETALL', P .. 'host:' .. host)
for k = 1, #runs, 2 do
  local run, queue = runs[k], runs[k + 1]
  local number = tonumber(string.match(run, '|(%d+)$') or '0')
  if reported[run] or number > newest then
    counted[run] = true
  else
    redis.call('ZREM', P .. 'running:' .. queue, run)
    redis.call('HDEL', P .. 'host:' .. host, run)
  end
end
local missing = {}
for a = 6, 5 + begun do
  if not counted[ARGV[a]] then missing[#missing + 1] = ARGV[a] end
end
return missing
