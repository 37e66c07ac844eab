-- What every script begins with. KEYS[1] is the prefix of all keys; its hash tag keeps them on one node of a cluster.
--   pending:<queue>   zset   lease -> when it was opened: messages that wait
--   running:<queue>   zset   run   -> when it began: executions
--   host:<host>       hash   run   -> queue: the executions of one worker
--   hosts             zset   host  -> when it is considered dead
--   consumes          hash   host  -> the queues it consumes, separated by commas
--   served            zset   queue -> when its last consumer is considered dead
--   waiting           hash   task id -> queue and newest pending lease, for revokes
--   expiring          zset   queue and lease -> when its message expires
--   revoked           zset   task id -> when the revoke is forgotten
--   done:<lease>      string that expires: an execution has ended, its message may not be acknowledged yet
--   closed:<run>      string that expires: the run has ended, a late start must not open it
local P = KEYS[1]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local function load_of(queue)
  return redis.call('ZCARD', P .. 'pending:' .. queue) + redis.call('ZCARD', P .. 'running:' .. queue)
end

local function drop_pending(queue, lease, id)
  local entry = queue .. ' ' .. lease
  local removed = redis.call('ZREM', P .. 'pending:' .. queue, lease)
  if redis.call('HGET', P .. 'waiting', id) == entry then
    redis.call('HDEL', P .. 'waiting', id)
  end
  redis.call('ZREM', P .. 'expiring', entry)
  return removed
end

-- A lease begins with the id of its task, which may itself contain a colon.
local function id_of(lease)
  return string.match(lease, '^(.*):[^:]*:[^:]*$') or lease
end

local function drop_expired()
  local due = redis.call('ZRANGEBYSCORE', P .. 'expiring', '-inf', now, 'LIMIT', 0, 1000)
  for _, entry in ipairs(due) do
    local queue, lease = string.match(entry, '^(%d+) (.*)$')
    drop_pending(queue, lease, id_of(lease))
  end
end

local function recompute_served()
  redis.call('DEL', P .. 'served')
  local consumes = redis.call('HGETALL', P .. 'consumes')
  for k = 1, #consumes, 2 do
    local dead_at = redis.call('ZSCORE', P .. 'hosts', consumes[k])
    if dead_at then
      for queue in string.gmatch(consumes[k + 1], '%d+') do
        redis.call('ZADD', P .. 'served', 'GT', dead_at, queue)
      end
    end
  end
end

local function remove_host(host)
  local runs = redis.call('HGETALL', P .. 'host:' .. host)
  for k = 1, #runs, 2 do
    redis.call('ZREM', P .. 'running:' .. runs[k + 1], runs[k])
  end
  redis.call('DEL', P .. 'host:' .. host)
  redis.call('ZREM', P .. 'hosts', host)
  redis.call('HDEL', P .. 'consumes', host)
  return #runs / 2
end

-- Close the executions of workers that are considered dead. Returns how many.
local function remove_dead_hosts()
  local closed = 0
  local dead = redis.call('ZRANGEBYSCORE', P .. 'hosts', '-inf', now)
  for _, host in ipairs(dead) do closed = closed + remove_host(host) end
  if #dead > 0 then recompute_served() end
  return closed
end
