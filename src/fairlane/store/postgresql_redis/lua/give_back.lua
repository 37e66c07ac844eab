-- Give a token back, to be popped next. The leader may have forgotten its list meanwhile.
-- KEYS: the list, lists. ARGV: the token.
redis.call('LPUSH', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[1], LIST_MILLISECONDS)
redis.call('SADD', KEYS[2], KEYS[1])
return 1
