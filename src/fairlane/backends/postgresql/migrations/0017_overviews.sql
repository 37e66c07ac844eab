-- Queues, sessions and bindings as readers see them; see 0015_reading.sql for the settings.

-- Every queue, by name. `tallies` has a row for each class that ever had a job: the class, then jobs by state. What is
-- stored and not admitted yet is pending too, and in no tally.
CREATE FUNCTION fairlane.read_queues(p_lease double precision DEFAULT NULL)
RETURNS TABLE (name text, version bigint, declared text, override text, tallies bigint[], workers bigint)
LANGUAGE plpgsql STABLE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    v_lease double precision := coalesce(p_lease, extract(epoch FROM clock_timestamp()));
BEGIN
    RETURN QUERY
    WITH sums AS MATERIALIZED (
        SELECT x.queue, x.class, sum(x.scheduled)::bigint AS scheduled, sum(x.pending)::bigint AS pending,
            sum(x.running)::bigint AS running, sum(x.completed)::bigint AS completed, sum(x.failed)::bigint AS failed,
            sum(x.cancelled)::bigint AS cancelled
        FROM (
            SELECT t.queue, t.class, t.scheduled, t.pending, t.running, t.completed, t.failed, t.cancelled
            FROM fairlane.tally t
            UNION ALL
            SELECT l.queue, l.class, 0, 1, 0, 0, 0, 0 FROM fairlane.live l WHERE l.state = 0
        ) x GROUP BY x.queue, x.class
    ), present AS MATERIALIZED (
        SELECT s.queues FROM fairlane.session s WHERE s.state = 'live' AND s.kind = 'worker' AND s.expires > v_lease
    )
    SELECT q.name, q.version, q.declared, q.override,
        (SELECT array_agg(ARRAY[t.class, t.scheduled, t.pending, t.running, t.completed, t.failed, t.cancelled])
            FROM sums t WHERE t.queue = q.id),
        (SELECT count(*) FROM present w WHERE q.name = ANY (w.queues))
    FROM fairlane.queue q ORDER BY q.name COLLATE "C";
END $$;

-- One session, or every one, the newest first. `turns` are the classes of those it runs: they take no slot, and are not
-- counted by `running_*`.
CREATE FUNCTION fairlane.read_sessions(p_id text, p_lease double precision DEFAULT NULL)
RETURNS TABLE (
    id text, kind text, state text, host text, pid integer, pool text, idx integer, named boolean, queues text[],
    slots integer, reserved_high integer, reserved_normal integer, running_high integer, running_normal integer,
    running_low integer, turns smallint[], started_at double precision, lease double precision, remaining double precision
)
LANGUAGE plpgsql STABLE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    v_lease double precision := coalesce(p_lease, extract(epoch FROM clock_timestamp()));
    v_seqs bigint[];
BEGIN
    IF p_id IS NULL THEN
        v_seqs := ARRAY(SELECT s.seq FROM fairlane.session s);
    ELSE
        v_seqs := ARRAY(SELECT s.seq FROM fairlane.session s WHERE s.id = p_id);
    END IF;
    RETURN QUERY
    SELECT s.id, s.kind, s.state, s.host, s.pid, s.pool, s.idx, s.named, s.queues, s.slots, s.reserved_high,
        s.reserved_normal, h.running_high, h.running_normal, h.running_low,
        ARRAY(SELECT a.class FROM fairlane.aside a
            WHERE a.waiter = s.seq AND EXISTS (SELECT 1 FROM fairlane.live l WHERE l.seq = a.seq AND l.session IS NOT NULL)),
        s.started_at, s.lease, s.expires - v_lease
    FROM fairlane.session s CROSS JOIN LATERAL (
        SELECT x.running_high, x.running_normal, x.running_low FROM fairlane.load x
        WHERE x.session >= s.seq AND x.session <= s.seq ORDER BY x.session DESC LIMIT 1) h
    WHERE s.seq = ANY (v_seqs) ORDER BY s.seq DESC;
END $$;

-- Bindings, open ones first, then the latest.
CREATE FUNCTION fairlane.read_bindings(p_pool text, p_key text, p_limit integer)
RETURNS TABLE (
    pool text, key text, idx integer, state text, opened_at double precision, used_at double precision,
    closed_at double precision, cleanup text, cleanup_failed boolean
)
LANGUAGE plpgsql STABLE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_material = off SET join_collapse_limit = 1 SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    v_seqs bigint[];
BEGIN
    IF p_key IS NOT NULL THEN
        v_seqs := ARRAY(SELECT b.seq FROM fairlane.binding b WHERE b.key = p_key AND (p_pool IS NULL OR b.pool = p_pool)
            ORDER BY b.closed_at IS NOT NULL, b.seq DESC LIMIT p_limit);
    ELSE
        -- All that are open, and then sorted: else the planner may look for them by walking over those that are closed.
        v_seqs := ARRAY(WITH o AS MATERIALIZED (
            SELECT b.seq FROM fairlane.binding b WHERE b.closed_at IS NULL AND (p_pool IS NULL OR b.pool = p_pool)
        ) SELECT o.seq FROM o ORDER BY o.seq DESC LIMIT p_limit);
        v_seqs := v_seqs || ARRAY(SELECT b.seq FROM fairlane.binding b
            WHERE b.closed_at IS NOT NULL AND (p_pool IS NULL OR b.pool = p_pool)
            ORDER BY b.closed_at DESC, b.seq DESC LIMIT p_limit - cardinality(v_seqs));
    END IF;
    RETURN QUERY
    SELECT b.pool, b.key, b.idx, b.state, b.opened_at, b.used_at, b.closed_at, j.id, b.cleanup_failed
    FROM unnest(v_seqs) WITH ORDINALITY w (seq, n) JOIN fairlane.binding b ON b.seq = w.seq
    LEFT JOIN fairlane.job j ON j.seq = b.cleanup ORDER BY w.n;
END $$;
