-- End the blocking call of a worker, or the next one. Not two commands: a list without an end would stay for ever.
-- KEYS: the list by which the worker is interrupted.
redis.call('RPUSH', KEYS[1], '-')
redis.call('PEXPIRE', KEYS[1], INTERRUPTION_MILLISECONDS)
return 1
