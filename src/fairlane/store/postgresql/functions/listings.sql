-- Queues, lanes, sessions and bindings as readers see them.

-- Every queue, by name. `tallies` has a row for each class that ever had a job: the class, then the number of jobs by state.
-- Jobs that are not admitted yet are in no tally; they are counted as pending here.
CREATE FUNCTION fairlane.read_queues(p_lease double precision DEFAULT NULL, p_now double precision DEFAULT NULL,
    p_lanes integer DEFAULT 500)
RETURNS TABLE (name text, version bigint, declared text, override text, tallies bigint[], workers bigint,
    oldest_wait double precision)
LANGUAGE plpgsql STABLE
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
            FROM fairlane.queue_count t
            UNION ALL
            SELECT l.queue, l.class, 0, 1, 0, 0, 0, 0 FROM fairlane.active_job l WHERE l.state = STATE.ARRIVING
        ) x GROUP BY x.queue, x.class
    ), present AS MATERIALIZED (
        SELECT s.queues FROM fairlane.session s WHERE s.state = 'live' AND s.kind = 'worker' AND s.expires > v_lease
    )
    SELECT q.name, q.version, q.declared, q.override,
        (SELECT array_agg(ARRAY[t.class, t.scheduled, t.pending, t.running, t.completed, t.failed, t.cancelled])
            FROM sums t WHERE t.queue = q.id),
        (SELECT count(*) FROM present w WHERE q.name = ANY (w.queues)),
        (SELECT greatest(0, coalesce(p_now, extract(epoch FROM clock_timestamp())) - o.since)
            FROM fairlane.oldest_waiting(q.id, p_lanes) o (since) WHERE o.since IS NOT NULL)
    FROM fairlane.queue q ORDER BY q.name COLLATE "C";
END $$;

-- The lanes of a queue that have work, the longest first: each with its key (NULL: jobs without a lane), its waiting and
-- running jobs, and whether the waiting ones were all counted. No row for a queue that does not exist.
--
-- A queue with up to `p_whole` waiting jobs is counted completely. In a longer one, the lanes that are most frequent on a
-- sample of pages of `active_job`, and the lanes of running jobs, are counted up to a limit; longer ones are estimated by their
-- share of the sample. So the cost depends on the number of lanes asked for, not on the number of jobs.
--
-- `p_pending`, `p_running` and `p_key`: the lane to continue after, NULL for the first page. `p_shown`: how many lanes came
-- before.
CREATE FUNCTION fairlane.read_lanes(p_queue text, p_limit integer, p_whole integer, p_pending bigint DEFAULT NULL,
    p_running bigint DEFAULT NULL, p_key text DEFAULT NULL, p_shown integer DEFAULT 0, p_now double precision DEFAULT NULL)
RETURNS TABLE (declared text, override text, lanes json, whole boolean)
LANGUAGE plpgsql STABLE
AS $$
DECLARE
    c_pages CONSTANT double precision := 150;
    c_counted CONSTANT integer := 5000;
    c_enough CONSTANT integer := 10;  -- jobs that a lane needs in the sample to be estimated by its share
    q fairlane.queue;
    v_pending bigint;
    v_sampled text[] := '{}';
    v_shares bigint[] := '{}';
    v_keys text[];
    v_most integer;                -- NULL: all of them
    v_more integer;
    v_scale double precision;
    v_now double precision := coalesce(p_now, extract(epoch FROM clock_timestamp()));
    v_gated_keys text[];           -- lanes of gated jobs outside limited lanes, and the first job of each (`v_gated`)
    v_gated bigint[];
BEGIN
    SELECT * INTO q FROM fairlane.queue x WHERE x.name = p_queue;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT array_agg(y.key), array_agg(y.seq) INTO v_gated_keys, v_gated FROM (
        SELECT DISTINCT ON (g.key) g.key, g.seq FROM (SELECT coalesce(j.lane, '') AS key, x.arrival, a.seq FROM fairlane.job_extra a
            CROSS JOIN LATERAL (SELECT x.queue, x.state, x.lane, x.arrival FROM fairlane.active_job x WHERE x.seq = a.seq OFFSET 0) x
            CROSS JOIN LATERAL (SELECT i.lane FROM fairlane.job i WHERE i.seq = a.seq OFFSET 0) j
            WHERE a.gate IN (GATE.UNBOUND, GATE.CLEANUP) AND x.queue = q.id AND x.state = STATE.PENDING AND x.lane IS NULL LIMIT p_whole) g
        ORDER BY g.key, g.arrival) y;
    SELECT coalesce(sum(t.pending), 0) INTO v_pending FROM fairlane.queue_count t WHERE t.queue = q.id;
    IF v_pending > p_whole THEN
        v_most := p_limit + p_shown;
        SELECT array_agg(y.key), array_agg(y.jobs), v_pending / sum(y.jobs) INTO v_sampled, v_shares, v_scale FROM (
            SELECT coalesce(j.lane, '') AS key, count(*) AS jobs FROM (
                SELECT x.seq FROM fairlane.active_job x TABLESAMPLE SYSTEM (least(100.0, 100.0 * c_pages
                    * current_setting('block_size')::integer / greatest(1, pg_relation_size('fairlane.active_job'))))
                -- One row in five: the jobs of a page are often of one lane, so more pages improve the sample more than more
                -- rows.
                WHERE random() < 0.2 AND x.queue = q.id AND x.state = STATE.PENDING) s
            CROSS JOIN LATERAL (SELECT i.lane FROM fairlane.job i WHERE i.seq = s.seq OFFSET 0) j
            GROUP BY 1 ORDER BY 2 DESC) y;
    END IF;
    -- The sample may miss short lanes: if it has fewer than wanted, add some that have claimable jobs or a limit.
    IF v_most IS NOT NULL THEN
        v_more := CASE WHEN cardinality(v_sampled) >= v_most THEN 0 ELSE v_most END;
    END IF;
    v_keys := ARRAY((SELECT u.key FROM unnest(v_sampled) u(key) LIMIT v_most)
        UNION (SELECT f.lane FROM fairlane.domains d JOIN fairlane.ready_lane n ON n.domain = d.id AND n.tag >= d.clock
            JOIN fairlane.flow f ON f.id = n.flow WHERE d.queue = q.id LIMIT v_more)
        UNION (SELECT n.key FROM fairlane.lane n WHERE n.queue = q.id LIMIT v_more));
    IF v_most IS NOT NULL THEN
        v_keys := ARRAY(SELECT unnest(v_keys) UNION SELECT coalesce(j.lane, '') FROM fairlane.active_job x
            JOIN fairlane.job j ON j.seq = x.seq WHERE x.session IS NOT NULL AND x.queue = q.id);
        v_most := greatest(50, c_counted / greatest(1, cardinality(v_keys)));
    END IF;
    RETURN QUERY SELECT q.declared, q.override, (
        SELECT json_agg(json_build_array(nullif(y.key, ''), y.pending, y.running, y.exact, (SELECT greatest(0, v_now - w.since)
                FROM fairlane.lane_waiting(q.id, y.key, (SELECT g.seq FROM unnest(v_gated_keys, v_gated) g(key, seq) WHERE g.key = y.key))
                    w (since) WHERE w.since IS NOT NULL))
            ORDER BY y.pending DESC, y.running DESC, y.key COLLATE "C") FROM (
            SELECT * FROM (SELECT z.key, CASE WHEN z.waiting < v_most OR v_most IS NULL THEN z.waiting
                    ELSE greatest(z.waiting, (SELECT round(v_scale * s.jobs) FROM unnest(v_sampled, v_shares) s(key, jobs)
                        WHERE s.key = z.key AND s.jobs >= c_enough)::bigint) END AS pending,
                z.running, z.waiting < v_most OR v_most IS NULL AS exact
            FROM (
                SELECT w.key, sum(w.waiting)::bigint AS waiting, sum(w.running)::bigint AS running FROM (
                    SELECT k.key, c.waiting, 0 AS running FROM unnest(v_keys) k(key)
                    CROSS JOIN LATERAL (SELECT count(*) AS waiting FROM (
                        (SELECT 1 FROM fairlane.domain d
                            CROSS JOIN LATERAL (SELECT x.id, x.head FROM fairlane.flows x
                                WHERE x.domain = d.id AND x.lane = k.key AND x.tag IS NOT NULL OFFSET 0) f
                            CROSS JOIN LATERAL (SELECT 1 FROM fairlane.active_job x WHERE x.flow = f.id AND x.flow IS NOT NULL
                                AND x.session IS NULL AND x.arrival >= f.head LIMIT v_most) r
                            WHERE d.queue = q.id LIMIT v_most)
                        UNION ALL (SELECT 1 FROM fairlane.lane n
                            CROSS JOIN LATERAL (SELECT 1 FROM fairlane.active_job x WHERE x.lane = n.id AND x.lane IS NOT NULL
                                AND NOT x.granted AND x.session IS NULL AND x.state = STATE.PENDING LIMIT v_most) r
                            WHERE n.queue = q.id AND n.key = k.key LIMIT v_most) LIMIT v_most) o) c
                    -- Gated jobs, except those already counted as waiting for a place.
                    UNION ALL SELECT coalesce(g.lane, ''), count(*), 0 FROM (SELECT j.lane FROM fairlane.job_extra a
                        CROSS JOIN LATERAL (SELECT x.queue, x.state, x.lane, x.granted FROM fairlane.active_job x WHERE x.seq = a.seq OFFSET 0) x
                        CROSS JOIN LATERAL (SELECT i.lane FROM fairlane.job i WHERE i.seq = a.seq OFFSET 0) j
                        WHERE a.gate IN (GATE.UNBOUND, GATE.CLEANUP) AND x.queue = q.id AND x.state = STATE.PENDING AND (x.lane IS NULL OR x.granted) LIMIT p_whole) g GROUP BY 1
                    UNION ALL SELECT coalesce(j.lane, ''), 0, count(*) FROM fairlane.active_job x JOIN fairlane.job j ON j.seq = x.seq
                        WHERE x.session IS NOT NULL AND x.queue = q.id GROUP BY 1
                    UNION ALL SELECT '', 0, count(*) FROM fairlane.job_extra a JOIN fairlane.active_job x ON x.seq = a.seq
                        WHERE a.gate = GATE.PARENT AND x.queue = q.id) w
                GROUP BY w.key) z
            WHERE z.waiting + z.running > 0) o
            WHERE p_pending IS NULL OR o.pending < p_pending OR o.pending = p_pending AND (o.running < p_running
                OR o.running = p_running AND o.key COLLATE "C" > p_key COLLATE "C")
            ORDER BY 2 DESC, 3 DESC, o.key COLLATE "C" LIMIT p_limit) y), v_pending <= p_whole;
END $$;

-- Since when the job of a lane ('' for none) that arrived first has waited, like `oldest_waiting`; NULL if no job waits.
-- `p_gated`: the first gated job outside a limited lane.
CREATE FUNCTION fairlane.lane_waiting(p_queue integer, p_key text, p_gated bigint) RETURNS double precision LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_seq bigint;
BEGIN
    SELECT x.seq INTO v_seq FROM (
        SELECT l.arrival, l.seq FROM fairlane.domain d CROSS JOIN LATERAL (SELECT y.id, y.head FROM fairlane.flows y
            WHERE y.domain = d.id AND y.lane = p_key AND y.tag IS NOT NULL OFFSET 0) f
        CROSS JOIN LATERAL (SELECT y.arrival, y.seq FROM fairlane.active_job y WHERE y.flow = f.id AND y.flow IS NOT NULL
            AND y.session IS NULL AND y.arrival = f.head LIMIT 1) l
        WHERE d.queue = p_queue
        UNION ALL
        SELECT l.arrival, l.seq FROM fairlane.lane n CROSS JOIN generate_series(CLASS.HIGH, CLASS.LOW) r (rank)
        CROSS JOIN generate_series(0, 1) g (granted) CROSS JOIN LATERAL (SELECT y.arrival, y.seq FROM fairlane.active_job y
            WHERE y.lane = n.id AND y.lane IS NOT NULL AND y.session IS NULL AND y.granted = (g.granted = 1)
            AND y.rank = r.rank::smallint AND y.state = STATE.PENDING ORDER BY y.lane, y.granted, y.rank, y.arrival LIMIT 1) l
        WHERE n.queue = p_queue AND n.key = p_key
        UNION ALL
        SELECT y.arrival, y.seq FROM fairlane.active_job y WHERE y.seq = p_gated
    ) x ORDER BY x.arrival LIMIT 1;
    RETURN (SELECT greatest(j.enqueued_at + coalesce(j.delay, 0), j.run_at,
            (SELECT a.ended_at FROM fairlane.attempt a WHERE a.seq = j.seq ORDER BY a.fence DESC LIMIT 1))
        FROM fairlane.job j WHERE j.seq = v_seq);
END $$;

-- Since when the job of a queue that arrived first has waited: since it was enqueued, was due, or last ran. Considers the first
-- job of each flow, the first ones that wait for a place of a lane, and gated jobs; of each kind at most `p_lanes`.
CREATE FUNCTION fairlane.oldest_waiting(p_queue integer, p_lanes integer) RETURNS double precision LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_seq bigint;
BEGIN
    SELECT x.seq INTO v_seq FROM (
        SELECT l.arrival, l.seq FROM fairlane.domain d CROSS JOIN LATERAL (
            SELECT i.flow, i.head FROM (SELECT y.flow, y.head FROM fairlane.ready_lane y WHERE y.domain = d.id
                ORDER BY y.domain, y.tag, y.head LIMIT p_lanes) i ORDER BY i.head LIMIT 1) h
        CROSS JOIN LATERAL (SELECT y.arrival, y.seq FROM fairlane.active_job y WHERE y.flow = h.flow AND y.flow IS NOT NULL
            AND y.session IS NULL AND y.arrival = h.head LIMIT 1) l
        WHERE d.queue = p_queue
        UNION ALL
        SELECT l.arrival, l.seq FROM (SELECT y.id FROM fairlane.lane y WHERE y.queue = p_queue LIMIT p_lanes) n
        CROSS JOIN generate_series(CLASS.HIGH, CLASS.LOW) r (rank) CROSS JOIN LATERAL (SELECT y.arrival, y.seq FROM fairlane.active_job y
            WHERE y.lane = n.id AND y.lane IS NOT NULL AND y.session IS NULL AND NOT y.granted AND y.rank = r.rank::smallint
            ORDER BY y.lane, y.granted, y.rank, y.arrival LIMIT 1) l
        UNION ALL
        SELECT l.arrival, l.seq FROM (SELECT y.seq FROM fairlane.job_extra y WHERE y.gate IN (GATE.UNBOUND, GATE.CLEANUP)
            ORDER BY y.gate, y.inbox, y.arrival LIMIT p_lanes) a
        CROSS JOIN LATERAL (SELECT y.arrival, y.seq FROM fairlane.active_job y
            WHERE y.seq = a.seq AND y.queue = p_queue AND y.state = STATE.PENDING AND y.arrival IS NOT NULL OFFSET 0) l
    ) x ORDER BY x.arrival LIMIT 1;
    RETURN (SELECT greatest(j.enqueued_at + coalesce(j.delay, 0), j.run_at,
            (SELECT a.ended_at FROM fairlane.attempt a WHERE a.seq = j.seq ORDER BY a.fence DESC LIMIT 1))
        FROM fairlane.job j WHERE j.seq = v_seq);
END $$;

-- One session or all, the newest first. `turns`: the classes of the turns it runs, which take no slot and are not counted in
-- `running_*`.
CREATE FUNCTION fairlane.read_sessions(p_id text, p_lease double precision DEFAULT NULL)
RETURNS TABLE (
    id text, kind text, state text, host text, pid integer, pool text, idx integer, named boolean, queues text[],
    slots integer, reserved_high integer, reserved_normal integer, running_high integer, running_normal integer,
    running_low integer, turns smallint[], started_at double precision, lease double precision, remaining double precision,
    task_set text
)
LANGUAGE plpgsql STABLE
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
        ARRAY(SELECT a.class FROM fairlane.job_extra a
            WHERE a.waiter = s.seq AND EXISTS (SELECT 1 FROM fairlane.active_job l WHERE l.seq = a.seq AND l.session IS NOT NULL)),
        s.started_at, s.lease, s.expires - v_lease, s.task_set
    FROM fairlane.session s CROSS JOIN LATERAL (
        SELECT x.running_high, x.running_normal, x.running_low FROM fairlane.session_load x
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
AS $$
#variable_conflict use_column
DECLARE
    v_seqs bigint[];
BEGIN
    IF p_key IS NOT NULL THEN
        v_seqs := ARRAY(SELECT b.seq FROM fairlane.binding b WHERE b.key = p_key AND (p_pool IS NULL OR b.pool = p_pool)
            ORDER BY b.closed_at IS NOT NULL, b.seq DESC LIMIT p_limit);
    ELSE
        -- Materialize all open bindings, then sort: otherwise the planner may search for them by scanning the closed ones.
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
