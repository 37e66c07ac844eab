-- ARGV: number of queues. Returns pending and running of each, one after the other, then the queues with a live
-- consumer.
drop_expired()
remove_dead_hosts()
local found = {}
for queue = 0, tonumber(ARGV[1]) - 1 do
  found[#found + 1] = redis.call('ZCARD', P .. 'pending:' .. queue)
  found[#found + 1] = redis.call('ZCARD', P .. 'running:' .. queue)
end
for _, queue in ipairs(redis.call('ZRANGEBYSCORE', P .. 'served', '(' .. now, '+inf')) do
  found[#found + 1] = tonumber(queue)
end
return found
