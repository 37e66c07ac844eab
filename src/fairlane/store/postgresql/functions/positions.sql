-- What `positions.py` needs to compute the positions of waiting jobs, in one call and one snapshot. Every count uses
-- an index and stops at a limit, which is a parameter.

-- Whether a live worker knows a task, or did not report its tasks: the worker of the inbox if one is given, otherwise any that
-- serves the queue.
CREATE FUNCTION fairlane.read_known(p_task text, p_queue text, p_inbox text, p_lease double precision DEFAULT NULL)
RETURNS boolean LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_lease double precision := coalesce(p_lease, extract(epoch FROM clock_timestamp()));
    v_named boolean := p_inbox <> '' AND right(p_inbox, 1) <> '/';
BEGIN
    RETURN EXISTS (
        SELECT 1 FROM fairlane.session s
        WHERE s.state IN ('live', 'stopping') AND s.kind = 'worker' AND s.expires > v_lease
        AND CASE WHEN v_named THEN s.pool || '/' || s.idx = p_inbox ELSE s.state = 'live' AND p_queue = ANY (s.queues) END
        AND (s.task_set IS NULL OR EXISTS (SELECT 1 FROM fairlane.task_set t WHERE t.id = s.task_set AND p_task = ANY (t.tasks))));
END $$;

-- Tasks with jobs that wait because sessions declined them, the longest waiting first; at most `p_most` jobs are read.
CREATE FUNCTION fairlane.read_declined(p_limit integer, p_most integer, p_lease double precision DEFAULT NULL)
RETURNS TABLE (queue text, task text, waiting bigint, since double precision, known boolean) LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN QUERY
    SELECT x.queue, x.task, x.waiting, x.since, fairlane.read_known(x.task, x.queue, '', p_lease) FROM (
        SELECT q.name AS queue, j.task, count(*) AS waiting, min(d.since) AS since FROM (
            SELECT a.seq, a.since, l.queue FROM fairlane.declined a JOIN fairlane.active_job l ON l.seq = a.seq AND l.fence = a.fence
            WHERE l.state <> STATE.RUNNING ORDER BY a.since LIMIT p_most) d
        JOIN fairlane.job j ON j.seq = d.seq JOIN fairlane.queue q ON q.id = d.queue
        GROUP BY q.name, j.task ORDER BY min(d.since), q.name COLLATE "C", j.task COLLATE "C" LIMIT p_limit) x;
END $$;

-- The fields of `positions.QueueSnapshot`.
CREATE FUNCTION fairlane.read_queue_snapshot(p_queue integer, p_lease double precision)
RETURNS json LANGUAGE plpgsql STABLE AS $$
DECLARE
    q fairlane.queue;
    t record;
BEGIN
    SELECT * INTO q FROM fairlane.queue x WHERE x.id = p_queue;
    SELECT coalesce(sum(x.pending) FILTER (WHERE x.class = CLASS.HIGH), 0)::bigint AS pending_high,
        coalesce(sum(x.pending) FILTER (WHERE x.class = CLASS.NORMAL), 0)::bigint AS pending_normal,
        coalesce(sum(x.pending) FILTER (WHERE x.class = CLASS.LOW), 0)::bigint AS pending_low,
        coalesce(sum(x.running - x.slotless) FILTER (WHERE x.class = CLASS.HIGH), 0)::bigint AS busy_high,
        coalesce(sum(x.running - x.slotless) FILTER (WHERE x.class = CLASS.NORMAL), 0)::bigint AS busy_normal,
        coalesce(sum(x.running - x.slotless) FILTER (WHERE x.class = CLASS.LOW), 0)::bigint AS busy_low
    INTO t FROM fairlane.queue_count x WHERE x.queue = p_queue;
    RETURN json_build_object(
        'id', p_queue, 'name', q.name, 'declared', q.declared, 'override', q.override,
        'pending', json_build_array(t.pending_high, t.pending_normal, t.pending_low),
        'busy', json_build_array(t.busy_high, t.busy_normal, t.busy_low),
        'workers', (SELECT coalesce(json_agg(w), '[]') FROM fairlane.read_workers(q.name, p_lease) w),
        'seconds', fairlane.read_seconds(p_queue));
END $$;

-- Waiting jobs of a lane up to an arrival for each class (NULL: none of the class), counted up to `p_exact`: claimable ones,
-- and in a limited lane those without a place and those that hold one while gated or until their retry. `p_key` is '' for jobs
-- without a lane.
CREATE FUNCTION fairlane.read_line_count(l fairlane.active_job, p_key text, p_ordered boolean, p_bounds bigint[], p_exact integer)
RETURNS integer LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT count(*) FROM (
        SELECT 1 FROM fairlane.domain d
        CROSS JOIN LATERAL (SELECT x.id, x.tag, x.head FROM fairlane.flows x
            WHERE x.domain = d.id AND x.lane = p_key LIMIT 1) f
        -- From the head on: earlier entries of the index are dead.
        CROSS JOIN LATERAL (SELECT 1 FROM fairlane.active_job x WHERE x.flow = f.id AND x.flow IS NOT NULL AND x.session IS NULL
            AND x.arrival >= f.head AND x.arrival < p_bounds[d.class + 1] LIMIT p_exact) r
        WHERE d.queue = l.queue AND f.tag IS NOT NULL
        UNION ALL
        -- In an ordered lane every rank is 0, so the first bound counts all.
        SELECT 1 FROM unnest(p_bounds) WITH ORDINALITY b (arrival, ord)
        CROSS JOIN LATERAL (SELECT 1 FROM fairlane.active_job x WHERE x.lane = l.lane AND x.lane IS NOT NULL AND NOT x.granted AND x.session IS NULL
            AND x.rank = b.ord - 1 AND x.arrival < b.arrival AND x.state < STATE.RUNNING LIMIT p_exact) w
        WHERE b.ord = 1 OR NOT p_ordered
        UNION ALL
        SELECT 1 FROM unnest(p_bounds) WITH ORDINALITY b (arrival, ord)
        CROSS JOIN LATERAL (SELECT 1 FROM fairlane.active_job x WHERE x.lane = l.lane AND x.lane IS NOT NULL
            AND x.granted AND x.session IS NULL AND (x.due IS NOT NULL OR x.gate > GATE.NONE) AND x.rank = b.ord - 1 AND x.arrival < b.arrival
            AND x.state < STATE.RUNNING LIMIT p_exact) h
        WHERE b.ord = 1 OR NOT p_ordered
        UNION ALL
        SELECT 1 FROM fairlane.job_extra g
        CROSS JOIN LATERAL (SELECT x.lane, x.queue FROM fairlane.job x WHERE x.seq = g.seq LIMIT 1) j
        WHERE l.lane IS NULL AND g.gate IN (GATE.UNBOUND, GATE.CLEANUP) AND j.queue = l.queue
            AND g.arrival < p_bounds[g.class + 1] AND coalesce(j.lane, '') = p_key
        LIMIT p_exact) x);
END $$;

-- An estimate for a job with more jobs before it than are counted: how many jobs of its lane come before it, and how many of
-- those are of its class, by their share of the waiting jobs on a sample of pages. NULL if the sample has no waiting job.
CREATE FUNCTION fairlane.read_likely(l fairlane.active_job, p_key text, p_ordered boolean, OUT before bigint, OUT own bigint)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    c_pages CONSTANT double precision := 200;
    v_part double precision := least(100.0, 100.0 * c_pages * current_setting('block_size')::integer
        / greatest(1, pg_relation_size('fairlane.active_job')));
    v_flows bigint[] := ARRAY(SELECT f.id FROM fairlane.domain d JOIN fairlane.flow f ON f.domain = d.id AND f.lane = p_key
        WHERE d.queue = l.queue);
    v_scale double precision;
BEGIN
    SELECT count(*) FILTER (WHERE y.before), count(*) FILTER (WHERE y.before AND (p_ordered OR y.class = l.class)),
        (SELECT sum(t.pending) FROM fairlane.queue_count t WHERE t.queue = l.queue) / nullif(count(*), 0)::double precision
    INTO before, own, v_scale FROM (
        SELECT x.class, CASE WHEN l.lane IS NOT NULL THEN x.lane = l.lane ELSE x.flow = ANY (v_flows) END
            AND CASE WHEN p_ordered OR x.class = l.class THEN x.arrival < l.arrival ELSE x.class < l.class END AS before
        FROM fairlane.active_job x TABLESAMPLE SYSTEM (v_part) WHERE x.queue = l.queue AND x.state = STATE.PENDING) y;
    before := round(before * v_scale);
    own := round(own * v_scale);
END $$;

-- The fields of `positions.CompetingLanes`, for a job with `p_own` jobs of its lane and class before it.
CREATE FUNCTION fairlane.read_competing_lanes(
    l fairlane.active_job, p_key text, p_own integer, p_lanes integer, p_counted integer, p_many integer
)
RETURNS json LANGUAGE plpgsql STABLE AS $$
DECLARE
    d fairlane.domains;
    f fairlane.flows;
    v_active bigint;
    v_limited bigint := 0;
    v_most bigint;
    v_ready json;
    v_blocked json;
BEGIN
    SELECT * INTO d FROM fairlane.domains x WHERE x.inbox = l.inbox AND x.class = l.class AND x.queue = l.queue;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    SELECT * INTO f FROM fairlane.flows x WHERE x.domain = d.id AND x.lane = p_key;
    -- No tag is lower than the clock.
    SELECT count(*) INTO v_active FROM (SELECT 1 FROM fairlane.ready_lane x WHERE x.domain = d.id AND x.tag >= d.clock LIMIT p_many) y;
    IF l.inbox = '' THEN
        SELECT count(*) INTO v_limited FROM (SELECT 1 FROM fairlane.lane x WHERE x.queue = l.queue LIMIT p_many) y;
    END IF;
    -- The same as `positions.counted`.
    v_most := least(2 * p_own + 10, p_counted / least(p_lanes, greatest(1, v_active + v_limited)));
    SELECT json_agg(json_build_array(y.lane, y.tag, y.cost, y.places, y.claimable + y.waiting) ORDER BY y.tag, y.head)
    INTO v_ready FROM (
        SELECT x.lane, x.tag, x.head, h.cost, n.places,
            (SELECT count(*) FROM (SELECT 1 FROM fairlane.active_job r WHERE r.flow = x.id AND r.flow IS NOT NULL
                AND r.session IS NULL AND r.arrival >= x.head LIMIT v_most) c) AS claimable,
            (SELECT count(*) FROM (SELECT 1 FROM fairlane.active_job w WHERE w.lane = n.id AND w.lane IS NOT NULL
                AND NOT w.granted AND w.session IS NULL AND w.rank = CASE WHEN n.ordered THEN 0 ELSE l.class END LIMIT v_most) c) AS waiting
        FROM (SELECT a.flow AS id, a.tag, a.head, (SELECT o.lane FROM fairlane.flow o WHERE o.id = a.flow) AS lane
            FROM fairlane.ready_lane a WHERE a.domain = d.id AND a.tag >= d.clock AND a.flow IS DISTINCT FROM f.id
            ORDER BY a.tag, a.head LIMIT p_lanes) x
        CROSS JOIN LATERAL (SELECT a.cost FROM fairlane.active_job a WHERE a.flow = x.id AND a.flow IS NOT NULL
            AND a.session IS NULL AND a.arrival = x.head LIMIT 1) h
        LEFT JOIN LATERAL (SELECT a.* FROM fairlane.lane a WHERE a.queue = l.queue AND a.key = x.lane LIMIT 1) n ON true
    ) y;
    IF v_limited > 0 THEN
        -- Lanes whose places are all taken, so that none of their jobs is claimable at the moment.
        SELECT json_agg(json_build_array(y.key, y.finish, y.places, (SELECT count(*) FROM (
            SELECT 1 FROM fairlane.active_job w WHERE w.lane = y.id AND w.lane IS NOT NULL AND NOT w.granted AND w.session IS NULL
            AND w.rank = CASE WHEN y.ordered THEN 0 ELSE l.class END LIMIT v_most) c)))
        INTO v_blocked FROM (
            SELECT n.id, n.key, n.places, n.ordered, x.finish
            FROM (SELECT * FROM fairlane.lane a WHERE a.queue = l.queue AND a.key <> p_key LIMIT p_many) n
            LEFT JOIN LATERAL (SELECT a.tag, a.finish FROM fairlane.flows a
                WHERE a.domain = d.id AND a.lane = n.key LIMIT 1) x ON true
            WHERE x.tag IS NULL LIMIT p_lanes
        ) y;
    END IF;
    RETURN json_build_object(
        'clock', d.clock, 'finish', coalesce(f.finish, 0), 'tag', f.tag, 'active', v_active, 'limited', v_limited,
        'counted', v_most, 'ready', coalesce(v_ready, '[]'), 'blocked', coalesce(v_blocked, '[]'));
END $$;

-- The fields of `positions.WaitingJob`. `p_slots`: the slots of all workers of the queue.
CREATE FUNCTION fairlane.read_waiting_job(
    l fairlane.active_job, p_slots bigint, p_exact integer, p_lanes integer, p_counted integer, p_many integer,
    p_lease double precision
)
RETURNS json LANGUAGE plpgsql STABLE AS $$
DECLARE
    c_far CONSTANT bigint := 4611686018427387904;
    j record;
    v_key text;
    v_ordered boolean := false;
    v_place integer;
    v_of integer := 0;
    v_own integer := 0;
    v_exact boolean := true;
    v_likely bigint;
    v_likely_own bigint;
    v_workers json;
    v_competing json;
    v_before bigint := 0;
    v_retry double precision;
    v_awaited text;
    v_declined boolean := EXISTS (SELECT 1 FROM fairlane.declined d WHERE d.seq = l.seq AND d.fence = l.fence);
BEGIN
    SELECT x.id, x.lane, x.task INTO j FROM fairlane.job x WHERE x.seq = l.seq;
    v_key := coalesce(j.lane, '');
    IF l.lane IS NOT NULL THEN
        SELECT n.ordered INTO v_ordered FROM fairlane.lane n WHERE n.id = l.lane;
    END IF;
    -- In an ordered lane a retrying job keeps its place; other scheduled jobs have none yet.
    IF l.arrival IS NOT NULL AND (l.state <> STATE.SCHEDULED OR l.lane IS NOT NULL) THEN
        v_own := fairlane.read_line_count(l, v_key, v_ordered, CASE WHEN v_ordered OR l.class = CLASS.HIGH
            THEN ARRAY[l.arrival, CASE WHEN v_ordered THEN l.arrival END, CASE WHEN v_ordered THEN l.arrival END]
            WHEN l.class = CLASS.NORMAL THEN ARRAY[c_far, l.arrival, NULL]
            ELSE ARRAY[c_far, c_far, l.arrival] END, p_exact + 1);
        v_place := v_own + 1;
        v_exact := v_own <= p_exact;
        IF v_exact THEN
            v_of := fairlane.read_line_count(l, v_key, v_ordered, ARRAY[c_far, c_far, c_far], p_exact + 1);
        ELSE
            v_of := v_place;
        END IF;
        IF NOT v_exact THEN
            SELECT x.before, x.own INTO v_likely, v_likely_own FROM fairlane.read_likely(l, v_key, v_ordered) x;
            v_own := coalesce(v_likely_own, v_own);
        ELSIF NOT v_ordered AND l.class > CLASS.HIGH THEN
            v_own := v_own - fairlane.read_line_count(
                l, v_key, false, ARRAY[c_far, CASE WHEN l.class = CLASS.LOW THEN c_far END, NULL], p_exact + 1);
        END IF;
    END IF;
    IF l.inbox <> '' AND right(l.inbox, 1) <> '/' THEN
        SELECT coalesce(json_agg(json_build_array(s.slots, s.reserved_high, s.reserved_normal, s.running_high,
            s.running_normal, s.running_low)), '[]'), coalesce(sum(s.slots), 0)
        INTO v_workers, p_slots FROM fairlane.sessions s
        WHERE s.pool = split_part(l.inbox, '/', 1) AND s.idx = split_part(l.inbox, '/', 2)::integer AND s.idx IS NOT NULL
        AND s.state IN ('live', 'stopping') AND s.expires > p_lease;
    END IF;
    IF l.lane IS NOT NULL AND NOT l.granted THEN
        SELECT min(r.due) INTO v_retry FROM fairlane.active_job r
        WHERE r.lane = l.lane AND r.lane IS NOT NULL AND r.granted AND r.session IS NULL AND r.due IS NOT NULL;
        IF v_ordered THEN
            -- The task of the first job of the lane, if workers declined it.
            SELECT i.task INTO v_awaited FROM fairlane.active_job r
            CROSS JOIN LATERAL (SELECT 1 FROM fairlane.declined d WHERE d.seq = r.seq AND d.fence = r.fence OFFSET 0) d
            CROSS JOIN LATERAL (SELECT x.task FROM fairlane.job x WHERE x.seq = r.seq OFFSET 0) i
            WHERE r.lane = l.lane AND r.lane IS NOT NULL AND r.granted AND r.session IS NULL ORDER BY r.arrival LIMIT 1;
        END IF;
    ELSIF v_place = 1 AND l.flow IS NOT NULL THEN
        SELECT count(*) INTO v_before FROM (SELECT 1 FROM fairlane.flows m
            CROSS JOIN LATERAL (SELECT a.clock FROM fairlane.domains a WHERE a.id = m.domain LIMIT 1) d
            CROSS JOIN LATERAL (SELECT 1 FROM fairlane.ready_lane a WHERE a.domain = m.domain
                AND a.tag >= d.clock AND (a.tag, a.head) < (m.tag, m.head) LIMIT p_slots) x
            WHERE m.id = l.flow LIMIT p_slots) y;
    END IF;
    IF v_place IS NOT NULL AND l.kind <> KIND.TURN THEN
        v_competing := fairlane.read_competing_lanes(l, v_key, v_own, p_lanes, p_counted, p_many);
    END IF;
    RETURN json_build_object(
        'id', j.id, 'queue', l.queue, 'kind', (ARRAY['job', 'turn', 'broadcast', 'cleanup'])[l.kind + 1],
        'priority', l.class, 'state', l.state, 'gate', l.gate, 'inbox', l.inbox, 'lane', j.lane, 'cost', l.cost,
        'limited', l.lane IS NOT NULL, 'ordered', v_ordered, 'granted', l.granted, 'due', l.due, 'place', v_place,
        'of', v_of, 'own', v_own, 'flows_before', v_before, 'retry_until', v_retry, 'awaited_task', v_awaited, 'workers', v_workers, 'competing', v_competing,
        'exact', v_exact, 'of_exact', v_of <= p_exact, 'likely', v_likely,
        'task', j.task, 'declined', v_declined, 'known', NOT v_declined OR fairlane.read_known(
            j.task, (SELECT q.name FROM fairlane.queue q WHERE q.id = l.queue), l.inbox, p_lease));
END $$;

-- The waiting jobs among the ids, and their queues.
CREATE FUNCTION fairlane.read_positions(
    p_ids text[], p_exact integer, p_lanes integer, p_counted integer, p_many integer,
    p_now double precision DEFAULT NULL, p_lease double precision DEFAULT NULL
)
RETURNS json LANGUAGE plpgsql STABLE
SET extra_float_digits = 1
AS $$
DECLARE
    v_clock double precision := extract(epoch FROM clock_timestamp());
    v_lease double precision := coalesce(p_lease, p_now, v_clock);
    l fairlane.active_job;
    v_queue integer;
    v_slots bigint;
    v_queues json[] := '{}';
    v_jobs json[] := '{}';
BEGIN
    FOR l IN
        SELECT x.* FROM unnest(p_ids) w (id) JOIN fairlane.job j ON j.id = w.id JOIN fairlane.active_job x ON x.seq = j.seq
        WHERE x.state <> STATE.RUNNING ORDER BY x.queue
    LOOP
        IF l.queue IS DISTINCT FROM v_queue THEN
            v_queue := l.queue;
            v_queues := v_queues || fairlane.read_queue_snapshot(v_queue, v_lease);
            SELECT coalesce(sum(w[1]), 0) INTO v_slots
            FROM fairlane.queue q, fairlane.read_workers(q.name, v_lease) w WHERE q.id = v_queue;
        END IF;
        v_jobs := v_jobs || fairlane.read_waiting_job(l, v_slots, p_exact, p_lanes, p_counted, p_many, v_lease);
    END LOOP;
    RETURN json_build_object('now', coalesce(p_now, v_clock), 'queues', v_queues, 'jobs', v_jobs);
END $$;
