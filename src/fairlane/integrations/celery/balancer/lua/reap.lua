-- Close the executions of workers that are considered dead. ARGV: who asks, milliseconds for which it alone reconciles;
-- who does, continues to. Returns how many executions were closed, and whether the caller reconciles now.
local closed = remove_dead_hosts()
drop_expired()
local granted = 0
local holder = redis.call('GET', P .. 'reconciler')
if tonumber(ARGV[2]) > 0 and (not holder or holder == ARGV[1]) then
  redis.call('SET', P .. 'reconciler', ARGV[1], 'PX', ARGV[2])
  granted = 1
end
return {closed, granted}
