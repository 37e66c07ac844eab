-- Messages wait no longer and will not run. ARGV: for each one queue, lease and id. Returns how many were counted.
local dropped = 0
for a = 1, #ARGV, 3 do
  dropped = dropped + drop_pending(ARGV[a], ARGV[a + 1], ARGV[a + 2])
end
return dropped
