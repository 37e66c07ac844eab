-- Removes what retention does not keep: jobs, old records of other kinds, and the flows of empty lanes.

-- Delete finished jobs beyond their age or their number, and old records of other kinds. Queues are locked only to tidy their
-- flows, and not in a pass that deletes as many jobs as it may: such passes follow each other closely. Only one pass runs at a
-- time: a concurrent one does nothing.
CREATE FUNCTION fairlane.prune(p_completed_seconds double precision, p_completed_count bigint, p_failed_seconds double precision,
    p_failed_count bigint, p_history_seconds double precision, p_id_seconds double precision, p_limit integer, p_term bigint,
    p_now double precision DEFAULT NULL, p_lease double precision DEFAULT NULL,
    OUT jobs integer, OUT other integer, OUT more boolean, OUT topics text[])
LANGUAGE plpgsql AS $$
DECLARE
    m fairlane.moment := fairlane.moment_of(p_now, p_lease);
    v_jobs bigint[] := '{}';
    v_sessions bigint[];
    v_bindings bigint[];
    v_ids text[];
    v_uniques bigint[];
    v_declined bigint[];
    v_sets text[];
    v_unknown boolean;
    v_queues integer[] := '{}';
    v_queue integer;
    v_count integer;
BEGIN
    PERFORM fairlane.check_term(p_term, false, m);
    topics := '{}';
    jobs := 0;
    other := 0;
    more := false;
    -- No pool has this number.
    IF NOT pg_try_advisory_xact_lock(fairlane.space(), -1073741825) THEN
        RETURN;
    END IF;
    FOR v_queue IN SELECT q.id FROM fairlane.queue q ORDER BY q.id LOOP
        FOR c IN STATE.COMPLETED .. STATE.CANCELLED LOOP
            v_jobs := v_jobs || fairlane.ended_before(v_queue, c::smallint,
                m.now - CASE c WHEN STATE.COMPLETED THEN p_completed_seconds ELSE p_failed_seconds END,
                CASE c WHEN STATE.COMPLETED THEN p_completed_count ELSE p_failed_count END, p_limit - cardinality(v_jobs));
        END LOOP;
    END LOOP;
    -- A session in which a kept job ended is part of that job's history.
    v_sessions := ARRAY(SELECT s.seq FROM fairlane.session s WHERE s.state IN ('ended', 'dead') AND s.ended_at <= m.now - p_history_seconds
        AND NOT EXISTS (SELECT 1 FROM fairlane.outcome o WHERE o.session = s.seq)
        AND NOT EXISTS (SELECT 1 FROM fairlane.active_job x WHERE x.session = s.seq) LIMIT p_limit);
    v_bindings := ARRAY(SELECT b.seq FROM fairlane.binding b WHERE b.closed_at <= m.now - p_history_seconds LIMIT p_limit);
    v_ids := ARRAY(SELECT r.id FROM fairlane.reserved_id r WHERE r.until <= m.now LIMIT p_limit);
    -- Values that are no longer held and whose job is final or pruned. One that an open transaction is taking again is left
    -- alone.
    v_uniques := ARRAY(SELECT u.seq FROM fairlane.held_unique u WHERE u.until <= m.now
        AND NOT EXISTS (SELECT 1 FROM fairlane.active_job x WHERE x.seq = u.seq) LIMIT p_limit FOR UPDATE SKIP LOCKED);
    v_declined := ARRAY(SELECT d.seq FROM fairlane.declined d
        WHERE NOT EXISTS (SELECT 1 FROM fairlane.active_job x WHERE x.seq = d.seq) LIMIT p_limit);
    v_sets := ARRAY(SELECT t.id FROM fairlane.task_set t WHERE t.used_at <= m.now - p_history_seconds
        AND NOT EXISTS (SELECT 1 FROM fairlane.session s WHERE s.task_set = t.id AND s.state IN ('live', 'stopping')) LIMIT p_limit);
    v_unknown := EXISTS (SELECT 1 FROM fairlane.unknown_task u WHERE fairlane.is_unused(u, m));
    IF cardinality(v_jobs) < p_limit THEN
        v_queues := fairlane.untidy();
    END IF;
    more := cardinality(v_jobs) >= p_limit;
    IF cardinality(v_jobs || v_sessions || v_bindings || v_uniques || v_declined) + cardinality(v_ids || v_sets) + cardinality(v_queues)
        = 0 AND NOT v_unknown THEN
        RETURN;
    END IF;
    IF cardinality(v_queues) > 0 THEN
        PERFORM fairlane.lock_some('{}', v_queues);
    END IF;
    PERFORM fairlane.check_term(p_term, true, fairlane.moment_of(p_now, p_lease));
    IF cardinality(v_queues) > 0 THEN
        other := fairlane.tidy(v_queues, 10000);
    END IF;
    jobs := cardinality(fairlane.forget_ended(v_jobs, p_id_seconds, greatest(p_id_seconds, p_failed_seconds), m));
    DELETE FROM fairlane.session_load WHERE session = ANY (v_sessions);
    DELETE FROM fairlane.session WHERE seq = ANY (v_sessions);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    other := other + v_count;
    DELETE FROM fairlane.binding WHERE seq = ANY (v_bindings);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    other := other + v_count;
    DELETE FROM fairlane.reserved_id r WHERE r.id = ANY (v_ids) AND r.until <= m.now;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    other := other + v_count;
    DELETE FROM fairlane.held_unique u WHERE u.seq = ANY (v_uniques) AND u.until <= m.now;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    other := other + v_count;
    DELETE FROM fairlane.declined d WHERE d.seq = ANY (v_declined);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    other := other + v_count;
    DELETE FROM fairlane.unknown_task u WHERE (u.queue, u.task) IN (
        SELECT k.queue, k.task FROM fairlane.unknown_task k WHERE fairlane.is_unused(k, m) FOR UPDATE SKIP LOCKED);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    other := other + v_count;
    -- Checked again: a session that is registering may have started to use it.
    DELETE FROM fairlane.task_set t WHERE t.id = ANY (v_sets) AND t.used_at <= m.now - p_history_seconds;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    other := other + v_count;
END $$;

-- Delete final jobs and reserve their ids, those of retries for a time of their own. Returns the numbers of the deleted jobs.
-- Jobs that another call is writing about are left to the next pass: nothing is waited for, so there can be no deadlock.
CREATE FUNCTION fairlane.forget_ended(p_seqs bigint[], p_id_seconds double precision, p_retry_id_seconds double precision,
    m fairlane.moment) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    v_jobs bigint[] := ARRAY(SELECT o.seq FROM fairlane.outcome o WHERE o.seq = ANY (p_seqs) FOR UPDATE SKIP LOCKED);
BEGIN
    IF cardinality(v_jobs) = 0 THEN
        RETURN v_jobs;
    END IF;
    INSERT INTO fairlane.reserved_id (id, fingerprint, state, until)
    SELECT j.id, j.print, o.state, o.finished_at + j.seconds FROM fairlane.outcome o
    CROSS JOIN LATERAL (SELECT x.id, fairlane.fingerprint(x) AS print,
        CASE WHEN x.retry_of IS NULL THEN p_id_seconds ELSE p_retry_id_seconds END AS seconds
        FROM fairlane.job x WHERE x.seq = o.seq OFFSET 0) j
    WHERE o.seq = ANY (v_jobs) AND o.finished_at > m.now - j.seconds
    ON CONFLICT (id) DO UPDATE SET fingerprint = excluded.fingerprint, state = excluded.state, until = excluded.until;
    DELETE FROM fairlane.outcome WHERE seq = ANY (v_jobs);
    DELETE FROM fairlane.attempt WHERE seq = ANY (v_jobs);
    DELETE FROM fairlane.progress WHERE seq = ANY (v_jobs);
    PERFORM fairlane.forget(v_jobs);
    RETURN v_jobs;
END $$;

-- Delete the final jobs among these; `gone`: their ids.
CREATE FUNCTION fairlane.forget_final(p_ids text[], p_id_seconds double precision, p_retry_id_seconds double precision,
    p_now double precision DEFAULT NULL, p_lease double precision DEFAULT NULL, OUT gone text[])
LANGUAGE plpgsql AS $$
DECLARE
    v_seqs bigint[];
    v_ids text[];
    v_gone bigint[];
BEGIN
    SELECT coalesce(array_agg(j.seq), '{}'), coalesce(array_agg(j.id), '{}') INTO v_seqs, v_ids
    FROM unnest(p_ids) w (id) JOIN fairlane.job j ON j.id = w.id;
    v_gone := fairlane.forget_ended(v_seqs, p_id_seconds, p_retry_id_seconds, fairlane.moment_of(p_now, p_lease));
    gone := ARRAY(SELECT x.id FROM unnest(v_seqs, v_ids) x (seq, id) WHERE x.seq = ANY (v_gone));
END $$;

-- Jobs of a queue and state that ended before a given time, or before the newest `p_count`; oldest first. The time of the cut
-- is found by an index-only scan; of jobs that ended at exactly that time, those with the highest numbers are kept.
CREATE FUNCTION fairlane.ended_before(p_queue integer, p_state smallint, p_moment double precision, p_count bigint, p_limit integer)
RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    v_cut double precision;
    v_seq bigint := 9223372036854775807;
BEGIN
    IF p_limit <= 0 THEN
        RETURN '{}';
    END IF;
    SELECT o.finished_at INTO v_cut FROM fairlane.outcome o WHERE o.queue = p_queue AND o.state = p_state
    ORDER BY o.finished_at DESC OFFSET p_count LIMIT 1;
    IF v_cut > p_moment THEN
        SELECT o.seq INTO v_seq FROM fairlane.outcome o WHERE o.queue = p_queue AND o.state = p_state AND o.finished_at = v_cut
        -- Jobs that have ended since the cut was read may be newer than it, in any number: then none of its time is kept.
        ORDER BY o.seq DESC LIMIT 1 OFFSET greatest(0, p_count - (SELECT count(*) FROM fairlane.outcome k
            WHERE k.queue = p_queue AND k.state = p_state AND k.finished_at > v_cut));
    ELSE
        v_cut := p_moment;
    END IF;
    RETURN ARRAY(SELECT o.seq FROM fairlane.outcome o WHERE o.queue = p_queue AND o.state = p_state AND o.finished_at <= v_cut
        AND (o.finished_at < v_cut OR o.seq <= v_seq) ORDER BY o.finished_at LIMIT p_limit);
END $$;

-- Domains of classes without any job, whose clock can move past all of their flows, because there is no order to keep. Jobs
-- that wait for a place of their lane have an order too. Flows of empty lanes that are not ahead of the clock are deleted.
CREATE FUNCTION fairlane.idle_domains(p_queues integer[], OUT id bigint, OUT queue integer, OUT finish bigint) RETURNS SETOF record
LANGUAGE sql STABLE AS $$
    SELECT d.id, d.queue, max(f.finish)
    FROM (SELECT t.queue, t.class FROM fairlane.queue_count t GROUP BY t.queue, t.class HAVING sum(t.pending + t.running) = 0) i
    JOIN fairlane.domains d ON d.queue = i.queue AND d.class = i.class JOIN fairlane.flows f ON f.domain = d.id
    WHERE p_queues IS NULL OR d.queue = ANY (p_queues) GROUP BY d.id, d.queue, d.clock HAVING max(f.finish) > d.clock
$$;

-- Queues with flows or clocks to tidy.
CREATE FUNCTION fairlane.untidy() RETURNS integer[] LANGUAGE sql STABLE AS $$
    SELECT ARRAY(SELECT x.queue FROM fairlane.idle_domains(NULL) x
        UNION SELECT d.queue FROM fairlane.domains d WHERE EXISTS (
            SELECT 1 FROM fairlane.flows f WHERE f.domain = d.id AND f.tag IS NULL AND f.finish <= d.clock))
$$;

CREATE FUNCTION fairlane.tidy(p_queues integer[], p_limit integer) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_flows bigint[];
BEGIN
    PERFORM fairlane.set_clock(x.id, x.finish) FROM fairlane.idle_domains(p_queues) x;
    v_flows := ARRAY(SELECT f.id FROM fairlane.domains d JOIN fairlane.flows f ON f.domain = d.id
        WHERE d.queue = ANY (p_queues) AND f.tag IS NULL AND f.finish <= d.clock LIMIT p_limit);
    DELETE FROM fairlane.lane_pace u WHERE u.ctid = ANY (fairlane.paces_at(v_flows));
    DELETE FROM fairlane.flow u WHERE u.id = ANY (v_flows);
    RETURN cardinality(v_flows);
END $$;
