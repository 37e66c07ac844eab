-- ARGV: queue, age in milliseconds. Returns the pending leases that are older.
return redis.call('ZRANGEBYSCORE', P .. 'pending:' .. ARGV[1], '-inf', now - tonumber(ARGV[2]))
