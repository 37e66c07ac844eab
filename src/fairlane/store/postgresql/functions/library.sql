-- The library's own record.

-- Renew the record of this library: libraries that no process has used for a long time are removed. A renewal within the hour
-- writes nothing.
CREATE FUNCTION fairlane.use_library() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE fairlane.library l SET used_at = clock_timestamp()
    WHERE l.version = 'fairlane.LIBRARY' AND l.used_at < clock_timestamp() - interval '1 hour';
END $$;
