-- ARGV: queue, first and last position of the pending leases to read.
return redis.call('ZRANGE', P .. 'pending:' .. ARGV[1], ARGV[2], ARGV[3])
