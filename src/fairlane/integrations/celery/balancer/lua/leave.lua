-- A worker has stopped: nothing runs there any more. ARGV: host.
local closed = remove_host(ARGV[1])
recompute_served()
return closed
