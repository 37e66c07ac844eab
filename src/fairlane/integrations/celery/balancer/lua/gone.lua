-- ARGV: for each message lease and task id. Returns the leases that are not to be counted although the broker has their
-- messages: the task was revoked, or its execution has just ended and the message is not acknowledged yet.
local found = {}
for a = 1, #ARGV, 2 do
  local forgotten_at = redis.call('ZSCORE', P .. 'revoked', ARGV[a + 1])
  if (forgotten_at and tonumber(forgotten_at) > now) or redis.call('EXISTS', P .. 'done:' .. ARGV[a]) == 1 then
    found[#found + 1] = ARGV[a]
  end
end
return found
