-- Jobs as readers see them, and pages of them. Nothing here writes or waits: each function is STABLE, so everything it reads is
-- in one snapshot, that of the calling statement.

-- Jobs by id or by number. The columns are those of `rows.job_of`.
CREATE FUNCTION fairlane.read_jobs(p_ids text[], p_seqs bigint[])
RETURNS TABLE (
    seq bigint, id text, task text, queue text, kind text, class smallint, lane text, cost double precision, payload bytea,
    headers bytea, retries integer, backoff bytea, timeout double precision, uniq text, pool text, sticky text,
    direct integer, retry_of text, parent text, enqueued_at double precision, expires_at double precision, progress bytea,
    attempts json, final smallint, reason text, result bytea, error text, error_group text, move smallint,
    finished_at double precision, live smallint, inbox text, due double precision, cancel boolean, suspect boolean,
    arrival bigint, attempt integer, fence integer, started_at double precision, refused integer,
    session text, session_pool text, session_index integer, session_host text, delay double precision,
    run_at double precision
)
LANGUAGE plpgsql STABLE
SET extra_float_digits = 1
AS $$
#variable_conflict use_column
DECLARE
    v_seqs bigint[] := p_seqs;
BEGIN
    IF v_seqs IS NULL THEN
        v_seqs := ARRAY(SELECT j.seq FROM unnest(p_ids) w (id) JOIN fairlane.job j ON j.id = w.id);
    END IF;
    RETURN QUERY
    SELECT j.seq, j.id, j.task, q.name,
        CASE j.kind WHEN KIND.JOB THEN 'job' WHEN KIND.TURN THEN 'turn' WHEN KIND.BROADCAST THEN 'broadcast' ELSE 'cleanup' END,
        j.class, j.lane, j.cost, j.payload, j.headers, j.retries, j.backoff, j.timeout, j.uniq, j.pool, j.sticky,
        j.direct, j.retry_of, p.id, j.enqueued_at, j.enqueued_at + j.expires, g.value,
        -- Only as many as are shown to a reader.
        (SELECT json_agg(a ORDER BY a.fence) FROM (
            SELECT x.fence, x.attempt, x.session, x.worker, x.started_at, x.ended_at, x.outcome, x.state, x.reason, x.error,
                x.refused
            FROM fairlane.attempt x WHERE x.seq = j.seq ORDER BY x.fence DESC LIMIT 20) a),
        o.state, o.reason, o.result, o.error, o.error_group, o.move, o.finished_at,
        l.state, l.inbox, l.due, l.cancel, l.suspect,
        coalesce(l.arrival, o.arrival), coalesce(l.attempt, o.attempt), coalesce(l.fence, o.fence),
        coalesce(l.started_at, o.started_at), coalesce(l.refused, o.refused), s.id, s.pool, s.idx, s.host,
        j.delay, j.run_at
    FROM unnest(v_seqs) WITH ORDINALITY w (seq, n) JOIN fairlane.job j ON j.seq = w.seq
    LEFT JOIN fairlane.queue q ON q.id = j.queue
    LEFT JOIN fairlane.active_job l ON l.seq = j.seq
    LEFT JOIN fairlane.outcome o ON o.seq = j.seq
    LEFT JOIN fairlane.progress g ON g.seq = j.seq
    LEFT JOIN fairlane.session s ON s.seq = coalesce(l.session, o.session)
    LEFT JOIN fairlane.job p ON p.seq = j.parent
    ORDER BY w.n;
END $$;

-- The next job numbers below `p_before`, newest first, by the index of the most selective filter. The ORDER BY begins with the
-- filter's own column, which leaves the planner no other index: ordered by number alone, it may prefer to scan the whole table,
-- because it cannot know that the requested jobs are all old.
CREATE FUNCTION fairlane.read_window(
    p_state text, p_queue integer, p_lane text, p_task text, p_sticky text, p_worker text, p_error text,
    p_before bigint, p_size integer
)
RETURNS bigint[] LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_pool text;
    v_index integer;
BEGIN
    IF p_error IS NOT NULL THEN
        RETURN ARRAY(SELECT o.seq FROM fairlane.outcome o
            WHERE o.error_group IS NOT NULL AND (o.error_group, o.seq) < (p_error, p_before) AND o.error_group >= p_error
            ORDER BY o.error_group DESC, o.seq DESC LIMIT p_size);
    ELSIF p_worker IS NOT NULL THEN
        -- Jobs that wait for this worker, run there now or ended there, over all sessions that had this index.
        IF p_worker !~ '^.+/[0-9]{1,9}$' THEN
            RETURN '{}';
        END IF;
        v_pool := substring(p_worker FROM '^(.+)/[0-9]+$');
        v_index := substring(p_worker FROM '[0-9]+$')::integer;
        RETURN ARRAY(SELECT x.seq FROM (
            (SELECT a.seq FROM fairlane.job_extra a
                CROSS JOIN LATERAL (SELECT y.state FROM fairlane.active_job y WHERE y.seq = a.seq OFFSET 0) l
                WHERE a.inbox <> '' AND (a.inbox, a.seq) < (p_worker, p_before) AND a.inbox >= p_worker AND l.state < STATE.RUNNING
                ORDER BY a.inbox DESC, a.seq DESC LIMIT p_size)
            UNION ALL
            SELECT r.seq FROM fairlane.session s CROSS JOIN LATERAL (SELECT l.seq FROM fairlane.active_job l
                WHERE l.session IS NOT NULL AND (l.session, l.seq) < (s.seq, p_before) AND l.session >= s.seq
                ORDER BY l.session DESC, l.seq DESC LIMIT p_size) r
            WHERE s.pool = v_pool AND s.idx = v_index AND s.idx IS NOT NULL
            UNION ALL
            SELECT e.seq FROM fairlane.session s CROSS JOIN LATERAL (SELECT o.seq FROM fairlane.outcome o
                WHERE o.session IS NOT NULL AND (o.session, o.seq) < (s.seq, p_before) AND o.session >= s.seq
                ORDER BY o.session DESC, o.seq DESC LIMIT p_size) e
            WHERE s.pool = v_pool AND s.idx = v_index AND s.idx IS NOT NULL
        ) x ORDER BY x.seq DESC LIMIT p_size);
    ELSIF p_sticky IS NOT NULL THEN
        -- Not by equality: the planner would use the index on `seq` instead.
        RETURN ARRAY(SELECT r.seq FROM fairlane.job_link r
            WHERE (r.kind, r.key, r.seq) < ('s', p_sticky, p_before) AND (r.kind, r.key) >= ('s', p_sticky)
            ORDER BY r.kind DESC, r.key DESC, r.seq DESC LIMIT p_size);
    ELSIF p_lane IS NOT NULL THEN
        RETURN ARRAY(SELECT j.seq FROM fairlane.job j
            WHERE j.lane IS NOT NULL AND (j.queue, j.lane, j.seq) < (p_queue, p_lane, p_before)
            AND (j.queue, j.lane) >= (p_queue, p_lane)
            ORDER BY j.queue DESC, j.lane DESC, j.seq DESC LIMIT p_size);
    ELSIF p_state = 'pending' THEN
        -- Nearly all active jobs are pending, so they are found by scanning the table.
        RETURN ARRAY(SELECT l.seq FROM fairlane.active_job l WHERE l.seq < p_before AND l.state IN (STATE.ARRIVING, STATE.PENDING)
            ORDER BY l.seq DESC LIMIT p_size);
    ELSIF p_state = 'scheduled' THEN
        -- By `-seq`, which no other index has in order: with old statistics, all rows may seem to be scheduled, and the primary
        -- key as good as this index.
        RETURN ARRAY(SELECT a.seq FROM fairlane.job_extra a WHERE -a.seq > -p_before AND a.scheduled
            ORDER BY -a.seq LIMIT p_size);
    ELSIF p_state = 'running' THEN
        -- At most as many jobs run as there are slots, so sorting them is cheap.
        RETURN ARRAY(WITH r AS MATERIALIZED (
            SELECT l.seq FROM fairlane.active_job l WHERE l.session IS NOT NULL
            UNION ALL SELECT a.seq FROM fairlane.job_extra a WHERE a.gate = GATE.PARENT
        ) SELECT r.seq FROM r WHERE r.seq < p_before ORDER BY r.seq DESC LIMIT p_size);
    ELSIF p_task IS NOT NULL THEN
        -- One list per queue, or only for the given one.
        RETURN ARRAY(SELECT x.seq FROM fairlane.queue q CROSS JOIN LATERAL (SELECT j.seq FROM fairlane.job j
                WHERE (j.queue, j.task, j.seq) < (q.id, p_task, p_before) AND (j.queue, j.task) >= (q.id, p_task)
                ORDER BY j.queue DESC, j.task DESC, j.seq DESC LIMIT p_size) x
            WHERE p_queue IS NULL OR q.id = p_queue ORDER BY x.seq DESC LIMIT p_size);
    ELSIF p_queue IS NOT NULL THEN
        -- One list per task of the queue.
        RETURN ARRAY(WITH RECURSIVE known (task) AS (
            (SELECT j.task FROM fairlane.job j WHERE j.queue = p_queue ORDER BY j.task LIMIT 1)
            UNION ALL
            SELECT (SELECT j.task FROM fairlane.job j WHERE j.queue = p_queue AND j.task > k.task ORDER BY j.task LIMIT 1)
            FROM known k WHERE k.task IS NOT NULL
        ) SELECT x.seq FROM known k CROSS JOIN LATERAL (SELECT j.seq FROM fairlane.job j
                WHERE (j.queue, j.task, j.seq) < (p_queue, k.task, p_before) AND (j.queue, j.task) >= (p_queue, k.task)
                ORDER BY j.queue DESC, j.task DESC, j.seq DESC LIMIT p_size) x
            WHERE k.task IS NOT NULL ORDER BY x.seq DESC LIMIT p_size);
    ELSIF p_state = 'completed' THEN
        -- Nearly all finished jobs are completed.
        RETURN ARRAY(SELECT o.seq FROM fairlane.outcome o WHERE o.seq < p_before AND o.state = STATE.COMPLETED
            ORDER BY o.seq DESC LIMIT p_size);
    ELSIF p_state = 'failed' THEN
        RETURN ARRAY(SELECT o.seq FROM fairlane.outcome o WHERE o.state > STATE.COMPLETED AND (o.state, o.seq) < (STATE.FAILED::smallint, p_before)
            ORDER BY o.state DESC, o.seq DESC LIMIT p_size);
    ELSIF p_state = 'cancelled' THEN
        RETURN ARRAY(SELECT o.seq FROM fairlane.outcome o
            WHERE o.state > STATE.COMPLETED AND (o.state, o.seq) < (STATE.CANCELLED::smallint, p_before) AND o.state >= STATE.CANCELLED::smallint
            ORDER BY o.state DESC, o.seq DESC LIMIT p_size);
    END IF;
    RETURN ARRAY(SELECT j.seq FROM fairlane.job j WHERE j.seq < p_before ORDER BY j.seq DESC LIMIT p_size);
END $$;

-- The numbers of the next jobs that pass all given filters, newest first.
CREATE FUNCTION fairlane.read_page(
    p_state text, p_queue text, p_lane text, p_task text, p_sticky text, p_worker text, p_error text,
    p_before bigint, p_count integer
)
RETURNS bigint[] LANGUAGE plpgsql STABLE
SET enable_sort = off SET enable_incremental_sort = off
AS $$
DECLARE
    v_states smallint[] := CASE p_state WHEN 'pending' THEN '{STATE.ARRIVING,STATE.PENDING}' WHEN 'scheduled' THEN '{STATE.SCHEDULED}' WHEN 'running' THEN '{STATE.RUNNING}'
        WHEN 'completed' THEN '{STATE.COMPLETED}' WHEN 'failed' THEN '{STATE.FAILED}' WHEN 'cancelled' THEN '{STATE.CANCELLED}' END;
    v_queue integer;
    v_alone boolean := num_nonnulls(p_state, p_queue, p_task, p_sticky, p_worker, p_error) <= 1;
    v_size integer := p_count;
    v_window bigint[];
    v_found bigint[] := '{}';
BEGIN
    IF p_queue IS NOT NULL THEN
        SELECT q.id INTO v_queue FROM fairlane.queue q WHERE q.name = p_queue;
        IF NOT FOUND THEN
            RETURN '{}';
        END IF;
    END IF;
    LOOP
        v_window := fairlane.read_window(
            p_state, v_queue, p_lane, p_task, p_sticky, p_worker, p_error, p_before, v_size);
        IF v_alone THEN
            RETURN v_window;
        END IF;
        v_found := v_found || ARRAY(
            SELECT j.seq FROM unnest(v_window) WITH ORDINALITY w (seq, n) JOIN fairlane.job j ON j.seq = w.seq
            LEFT JOIN fairlane.active_job l ON l.seq = j.seq
            LEFT JOIN fairlane.outcome o ON o.seq = j.seq
            LEFT JOIN fairlane.session s ON s.seq = coalesce(l.session, o.session)
            WHERE (p_state IS NULL OR coalesce(o.state, l.state) = ANY (v_states))
            AND (v_queue IS NULL OR j.queue = v_queue)
            AND (p_lane IS NULL OR j.lane = p_lane)
            AND (p_task IS NULL OR j.task = p_task)
            AND (p_sticky IS NULL OR j.sticky = p_sticky)
            AND (p_error IS NULL OR o.error_group = p_error)
            AND (p_worker IS NULL OR p_worker = CASE
                WHEN s.seq IS NOT NULL OR o.move IS NOT NULL THEN coalesce(s.pool || '/' || s.idx, s.host)
                WHEN l.inbox <> '' AND right(l.inbox, 1) <> '/' THEN l.inbox
                WHEN j.direct IS NOT NULL THEN j.pool || '/' || j.direct
                ELSE (SELECT a.worker FROM fairlane.attempt a WHERE a.seq = j.seq ORDER BY a.fence DESC LIMIT 1) END)
            ORDER BY w.n);
        IF cardinality(v_found) >= p_count OR cardinality(v_window) < v_size THEN
            RETURN v_found[1:p_count];
        END IF;
        p_before := v_window[v_size];
        -- Growing windows find rare jobs in few steps.
        v_size := least(2 * v_size, 5000);
    END LOOP;
END $$;

-- Jobs by id. The payload is returned only to roles that may read the table: every role that may connect can listen for ids, so
-- ids are not secret. Other roles get an empty payload, which no job can have.
DO $$
DECLARE
    v_all oid := 'fairlane.read_jobs(text[], bigint[])'::regprocedure;
    v_columns text;
BEGIN
    SELECT string_agg(CASE c.name WHEN 'payload' THEN quote_literal('') || '::bytea' WHEN 'headers' THEN 'NULL::bytea'
        ELSE format('r.%I', c.name) END, ', ' ORDER BY c.ord) INTO v_columns
    FROM pg_proc p, unnest(p.proargnames, p.proargmodes) WITH ORDINALITY c (name, mode, ord)
    WHERE p.oid = v_all AND c.mode = 't';
    EXECUTE format(
        'CREATE FUNCTION fairlane.read_jobs(p_ids text[]) RETURNS %s LANGUAGE plpgsql STABLE AS $body$
        BEGIN
            IF has_column_privilege(session_user, %L::regclass, %L, %L) THEN
                RETURN QUERY SELECT * FROM fairlane.read_jobs(p_ids, NULL);
            ELSE
                RETURN QUERY SELECT %s FROM fairlane.read_jobs(p_ids, NULL) r;
            END IF;
        END $body$', pg_get_function_result(v_all), 'fairlane.job', 'payload', 'SELECT', v_columns);
END $$;
