-- How long the jobs of a queue take, and which workers serve it.

-- Live workers that serve a queue: slots, those reserved for high and for normal, and running jobs by class.
CREATE FUNCTION fairlane.read_workers(p_queue text, p_lease double precision DEFAULT NULL)
RETURNS SETOF integer[] LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_lease double precision := coalesce(p_lease, extract(epoch FROM clock_timestamp()));
BEGIN
    RETURN QUERY
    SELECT ARRAY[s.slots, s.reserved_high, s.reserved_normal, s.running_high, s.running_normal, s.running_low]
    FROM fairlane.sessions s
    WHERE s.state = 'live' AND s.kind = 'worker' AND s.expires > v_lease AND p_queue = ANY (s.queues);
END $$;

-- The median run time of the last completed jobs of a queue; NULL if there are none.
CREATE FUNCTION fairlane.read_seconds(p_queue integer) RETURNS double precision LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT (array_agg(t.seconds ORDER BY t.seconds))[count(*) / 2 + 1] FROM (
        SELECT greatest(0.0, o.finished_at - o.started_at) AS seconds FROM fairlane.outcome o
        WHERE o.queue = p_queue AND o.state = STATE.COMPLETED AND o.started_at IS NOT NULL ORDER BY o.finished_at DESC LIMIT 101) t);
END $$;
