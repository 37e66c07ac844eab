-- End the blocking call of a worker, or its next one. A script, because a list that got no expiry would stay for ever.
-- KEYS: the list by which the worker is interrupted.
redis.call('RPUSH', KEYS[1], '-')
redis.call('PEXPIRE', KEYS[1], INTERRUPTION_MILLISECONDS)
return 1
