-- An execution begins: its message waits no longer. ARGV: queue, lease, id, run, host, milliseconds until a host that
-- is silent is considered dead.
local queue, lease, id, run, host = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
drop_pending(queue, lease, id)
if redis.call('EXISTS', P .. 'closed:' .. run) == 1 then return 0 end
redis.call('ZADD', P .. 'running:' .. queue, 'NX', now, run)
redis.call('HSET', P .. 'host:' .. host, run, queue)
-- A host that never sends a heartbeat is considered dead too, some time after its first execution.
redis.call('ZADD', P .. 'hosts', 'NX', now + tonumber(ARGV[6]), host)
return 1
