-- Return a token to the end of its list from which it is popped next. The leader may have removed the list meanwhile.
-- KEYS: the list, lists. ARGV: the token.
redis.call('LPUSH', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[1], LIST_MILLISECONDS)
redis.call('SADD', KEYS[2], KEYS[1])
return 1
