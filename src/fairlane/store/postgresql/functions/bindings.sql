-- Sticky keys: binding them to workers, draining and releasing them, and losing them with their worker.
--
-- `assign_worker` decides where a job goes, before it arrives. A binding's clean-up waits behind its gate (GATE.CLEANUP) until it is
-- alone; jobs that arrive while it runs wait behind the same gate. Everything here runs under the lock of the pool, and under
-- the locks of the queues that its jobs are in; see `lock_for`.

-- Lock what ending or admitting these jobs may touch: their queues, and for bound jobs their pool and the queues of the
-- clean-up and of the jobs that wait behind it. Those queues are looked up under the pool's lock, because they change only
-- under it.
CREATE FUNCTION fairlane.lock_for(p_seqs bigint[], p_queues integer[] DEFAULT '{}') RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_pools text[];
    v_queues integer[];
BEGIN
    SELECT array_agg(DISTINCT j.queue), array_agg(DISTINCT j.pool) FILTER (WHERE j.sticky IS NOT NULL OR j.kind > KIND.TURN)
    INTO v_queues, v_pools FROM fairlane.job j WHERE j.seq = ANY (p_seqs);
    IF v_pools IS NOT NULL THEN
        PERFORM fairlane.lock_some(v_pools, '{}');
        v_queues := v_queues || fairlane.bound_queues(p_seqs);
    END IF;
    PERFORM fairlane.lock_some('{}', v_queues || p_queues);
END $$;

-- The same for bound jobs, without waiting: true if all locks were free.
CREATE FUNCTION fairlane.try_lock_for(p_seqs bigint[]) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    RETURN fairlane.try_lock('{}', ARRAY(SELECT DISTINCT j.pool FROM fairlane.job j WHERE j.seq = ANY (p_seqs) AND j.sticky IS NOT NULL))
        AND fairlane.try_lock(fairlane.bound_queues(p_seqs));
END $$;

-- The queues of the clean-ups of bound jobs, and of the jobs that wait behind those. The caller holds the locks of their pools.
CREATE FUNCTION fairlane.bound_queues(p_seqs bigint[]) RETURNS integer[] LANGUAGE plpgsql AS $$
BEGIN
    RETURN ARRAY(
        SELECT x.queue FROM fairlane.job j
        CROSS JOIN LATERAL (SELECT b.seq, b.cleanup FROM fairlane.binding b
            WHERE b.pool = j.pool AND b.key = j.sticky AND b.closed_at IS NULL OFFSET 0) b
        CROSS JOIN LATERAL (SELECT v.queue FROM fairlane.active_job v WHERE v.seq = b.cleanup
            UNION SELECT v.queue FROM fairlane.job_extra a JOIN fairlane.active_job v ON v.seq = a.seq
            WHERE a.binding = b.seq AND a.gate = GATE.CLEANUP AND j.kind = KIND.CLEANUP OFFSET 0) x
        WHERE j.seq = ANY (p_seqs) AND j.sticky IS NOT NULL);
END $$;

-- Whether an index of a pool has a worker, or one that may come back to it within its lease.
CREATE FUNCTION fairlane.served(p_pool text, p_index integer, m fairlane.moment) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT 1 FROM fairlane.session s WHERE s.pool = p_pool AND s.idx = p_index AND s.idx IS NOT NULL
        AND (s.state IN ('live', 'stopping') OR (s.state = 'ended' AND s.named AND s.expires > m.lease)))
$$;

-- Decide the inbox and the gate of a job that arrives. The caller saves it.
CREATE FUNCTION fairlane.assign_worker(l fairlane.active_job, m fairlane.moment) RETURNS fairlane.active_job LANGUAGE plpgsql AS $$
DECLARE
    j record;
    b fairlane.binding;
BEGIN
    l.gate := GATE.NONE;
    IF l.kind = KIND.CLEANUP THEN
        RETURN l;
    END IF;
    SELECT x.pool, x.sticky, x.direct INTO j FROM fairlane.job x WHERE x.seq = l.seq;
    IF j.direct IS NOT NULL THEN
        l.inbox := j.pool || '/' || j.direct;
        RETURN l;
    END IF;
    IF j.sticky IS NULL THEN
        l.inbox := '';
        RETURN l;
    END IF;
    IF l.binding IS NOT NULL THEN
        -- The job comes back (a retry, a rescue) and still belongs to its binding: it does not reopen it.
        SELECT * INTO b FROM fairlane.binding x WHERE x.seq = l.binding AND x.closed_at IS NULL;
        IF FOUND THEN
            l.inbox := b.pool || '/' || b.idx;
            RETURN l;
        END IF;
        l.binding := NULL;
    END IF;
    SELECT * INTO b FROM fairlane.binding x WHERE x.pool = j.pool AND x.key = j.sticky AND x.closed_at IS NULL;
    IF NOT FOUND THEN
        b := fairlane.bind(j.pool, j.sticky, m);
    ELSIF b.state = 'draining' AND NOT fairlane.reopen(b, m) THEN
        l.gate := GATE.CLEANUP;
    END IF;
    IF b.seq IS NULL THEN
        l.gate := GATE.UNBOUND;
        l.inbox := j.pool || '/';
        RETURN l;
    END IF;
    l.binding := b.seq;
    l.inbox := b.pool || '/' || b.idx;
    PERFORM fairlane.touch(b.seq, m);
    RETURN l;
END $$;

-- `used_at` is written at most once a minute: it only has to show which bindings were idle for a day.
CREATE FUNCTION fairlane.touch(p_binding bigint, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE fairlane.binding SET used_at = m.now WHERE seq = p_binding AND used_at < m.now - 60;
END $$;

-- Bind a key to the live worker with the fewest open bindings, and among those to the lowest index. Returns a NULL number if
-- the pool has no live worker. A draining binding is about to be released and does not count.
CREATE FUNCTION fairlane.bind(p_pool text, p_key text, m fairlane.moment) RETURNS fairlane.binding LANGUAGE plpgsql AS $$
DECLARE
    b fairlane.binding;
BEGIN
    INSERT INTO fairlane.binding (pool, key, idx, state, opened_at, used_at)
    SELECT p_pool, p_key, s.idx, 'open', m.now, m.now FROM fairlane.session s
    WHERE s.pool = p_pool AND s.idx IS NOT NULL AND s.state = 'live' AND s.expires > m.lease
    ORDER BY (SELECT count(*) FROM fairlane.binding x
        WHERE x.pool = p_pool AND x.idx = s.idx AND x.closed_at IS NULL AND x.state = 'open'), s.idx
    LIMIT 1 RETURNING * INTO b;
    RETURN b;
END $$;

-- A job arrives for a draining binding. Before the clean-up has started, the job cancels it and reopens the binding; afterwards
-- (false) the job waits behind it.
CREATE FUNCTION fairlane.reopen(b fairlane.binding, m fairlane.moment) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    c fairlane.active_job;
BEGIN
    SELECT * INTO c FROM fairlane.active_job x WHERE x.seq = b.cleanup;
    -- Once claimed, the clean-up counts as started even if it was handed back: jobs may already wait behind it.
    IF c.fence > 0 THEN
        RETURN false;
    END IF;
    UPDATE fairlane.binding SET state = 'open', cleanup = NULL, used_at = m.now WHERE seq = b.seq;
    IF c.seq IS NOT NULL THEN
        PERFORM fairlane.end_job(c, STATE.CANCELLED::smallint, 'reopened', NULL, NULL, NULL, NULL, m);
    END IF;
    RETURN true;
END $$;

-- A job of a binding is final, or has left it: the release may continue.
CREATE FUNCTION fairlane.used(p_binding bigint, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    b fairlane.binding;
BEGIN
    SELECT * INTO b FROM fairlane.binding x WHERE x.seq = p_binding AND x.closed_at IS NULL;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    PERFORM fairlane.touch(b.seq, m);
    IF b.state = 'draining' THEN
        PERFORM fairlane.drain(b, m);
    END IF;
END $$;

-- Whether a key has jobs that are pending, running or retrying, besides its clean-up.
CREATE FUNCTION fairlane.busy(b fairlane.binding) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT 1 FROM fairlane.job_extra x WHERE x.binding = b.seq AND x.seq IS DISTINCT FROM b.cleanup)
$$;

-- Advance a draining binding as far as possible; true when it is released.
CREATE FUNCTION fairlane.drain(b fairlane.binding, m fairlane.moment) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    c fairlane.active_job;
BEGIN
    IF fairlane.busy(b) THEN
        RETURN false;
    END IF;
    IF b.cleanup IS NULL THEN
        UPDATE fairlane.binding SET state = 'released', closed_at = m.now WHERE seq = b.seq;
        RETURN true;
    END IF;
    SELECT * INTO c FROM fairlane.active_job x WHERE x.seq = b.cleanup;
    IF c.state = STATE.PENDING AND c.gate = GATE.CLEANUP THEN
        PERFORM fairlane.save(fairlane.ungate(c, m));
    END IF;
    RETURN false;
END $$;

-- The clean-up of a binding is final.
CREATE FUNCTION fairlane.cleaned(l fairlane.active_job, p_state smallint, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    b fairlane.binding;
    w fairlane.active_job;
    v_held bigint[];
    v_seq bigint;
BEGIN
    SELECT * INTO b FROM fairlane.binding x WHERE x.seq = l.binding AND x.state = 'draining' AND x.cleanup = l.seq;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    v_held := ARRAY(SELECT x.seq FROM fairlane.job_extra x WHERE x.binding = b.seq AND x.gate = GATE.CLEANUP ORDER BY x.arrival);
    IF cardinality(v_held) > 0 THEN
        -- Jobs arrived while the clean-up ran: reopen the binding for them.
        UPDATE fairlane.binding SET state = 'open', cleanup = NULL, used_at = m.now, cleanup_failed = p_state <> STATE.COMPLETED
        WHERE seq = b.seq;
        FOREACH v_seq IN ARRAY v_held LOOP
            SELECT * INTO w FROM fairlane.active_job x WHERE x.seq = v_seq;
            PERFORM fairlane.save(fairlane.ungate(w, m));
        END LOOP;
    ELSIF fairlane.busy(b) THEN
        -- The clean-up was cancelled before it could start: the release continues without it.
        UPDATE fairlane.binding SET cleanup = NULL WHERE seq = b.seq;
    ELSE
        UPDATE fairlane.binding SET state = 'released', closed_at = m.now, cleanup_failed = cleanup_failed OR p_state <> STATE.COMPLETED
        WHERE seq = b.seq;
    END IF;
END $$;

-- A worker is gone: close its bindings as lost, cancel their clean-ups, and assign their waiting jobs to workers again. Returns how many
-- bindings were closed.
CREATE FUNCTION fairlane.lose(p_pool text, p_index integer, m fairlane.moment) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_lost bigint[];
    v_binding bigint;
    v_seq bigint;
    l fairlane.active_job;
BEGIN
    WITH closed AS (
        UPDATE fairlane.binding b SET state = 'lost', closed_at = m.now
        WHERE b.pool = p_pool AND b.idx = p_index AND b.closed_at IS NULL RETURNING b.seq
    )
    SELECT coalesce(array_agg(c.seq ORDER BY c.seq), '{}') INTO v_lost FROM closed c;
    FOREACH v_binding IN ARRAY v_lost LOOP
        FOR v_seq IN SELECT x.seq FROM fairlane.job_extra x WHERE x.binding = v_binding ORDER BY x.arrival LOOP
            -- Read here, because placing an earlier job may have changed this one.
            SELECT * INTO l FROM fairlane.active_job x WHERE x.seq = v_seq AND x.state <> STATE.RUNNING;
            IF NOT FOUND THEN
                CONTINUE;
            ELSIF l.kind = KIND.CLEANUP THEN
                PERFORM fairlane.end_job(l, STATE.CANCELLED::smallint, 'worker_lost', NULL, NULL, NULL, NULL, m);
            ELSIF l.state = STATE.PENDING THEN
                PERFORM fairlane.reassign_worker(l, m);
            ELSE
                -- The job waits for its retry, and is placed when it arrives.
                l.binding := NULL;
                l.inbox := '';
                PERFORM fairlane.save(l);
            END IF;
        END LOOP;
    END LOOP;
    RETURN cardinality(v_lost);
END $$;

-- Move a pending job to where it belongs now. It keeps its arrival and its grant.
CREATE FUNCTION fairlane.reassign_worker(l fairlane.active_job, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    l := fairlane.withdraw(l);
    l.binding := NULL;
    l := fairlane.assign_worker(l, m);
    IF l.gate = GATE.NONE AND l.granted THEN
        l := fairlane.enter(l, m);
    ELSIF l.granted AND l.lane IS NOT NULL THEN
        l.granted_at := m.now;
    END IF;
    PERFORM fairlane.save(l);
END $$;

-- The jobs of a pool that wait for a worker, in order of arrival.
CREATE FUNCTION fairlane.unbound(p_pool text, p_limit integer) RETURNS bigint[] LANGUAGE sql STABLE AS $$
    SELECT ARRAY(SELECT x.seq FROM fairlane.job_extra x WHERE x.gate = GATE.UNBOUND AND x.inbox = p_pool || '/' ORDER BY x.arrival LIMIT p_limit)
$$;

-- Bind unbound jobs whose pool has a live worker now. Returns how many were bound.
CREATE FUNCTION fairlane.bind_unbound(p_seqs bigint[], m fairlane.moment) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    l fairlane.active_job;
    v_seq bigint;
    v_bound integer := 0;
BEGIN
    FOREACH v_seq IN ARRAY p_seqs LOOP
        SELECT * INTO l FROM fairlane.active_job x WHERE x.seq = v_seq AND x.gate = GATE.UNBOUND;
        CONTINUE WHEN NOT FOUND;
        l := fairlane.assign_worker(l, m);
        CONTINUE WHEN l.gate = GATE.UNBOUND;
        IF l.gate = GATE.NONE THEN
            l := fairlane.ungate(l, m);
        END IF;
        PERFORM fairlane.save(l);
        v_bound := v_bound + 1;
    END LOOP;
    RETURN v_bound;
END $$;

-- A job (`p_seq`) holds a place of an unordered lane but cannot start: the next waiting job that could use the place. NULL if
-- there is none, or if the holder can start.
CREATE FUNCTION fairlane.could_use_place_of(p_seq bigint, m fairlane.moment) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    h fairlane.active_job;
BEGIN
    SELECT * INTO h FROM fairlane.active_job x WHERE x.seq = p_seq AND x.granted_at <= m.now - 2 AND x.granted AND x.lane IS NOT NULL;
    IF NOT FOUND OR (h.gate = GATE.NONE AND fairlane.takes(h.inbox, h.class)) THEN
        RETURN NULL;
    END IF;
    RETURN (WITH other AS MATERIALIZED (
            SELECT x.seq, x.rank, x.arrival, x.inbox, x.class FROM fairlane.active_job x WHERE x.lane = h.lane AND x.lane IS NOT NULL
            AND NOT x.granted AND x.session IS NULL AND (x.expires_at IS NULL OR x.expires_at > m.now) AND x.gate = GATE.NONE AND x.inbox <> h.inbox
            ORDER BY x.rank, x.arrival LIMIT 10000
        ), able AS MATERIALIZED (
            SELECT d.inbox, d.class FROM (SELECT DISTINCT o.inbox, o.class FROM other o) d WHERE fairlane.takes(d.inbox, d.class)
        )
        SELECT o.seq FROM other o WHERE ((o.inbox, o.class) IN (SELECT a.inbox, a.class FROM able a)) IS TRUE
        ORDER BY o.rank, o.arrival LIMIT 1);
END $$;

-- Whether a worker could claim a job of this inbox and class now: any worker, or the one of the inbox if it is live and has a free slot.
CREATE FUNCTION fairlane.takes(p_inbox text, p_class smallint) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT p_inbox = '' OR EXISTS (SELECT 1 FROM fairlane.sessions s
        WHERE s.pool = split_part(p_inbox, '/', 1) AND s.idx = nullif(split_part(p_inbox, '/', 2), '')::integer AND s.idx IS NOT NULL
        AND s.state = 'live' AND fairlane.room(s.slots, s.reserved_high, s.reserved_normal, s.running_high, s.running_normal,
            s.running_low, p_class) > 0)
$$;

-- Drain open bindings that were not used for a day; one that still has jobs counts as used.
CREATE FUNCTION fairlane.drain_idle(p_limit integer, m fairlane.moment) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    b fairlane.binding;
    v_drained integer := 0;
BEGIN
    FOR b IN SELECT x.* FROM fairlane.binding x WHERE x.state = 'open' AND x.used_at <= m.now - 86400
        ORDER BY x.used_at LIMIT p_limit
    LOOP
        IF fairlane.busy(b) THEN
            UPDATE fairlane.binding SET used_at = m.now WHERE seq = b.seq;
            CONTINUE;
        END IF;
        UPDATE fairlane.binding SET state = 'draining', cleanup = NULL WHERE seq = b.seq RETURNING * INTO b;
        PERFORM fairlane.drain(b, m);
        v_drained := v_drained + 1;
    END LOOP;
    RETURN v_drained;
END $$;

-- Start releasing a sticky key, or return the release that is in progress. `p_id` NULL: without a clean-up. A clean-up that is
-- already stored is not stored again. `answer` is the state of the release: nothing, draining or released.
CREATE FUNCTION fairlane.release(p_pool text, p_key text, p_id text, p_task text, p_queue text, p_class smallint,
    p_cost double precision, p_payload bytea, p_headers bytea, p_retries integer, p_backoff bytea, p_timeout double precision,
    p_uniq text, p_unique_for double precision, p_retry_of text, p_expires double precision,
    p_now double precision DEFAULT NULL, p_lease double precision DEFAULT NULL, OUT answer text, OUT topics text[])
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    m fairlane.moment := fairlane.moment_of(p_now, p_lease);
    b fairlane.binding;
    j fairlane.job;
    l fairlane.active_job;
    v_known boolean := false;
BEGIN
    topics := '{}';
    SELECT * INTO b FROM fairlane.binding x WHERE x.pool = p_pool AND x.key = p_key AND x.closed_at IS NULL;
    IF b.state = 'open' THEN
        BEGIN
            -- Names come first in the order of locks: a call that holds the store exclusively must not wait for an open
            -- transaction.
            IF p_id IS NOT NULL THEN
                INSERT INTO fairlane.job (id, task, queue, kind, class, cost, payload, headers, retries, backoff, timeout, uniq, pool,
                    sticky, retry_of, enqueued_at, expires)
                SELECT p_id, p_task, fairlane.queue_number(p_queue), KIND.CLEANUP, p_class, p_cost, p_payload, p_headers, p_retries, p_backoff,
                    p_timeout, p_uniq, p_pool, p_key, p_retry_of, m.now, p_expires
                WHERE NOT EXISTS (SELECT 1 FROM fairlane.reserved_id r WHERE r.id = p_id AND r.until > m.now)
                ON CONFLICT ON CONSTRAINT job_id_key DO NOTHING RETURNING * INTO j;
                v_known := NOT FOUND;
                IF NOT v_known THEN
                    PERFORM fairlane.link_job(j);
                    IF p_uniq IS NOT NULL THEN
                        INSERT INTO fairlane.held_unique (task, value, seq, id, until)
                        VALUES (p_task, p_uniq, j.seq, p_id, m.now + p_unique_for)
                        ON CONFLICT (task, value) DO UPDATE SET seq = excluded.seq, id = excluded.id, until = excluded.until, state = NULL;
                    END IF;
                END IF;
            END IF;
            PERFORM set_config('lock_timeout', '0', true);
            PERFORM fairlane.lock_alone();
            SELECT * INTO b FROM fairlane.binding x WHERE x.pool = p_pool AND x.key = p_key AND x.closed_at IS NULL;
            IF b.state IS DISTINCT FROM 'open' THEN
                PERFORM fairlane.refuse('FL010', 'another call has begun the release');
            END IF;
        EXCEPTION WHEN SQLSTATE 'FL010' THEN
            -- The clean-up is not stored, and the locks of the block are released.
            NULL;
        END;
    END IF;
    IF b.state IS DISTINCT FROM 'open' THEN
        answer := CASE WHEN b.state IS NULL THEN 'nothing' ELSE 'draining' END;
        RETURN;
    ELSIF v_known THEN
        PERFORM fairlane.refuse('FL002', format('clean-up %L was cancelled when the key was used again; give a new id', p_id));
    END IF;
    m := fairlane.moment_of(p_now, p_lease);
    IF p_id IS NOT NULL THEN
        l := fairlane.new_active_job(j, m);
        l.binding := b.seq;
        l.inbox := b.pool || '/' || b.idx;
        l.gate := GATE.CLEANUP;
        PERFORM fairlane.count_move(l.queue, l.class, NULL, l.state);
        l := fairlane.arrive(l, m);
        PERFORM fairlane.put(l);
    END IF;
    UPDATE fairlane.binding SET state = 'draining', cleanup = j.seq WHERE seq = b.seq RETURNING * INTO b;
    answer := CASE WHEN fairlane.drain(b, m) THEN 'released' ELSE 'draining' END;
    topics := fairlane.topics();
END $$;
