-- An execution has ended; only the first of several reports changes anything. ARGV: queue, run, host, lease, milliseconds
-- for which its message may stay unacknowledged, milliseconds for which a start that is late is ignored.
local queue, run, host, lease = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local ended_before = redis.call('EXISTS', P .. 'done:' .. lease)
redis.call('HDEL', P .. 'host:' .. host, run)
redis.call('SET', P .. 'done:' .. lease, '', 'PX', ARGV[5])
if redis.call('ZREM', P .. 'running:' .. queue, run) == 1 then return 1 end
-- The report of its start was lost. After an earlier end, the lease may be that of a redelivered message.
if ended_before == 0 then drop_pending(queue, lease, id_of(lease)) end
redis.call('SET', P .. 'closed:' .. run, '', 'PX', ARGV[6])
return 0
