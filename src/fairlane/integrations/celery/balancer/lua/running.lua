-- ARGV: queue. Returns its runs.
return redis.call('ZRANGE', P .. 'running:' .. ARGV[1], 0, -1)
