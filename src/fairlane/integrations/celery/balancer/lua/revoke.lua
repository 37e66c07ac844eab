-- Tasks were revoked: those that wait leave the load. ARGV: milliseconds for which to remember it, then the ids.
-- Returns how many were counted.
local dropped = 0
redis.call('ZREMRANGEBYSCORE', P .. 'revoked', '-inf', now)
for a = 2, #ARGV do
  local id = ARGV[a]
  redis.call('ZADD', P .. 'revoked', now + tonumber(ARGV[1]), id)
  local entry = redis.call('HGET', P .. 'waiting', id)
  if entry then
    local queue, lease = string.match(entry, '^(%d+) (.*)$')
    dropped = dropped + drop_pending(queue, lease, id)
  end
end
return dropped
