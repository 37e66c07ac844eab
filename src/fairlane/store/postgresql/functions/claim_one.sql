-- The claim of a single job, for a worker that was notified of it.

-- Whether `exchange` could answer this claim with more than an empty result.
CREATE FUNCTION fairlane.is_worth_a_claim(p_session text, p_number bigint, p_name text) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    s fairlane.session;
BEGIN
    SELECT * INTO s FROM fairlane.session x WHERE x.id = p_session;
    IF s.state IS DISTINCT FROM 'live' OR s.slots IS NULL OR s.idx IS NULL
        OR p_number <= (SELECT x.claim FROM fairlane.session_load x WHERE x.session >= s.seq AND x.session <= s.seq
                        ORDER BY x.session DESC LIMIT 1) THEN
        RETURN true;  -- an error, or a repeated claim
    END IF;
    RETURN (fairlane.sources(s, ARRAY[p_name], s.pool || '/' || s.idx)).queues IS NOT NULL;
END $$;

-- A fast path for an idle worker that was notified of a job, where latency shows. It does the same as `exchange`, in two
-- statements and without arrays: whatever a server process touches after it has slept costs about 20 µs, and this touches half
-- as much (measured: 1.1 ms per call instead of 1.5). `seq` is NULL, and nothing was changed, if there is no job, or if there
-- is more to decide than whether this one job starts; `more` distinguishes the two. Of many workers that are notified of one
-- job, all but one find nothing, and need no second call to know it.
--
-- The caller passes the number of the queue, so that its lock can be taken before anything is read. The name verifies the
-- number, which may be outdated after the schema was recreated. A worker that was not notified of a job should not call this:
-- it would hold the lock only to look.
CREATE FUNCTION fairlane.claim_one(p_session text, p_number bigint, p_queue integer, p_name text, p_classes smallint[], p_belows integer[],
    p_now double precision DEFAULT NULL, p_lease double precision DEFAULT NULL, OUT seq bigint, OUT id text, OUT fence integer,
    OUT attempt integer, OUT task text, OUT lane text, OUT class smallint, OUT payload bytea, OUT retries integer,
    OUT backoff bytea, OUT timeout double precision, OUT suspect boolean, OUT limited boolean, OUT headers bytea, OUT wait double precision,
    OUT more boolean)
LANGUAGE plpgsql AS $$
DECLARE
    v_space integer := fairlane.space();
    v_now double precision;
    v_wanted boolean := false;
    r record;
    i integer;
BEGIN
    IF NOT pg_try_advisory_xact_lock_shared(v_space, 0) OR NOT pg_try_advisory_xact_lock(v_space, p_queue) THEN
        -- Most likely the call that has the locks is starting the job. If it can still be seen, look again when that call has
        -- committed.
        more := fairlane.is_worth_a_claim(p_session, p_number, p_name);
        IF more AND fairlane.lock_beside(ARRAY[p_queue]) THEN
            more := fairlane.is_worth_a_claim(p_session, p_number, p_name);
        END IF;
        RETURN;
    END IF;
    more := true;
    v_now := coalesce(p_now, extract(epoch FROM clock_timestamp()));
    -- The only flow of the queue and its first job, unless other jobs could start or must be admitted.
    SELECT x.seq AS session, f.claim, f.high, f.normal, f.low, f.tid AS load_at, y.*, p.tid AS pace_at, l.*, j.*,
        CASE WHEN l.cost = 1.0 AND p.weight = 1.0 THEN 1000
            ELSE greatest(1, round(1000 * CASE WHEN l.cost BETWEEN 0.01 AND 100 THEN l.cost ELSE 1 END / p.weight)) END::integer AS pay,
        fairlane.room(x.slots, x.reserved_high, x.reserved_normal, f.high, f.normal, f.low, y.class) AS room,
        (SELECT z.seq FROM fairlane.active_job z WHERE z.flow = y.flow AND z.flow IS NOT NULL AND z.session IS NULL AND z.arrival > y.head
            ORDER BY z.arrival LIMIT 1) IS NULL
        AND (SELECT z.seq FROM fairlane.active_job z WHERE z.queue = p_queue AND z.state = STATE.ARRIVING ORDER BY z.seq LIMIT 1) IS NULL
        AND (SELECT z.id FROM fairlane.domain z WHERE z.inbox = x.pool || '/' || x.idx AND fairlane.next_flow(z.id) IS NOT NULL
            LIMIT 1) IS NULL AS alone
    INTO r
    FROM fairlane.session x
    CROSS JOIN LATERAL (SELECT z.claim, z.running_high AS high, z.running_normal AS normal, z.running_low AS low, z.ctid AS tid
        FROM fairlane.session_load z WHERE z.session >= x.seq AND z.session <= x.seq ORDER BY z.session DESC LIMIT 1) f
    CROSS JOIN LATERAL (
        SELECT d.id AS domain, d.class, c.value AS clock, c.tid AS clock_at, n.flow, n.tag, n.head, n.tid AS ready_at,
            count(*) OVER () AS flows
        FROM fairlane.queue q
        CROSS JOIN LATERAL (SELECT w.id, w.class FROM fairlane.domain w
            WHERE w.inbox = '' AND w.class = ANY ('{0,1,2}') AND w.queue = q.id OFFSET 0) d
        CROSS JOIN LATERAL (SELECT z.value, z.ctid AS tid FROM fairlane.clock z WHERE z.domain >= d.id AND z.domain <= d.id
            ORDER BY z.domain DESC LIMIT 1) c
        CROSS JOIN LATERAL (SELECT z.flow, z.tag, z.head, z.ctid AS tid FROM fairlane.ready_lane z
            WHERE z.domain = d.id AND z.tag >= c.value ORDER BY z.tag, z.head LIMIT 2) n
        WHERE q.id = p_queue AND q.name = p_name AND NOT q.paused AND q.slots IS NULL) y
    CROSS JOIN LATERAL (SELECT z.weight, z.ctid AS tid FROM fairlane.lane_pace z WHERE z.flow >= y.flow AND z.flow <= y.flow
        ORDER BY z.flow DESC LIMIT 1) p
    CROSS JOIN LATERAL (SELECT z.seq, z.cost, z.expires_at, z.fence, z.attempt, z.suspect, z.lane IS NOT NULL AS limited
        FROM fairlane.active_job z WHERE z.flow = y.flow AND z.flow IS NOT NULL AND z.session IS NULL AND z.arrival = y.head OFFSET 0) l
    CROSS JOIN LATERAL (SELECT z.id, z.task, z.lane, z.payload, z.retries, z.backoff, z.timeout, z.headers, z.enqueued_at, z.delay, z.run_at
        FROM fairlane.job z
        WHERE z.seq = l.seq OFFSET 0) j
    WHERE x.id = p_session AND x.state = 'live' AND x.slots IS NOT NULL AND x.idx IS NOT NULL LIMIT 1;
    IF r.seq IS NULL THEN
        more := fairlane.is_worth_a_claim(p_session, p_number, p_name);
        RETURN;
    END IF;
    IF r.alone IS NOT TRUE OR r.flows > 1 OR r.claim >= p_number OR r.room = 0 OR r.expires_at <= v_now THEN
        RETURN;
    END IF;
    FOR i IN 1 .. cardinality(p_classes) LOOP
        v_wanted := v_wanted OR p_classes[i] = r.class
            AND (CASE r.class WHEN CLASS.HIGH THEN r.high WHEN CLASS.NORMAL THEN r.normal ELSE r.low END >= p_belows[i]) IS NOT TRUE;
    END LOOP;
    IF NOT v_wanted THEN
        RETURN;
    END IF;
    -- No other call moves rows of this queue, so they are still where they were read. Only the load can have changed or be
    -- changing, by another call of this session. Then nothing is done.
    WITH held AS MATERIALIZED (
        SELECT FROM fairlane.session_load x WHERE x.ctid = r.load_at AND x.claim = r.claim AND x.running_high = r.high
            AND x.running_normal = r.normal AND x.running_low = r.low FOR UPDATE SKIP LOCKED
    ), begun AS (
        UPDATE fairlane.active_job u SET state = STATE.RUNNING, granted_at = NULL, session = r.session, claim = p_number, fence = u.fence + 1,
            attempt = u.attempt + 1, started_at = v_now, paid = r.pay WHERE u.seq = r.seq AND EXISTS (SELECT FROM held)
    ), paid AS (
        UPDATE fairlane.lane_pace SET finish = r.tag + r.pay, head = NULL, tag = NULL WHERE ctid = r.pace_at AND EXISTS (SELECT FROM held)
    ), gone AS (
        DELETE FROM fairlane.ready_lane WHERE ctid = r.ready_at AND EXISTS (SELECT FROM held)
    ), timed AS (
        UPDATE fairlane.clock SET value = r.tag WHERE ctid = r.clock_at AND r.clock < r.tag AND EXISTS (SELECT FROM held)
    ), counted AS (
        INSERT INTO fairlane.queue_count (queue, class, pending, running) SELECT p_queue, r.class, -1, 1 WHERE EXISTS (SELECT FROM held)
    )
    UPDATE fairlane.session_load SET claim = p_number, running_high = r.high + (r.class = CLASS.HIGH)::integer,
        running_normal = r.normal + (r.class = CLASS.NORMAL)::integer, running_low = r.low + (r.class = CLASS.LOW)::integer
    WHERE ctid = r.load_at AND EXISTS (SELECT FROM held);
    IF NOT FOUND THEN
        RETURN;
    END IF;
    seq := r.seq;
    id := r.id;
    fence := r.fence + 1;
    attempt := r.attempt + 1;
    task := r.task;
    lane := r.lane;
    class := r.class;
    payload := r.payload;
    retries := r.retries;
    backoff := r.backoff;
    timeout := r.timeout;
    suspect := r.suspect;
    limited := r.limited;
    headers := r.headers;
    wait := CASE WHEN r.fence = 0 THEN fairlane.waited(v_now, r.enqueued_at, r.delay, r.run_at) END;
END $$;
