-- Broadcasts: one child for each worker of a pool, and a parent (GATE.PARENT) that runs until all of them are final. A child is
-- a job for one index; its id is that of its parent with the index appended, so a restarted worker finds the same child.
-- Workers that register before the parent's joining time (`due`) is over get one too.
--
-- Also cancelling, which a broadcast passes on to its children.

-- Start a parent whose row is stored as running: create children for the present workers. The caller holds the locks of its
-- pool and its queue.
CREATE FUNCTION fairlane.begin_broadcast(p_parent bigint, p_ttl double precision, m fairlane.moment) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    p fairlane.active_job;
    v_id text;
    v_pool text;
    v_index integer;
BEGIN
    SELECT * INTO p FROM fairlane.active_job x WHERE x.seq = p_parent;
    SELECT j.id, j.pool INTO v_id, v_pool FROM fairlane.job j WHERE j.seq = p_parent;
    FOR v_index IN SELECT s.idx FROM fairlane.session s
        WHERE s.pool = v_pool AND s.idx IS NOT NULL AND s.state = 'live' AND s.expires > m.lease ORDER BY s.idx
    LOOP
        IF fairlane.child_exists(v_id || '/' || v_index) THEN
            PERFORM fairlane.refuse('FL002', format('job %L exists already, and a copy of this broadcast needs that id',
                v_id || '/' || v_index));
        END IF;
        PERFORM fairlane.add_child(p, v_index, m);
    END LOOP;
    IF NOT p_ttl > 0 THEN
        PERFORM fairlane.finish_if_over(p, m);
    END IF;
END $$;

-- As long as an id is reserved, its child is not created again.
CREATE FUNCTION fairlane.child_exists(p_id text) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT 1 FROM fairlane.job j WHERE j.id = p_id) OR EXISTS (SELECT 1 FROM fairlane.reserved_id r WHERE r.id = p_id)
$$;

-- One child of a broadcast, for one worker. It belongs to work that was already accepted, so no limit rejects it.
CREATE FUNCTION fairlane.add_child(p fairlane.active_job, p_index integer, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    c fairlane.job;
    l fairlane.active_job;
    v_timeout text := current_setting('lock_timeout');
BEGIN
    -- This id is locked out of order. The wait for an open transaction with the same id is too short to be part of a deadlock.
    PERFORM set_config('lock_timeout', '100ms', true);
    INSERT INTO fairlane.job (id, parent, direct, kind, expires, enqueued_at, task, queue, class, cost, payload, headers, retries,
        backoff, timeout, pool)
    SELECT j.id || '/' || p_index, j.seq, p_index, KIND.JOB, CASE WHEN p.expires_at IS NOT NULL THEN greatest(0, p.expires_at - m.now) END,
        m.now, j.task, j.queue, j.class, j.cost, j.payload, j.headers, j.retries, j.backoff, j.timeout, j.pool
    FROM fairlane.job j WHERE j.seq = p.seq RETURNING * INTO c;
    PERFORM set_config('lock_timeout', v_timeout, true);
    PERFORM fairlane.link_job(c);
    l := fairlane.new_active_job(c, m);
    PERFORM fairlane.count_move(l.queue, l.class, NULL, l.state);
    l := fairlane.admit_job(l, m);
    PERFORM fairlane.put(l);
END $$;

-- A worker has registered: create its children for broadcasts it may still join, unless it has them from before.
CREATE FUNCTION fairlane.join_broadcasts(p_pool text, p_index integer, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    p fairlane.active_job;
BEGIN
    FOR p IN SELECT x.* FROM fairlane.job_extra a JOIN fairlane.active_job x ON x.seq = a.seq JOIN fairlane.job j ON j.seq = a.seq
        WHERE a.gate = GATE.PARENT AND x.due > m.now AND NOT x.cancel AND j.pool = p_pool
        AND NOT fairlane.child_exists(j.id || '/' || p_index) ORDER BY x.seq
    LOOP
        PERFORM fairlane.add_child(p, p_index, m);
    END LOOP;
END $$;

-- A child is final: its parent may be over. The parent's row is locked, so that of the last two children one sees that the
-- other is gone.
CREATE FUNCTION fairlane.child_ended(p_parent bigint, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    p fairlane.active_job;
BEGIN
    SELECT * INTO p FROM fairlane.active_job x WHERE x.seq = p_parent FOR UPDATE;
    IF FOUND THEN
        PERFORM fairlane.notify('job:' || j.id) FROM fairlane.job j WHERE j.seq = p_parent;
        PERFORM fairlane.finish_if_over(p, m);
    END IF;
END $$;

-- End a parent whose children are all final, once no worker can join any more. Its result lists how each of them ended.
CREATE FUNCTION fairlane.finish_if_over(p fairlane.active_job, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_report text;
BEGIN
    IF p.due > m.now AND NOT p.cancel THEN
        RETURN;
    END IF;
    IF EXISTS (SELECT 1 FROM fairlane.children_of(p.seq) c JOIN fairlane.active_job x ON x.seq = c) THEN
        RETURN;
    END IF;
    IF p.cancel THEN
        PERFORM fairlane.end_job(p, STATE.CANCELLED::smallint, 'by_user', NULL, NULL, NULL, NULL, m);
        RETURN;
    END IF;
    SELECT string_agg(format('"%s/%s":"%s"', j.pool, j.direct, (ARRAY['completed', 'failed', 'cancelled'])[o.state - STATE.RUNNING]), ','
        ORDER BY j.direct) INTO v_report
    FROM fairlane.children_of(p.seq) c JOIN fairlane.job j ON j.seq = c JOIN fairlane.outcome o ON o.seq = c;
    PERFORM fairlane.end_job(p, STATE.COMPLETED::smallint, NULL, convert_to(concat('{', v_report, '}'), 'UTF8'), NULL, NULL, NULL, m);
END $$;

-- The joining time is over: end parents whose children are all final.
CREATE FUNCTION fairlane.close_joining(p_seqs bigint[], m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    p fairlane.active_job;
    v_seq bigint;
BEGIN
    FOREACH v_seq IN ARRAY p_seqs LOOP
        UPDATE fairlane.active_job SET due = NULL WHERE seq = v_seq AND gate = GATE.PARENT AND due <= m.now RETURNING * INTO p;
        IF FOUND THEN
            PERFORM fairlane.save_extra(p);
            PERFORM fairlane.finish_if_over(p, m);
        END IF;
    END LOOP;
END $$;

-- Children that wait for a worker that is gone and cannot come back within its lease, of broadcasts that no worker can join any
-- more.
CREATE FUNCTION fairlane.children_unserved(p_limit integer, m fairlane.moment) RETURNS bigint[] LANGUAGE sql STABLE AS $$
    SELECT ARRAY(SELECT l.seq FROM fairlane.job_extra p CROSS JOIN LATERAL fairlane.children_of(p.seq) c JOIN fairlane.job j ON j.seq = c
        JOIN fairlane.active_job l ON l.seq = c WHERE p.gate = GATE.PARENT AND p.due IS NULL AND l.state < STATE.RUNNING AND NOT fairlane.served(j.pool, j.direct, m) LIMIT p_limit)
$$;

-- Cancel children that no worker serves.
CREATE FUNCTION fairlane.abandon(p_seqs bigint[], m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    l fairlane.active_job;
    v_seq bigint;
BEGIN
    FOREACH v_seq IN ARRAY p_seqs LOOP
        SELECT * INTO l FROM fairlane.active_job x WHERE x.seq = v_seq AND x.state < STATE.RUNNING;
        IF FOUND THEN
            PERFORM fairlane.end_job(l, STATE.CANCELLED::smallint, 'worker_lost', NULL, NULL, NULL, NULL, m);
        END IF;
    END LOOP;
END $$;

-- Cancel a live job: at once while it waits, by request while it runs. Returns the state it is in now.
CREATE FUNCTION fairlane.cancel_job(p_seq bigint, m fairlane.moment) RETURNS smallint LANGUAGE plpgsql AS $$
DECLARE
    l fairlane.active_job;
    v_child bigint;
    v_children bigint[];
BEGIN
    SELECT * INTO l FROM fairlane.active_job x WHERE x.seq = p_seq;
    IF l.state = STATE.ARRIVING THEN
        PERFORM fairlane.admit_one(l, m);
        SELECT * INTO l FROM fairlane.active_job x WHERE x.seq = p_seq;
    END IF;
    IF l.state <> STATE.RUNNING THEN
        PERFORM fairlane.end_job(l, STATE.CANCELLED::smallint, 'by_user', NULL, NULL, NULL, NULL, m);
        RETURN STATE.CANCELLED;
    END IF;
    IF l.kind = KIND.BROADCAST THEN
        UPDATE fairlane.active_job SET cancel = true WHERE seq = p_seq AND NOT cancel;
        l.cancel := true;
        v_children := ARRAY(SELECT x.seq FROM fairlane.children_of(p_seq) c JOIN fairlane.active_job x ON x.seq = c ORDER BY x.seq DESC);
        -- In descending order: `finish_if_over` searches for remaining children in ascending order.
        FOREACH v_child IN ARRAY v_children LOOP
            PERFORM fairlane.cancel_job(v_child, m);
        END LOOP;
        IF cardinality(v_children) = 0 THEN
            PERFORM fairlane.finish_if_over(l, m);
        END IF;
        RETURN CASE WHEN EXISTS (SELECT 1 FROM fairlane.active_job x WHERE x.seq = p_seq) THEN STATE.RUNNING ELSE STATE.CANCELLED END;
    END IF;
    IF NOT l.cancel THEN
        UPDATE fairlane.active_job SET cancel = true WHERE seq = p_seq;
        PERFORM fairlane.notify('session:' || s.id) FROM fairlane.session s WHERE s.seq = l.session;
        PERFORM fairlane.notify('job:' || j.id) FROM fairlane.job j WHERE j.seq = p_seq;
    END IF;
    RETURN STATE.RUNNING;
END $$;

-- Lock jobs that may be running, with the children of broadcasts and everything that ending them may touch. A running job can
-- end without the lock of its queue, so its row is locked too, and rows of running jobs come before queues. A job that starts
-- in between is locked only if its row is free: if it is already ending, all locks are released and taken again in order.
CREATE FUNCTION fairlane.lock_jobs(p_seqs bigint[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_all bigint[] := p_seqs || ARRAY(SELECT c FROM unnest(p_seqs) v CROSS JOIN LATERAL fairlane.children_of(v) c);
BEGIN
    LOOP
        BEGIN
            PERFORM pg_advisory_xact_lock_shared(fairlane.space(), 0);
            PERFORM 1 FROM fairlane.active_job x WHERE x.seq = ANY (v_all) AND x.session IS NOT NULL ORDER BY x.seq FOR UPDATE;
            PERFORM fairlane.lock_for(p_seqs);
            PERFORM 1 FROM fairlane.active_job x WHERE x.seq = ANY (v_all) FOR UPDATE NOWAIT;
            RETURN;
        EXCEPTION WHEN lock_not_available THEN
            PERFORM pg_sleep(0.001);
        END;
    END LOOP;
END $$;

-- Cancel jobs; if one of them is unknown, none is cancelled. `states`: the current state of each.
CREATE FUNCTION fairlane.cancel(p_ids text[], p_now double precision DEFAULT NULL, p_lease double precision DEFAULT NULL,
    OUT states smallint[], OUT topics text[])
LANGUAGE plpgsql AS $$
DECLARE
    m fairlane.moment;
    v_seqs bigint[];
    v_live bigint[];
    v_seq bigint;
BEGIN
    v_seqs := ARRAY(SELECT (SELECT j.seq FROM fairlane.job j WHERE j.id = g.id) FROM unnest(p_ids) WITH ORDINALITY g(id, ord) ORDER BY g.ord);
    IF array_position(v_seqs, NULL) IS NOT NULL THEN
        PERFORM fairlane.refuse('FL001', format('there is no job %L', p_ids[array_position(v_seqs, NULL)]));
    END IF;
    v_live := ARRAY(SELECT x.seq FROM fairlane.active_job x WHERE x.seq = ANY (v_seqs));
    IF cardinality(v_live) > 0 THEN
        PERFORM fairlane.lock_jobs(v_live);
        m := fairlane.moment_of(p_now, p_lease);
        -- Turns come first: the end of another job would grant its place of a lane to a turn that waits for it, which would
        -- start at once.
        FOREACH v_seq IN ARRAY ARRAY(SELECT x.seq FROM fairlane.active_job x WHERE x.seq = ANY (v_live) AND x.kind = KIND.TURN) LOOP
            PERFORM fairlane.cancel_job(v_seq, m);
        END LOOP;
        PERFORM fairlane.end_waiting(v_live, 'by_user', m);
        -- Jobs that hold a place of a lane come last: otherwise each place would pass to a job that is cancelled next.
        FOREACH v_seq IN ARRAY ARRAY(SELECT x.seq FROM fairlane.active_job x WHERE x.seq = ANY (v_live) AND x.kind <> KIND.TURN
                ORDER BY x.granted, x.seq) LOOP
            -- Ending the last child of a broadcast also ends its parent.
            IF EXISTS (SELECT 1 FROM fairlane.active_job x WHERE x.seq = v_seq) THEN
                PERFORM fairlane.cancel_job(v_seq, m);
            END IF;
        END LOOP;
    END IF;
    states := ARRAY(SELECT coalesce((SELECT o.state FROM fairlane.outcome o WHERE o.seq = g.seq),
            (SELECT STATE.RUNNING::smallint FROM fairlane.active_job x WHERE x.seq = g.seq))
        FROM unnest(v_seqs) WITH ORDINALITY g(seq, ord) ORDER BY g.ord);
    IF array_position(states, NULL) IS NOT NULL THEN
        -- The job was pruned since it was looked up.
        PERFORM fairlane.refuse('FL001', format('there is no job %L', p_ids[array_position(states, NULL)]));
    END IF;
    topics := fairlane.topics();
END $$;

-- Bulk cancel for plain waiting jobs. Returns how many were cancelled. The caller holds the locks of their queues. Places of a
-- limited lane are granted once, after all of its jobs are gone.
CREATE FUNCTION fairlane.end_waiting(p_seqs bigint[], p_reason text, m fairlane.moment) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    r record;
    v_lane bigint;
    v_ended integer := 0;
BEGIN
    FOR r IN
        WITH gone AS (
            DELETE FROM fairlane.active_job x WHERE x.seq = ANY (p_seqs) AND x.state IN (STATE.SCHEDULED, STATE.PENDING) AND x.plain RETURNING x.*
        ), ended AS (
            INSERT INTO fairlane.outcome (seq, queue, state, reason, arrival, attempt, fence, started_at, finished_at, refused)
            SELECT g.seq, g.queue, STATE.CANCELLED, p_reason, g.arrival, g.attempt, g.fence, g.started_at, m.now, g.refused FROM gone g
        ), counted AS (
            INSERT INTO fairlane.queue_count (queue, class, scheduled, pending, cancelled)
            SELECT g.queue, g.class, -count(*) FILTER (WHERE g.state = STATE.SCHEDULED), -count(*) FILTER (WHERE g.state = STATE.PENDING), count(*)
            FROM gone g GROUP BY g.queue, g.class
        ), beside AS (
            DELETE FROM fairlane.job_extra a WHERE a.seq = ANY (ARRAY(SELECT g.seq FROM gone g))
        )
        SELECT g.flow, g.lane, count(*) FILTER (WHERE g.granted) AS granted, count(*) AS jobs, min(g.seq) AS seq
        FROM gone g GROUP BY g.flow, g.lane ORDER BY g.lane, g.flow
    LOOP
        v_ended := v_ended + r.jobs;
        IF r.flow IS NOT NULL THEN
            PERFORM fairlane.find_head(r.flow);
        END IF;
        -- The rows are ordered by lane, so a lane's places are granted when its last group is done.
        IF v_lane IS DISTINCT FROM r.lane THEN
            PERFORM fairlane.hand_on(v_lane, m) WHERE v_lane IS NOT NULL;
            v_lane := r.lane;
            PERFORM fairlane.notify('place:' || q.name || '/' || j.lane) FROM fairlane.job j JOIN fairlane.queue q ON q.id = j.queue
            WHERE v_lane IS NOT NULL AND j.seq = r.seq;
        END IF;
        IF r.lane IS NOT NULL AND r.granted > 0 THEN
            UPDATE fairlane.lane SET granted = granted - r.granted WHERE id = r.lane;
        END IF;
    END LOOP;
    PERFORM fairlane.hand_on(v_lane, m) WHERE v_lane IS NOT NULL;
    RETURN v_ended;
END $$;
