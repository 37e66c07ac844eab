-- Choose a queue for each message and open its pending lease, in one step.
-- ARGV: number of queues, the queue or -1 to choose the least loaded, then for each message lease, id and the
-- milliseconds until it expires or ''. Returns the queues. A repeated call returns the same queues.
local count, fixed = tonumber(ARGV[1]), tonumber(ARGV[2])
drop_expired()
remove_dead_hosts()
local candidates = {}
if fixed >= 0 then
  candidates[1] = fixed
else
  for _, queue in ipairs(redis.call('ZRANGEBYSCORE', P .. 'served', '(' .. now, '+inf')) do
    queue = tonumber(queue)
    if queue < count then candidates[#candidates + 1] = queue end
  end
  if #candidates == 0 then
    for queue = 0, count - 1 do candidates[queue + 1] = queue end
  end
  table.sort(candidates)
end
local loads = {}
if #candidates > 1 then
  for k, queue in ipairs(candidates) do loads[k] = load_of(queue) end
end
local chosen = {}
for a = 3, #ARGV, 3 do
  local lease, id, expires = ARGV[a], ARGV[a + 1], ARGV[a + 2]
  local known = redis.call('HGET', P .. 'waiting', id)
  local queue = known and string.sub(known, -#lease - 1) == ' ' .. lease and tonumber(string.match(known, '^%d+'))
  if not queue then
    local best = 1
    for k = 2, #candidates do
      if loads[k] < loads[best] then best = k end
    end
    queue = candidates[best]
    if #candidates > 1 then loads[best] = loads[best] + 1 end
    redis.call('ZADD', P .. 'pending:' .. queue, now, lease)
    redis.call('HSET', P .. 'waiting', id, queue .. ' ' .. lease)
    if expires ~= '' then
      redis.call('ZADD', P .. 'expiring', now + tonumber(expires), queue .. ' ' .. lease)
    end
  end
  chosen[#chosen + 1] = queue
end
return chosen
