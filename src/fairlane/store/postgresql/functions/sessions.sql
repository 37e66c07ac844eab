-- Sessions: registering, renewing, leaving and being declared dead, with the consequences for their jobs and bindings. An
-- expired session is not dead: it counts as present until it has left or was declared dead. A call that moves the jobs of a
-- session that is gone holds the store exclusively, so the rows of its jobs cannot change meanwhile.

-- The name of a session in the history: pool and index of a worker, otherwise the host.
CREATE FUNCTION fairlane.worker_of(s fairlane.session) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN s.idx IS NULL THEN s.host ELSE s.pool || '/' || s.idx END
$$;

-- Register a session, take over or assign an index, and bind the jobs that waited for a worker. `p_idx`: a named index, NULL
-- for the lowest free one; `p_seconds`: its lease. Repeating the call renews the lease.
CREATE FUNCTION fairlane.register(p_id text, p_kind text, p_seconds double precision, p_host text, p_pid integer, p_pool text,
    p_idx integer, p_queues text[], p_slots integer, p_reserved_high integer, p_reserved_normal integer,
    p_task_set text, p_tasks text[], p_now double precision DEFAULT NULL, p_lease double precision DEFAULT NULL, OUT topics text[])
LANGUAGE plpgsql AS $$
DECLARE
    m fairlane.moment := fairlane.moment_of(p_now, p_lease);
    v_index integer;
    v_taken integer[];
    v_queue text;
    v_seq bigint;
BEGIN
    topics := '{}';
    IF NOT fairlane.is_missed(p_id, m) AND fairlane.register_again(p_id, m) THEN
        RETURN;
    END IF;
    -- Before the store's lock, as in every call: a call that is creating the same queue may be waiting for locks itself.
    FOR v_queue IN SELECT DISTINCT n FROM unnest(p_queues) n ORDER BY n LOOP
        PERFORM fairlane.queue_number(v_queue);
    END LOOP;
    PERFORM fairlane.lock_alone();
    m := fairlane.moment_of(p_now, p_lease);
    IF fairlane.register_again(p_id, m) THEN
        PERFORM fairlane.bind_unbound(fairlane.unbound(p_pool, 1000), m);
        topics := fairlane.topics();
        RETURN;
    END IF;
    IF p_kind = 'worker' THEN
        v_index := p_idx;
        IF p_idx IS NULL THEN
            -- Indexes of present sessions, and of named ones that may come back.
            v_taken := ARRAY(SELECT DISTINCT s.idx FROM fairlane.session s WHERE s.pool = p_pool AND s.idx IS NOT NULL
                AND (s.state IN ('live', 'stopping') OR (s.state = 'ended' AND s.named AND s.expires > m.lease)));
            SELECT min(n) INTO v_index FROM generate_series(0, cardinality(v_taken)) n WHERE n <> ALL (v_taken);
        END IF;
        PERFORM fairlane.make_room(p_pool, v_index, p_host, m);
    END IF;
    INSERT INTO fairlane.session (id, kind, state, host, pid, pool, idx, named, queues, slots, reserved_high, reserved_normal,
        started_at, lease, expires, task_set)
    VALUES (p_id, p_kind, 'live', p_host, p_pid, p_pool, v_index, p_idx IS NOT NULL, coalesce(p_queues, '{}'), p_slots,
        coalesce(p_reserved_high, 0), coalesce(p_reserved_normal, 0), m.now, p_seconds, m.lease + p_seconds, p_task_set)
    RETURNING seq INTO v_seq;
    INSERT INTO fairlane.session_load (session) VALUES (v_seq);
    IF p_task_set IS NOT NULL THEN
        INSERT INTO fairlane.task_set (id, tasks, used_at) VALUES (p_task_set, p_tasks, m.now)
        ON CONFLICT (id) DO UPDATE SET used_at = excluded.used_at;
    END IF;
    IF v_index IS NOT NULL THEN
        -- The admitter binds the rest, if there are more.
        PERFORM fairlane.bind_unbound(fairlane.unbound(p_pool, 1000), m);
        PERFORM fairlane.join_broadcasts(p_pool, v_index, m);
    END IF;
    topics := fairlane.topics();
END $$;

-- Renew a session that is already registered; false if it is new.
CREATE FUNCTION fairlane.register_again(p_id text, m fairlane.moment) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    UPDATE fairlane.session s SET expires = m.lease + s.lease WHERE s.id = p_id AND s.state IN ('live', 'stopping');
    IF FOUND THEN
        RETURN true;
    END IF;
    IF EXISTS (SELECT 1 FROM fairlane.session s WHERE s.id = p_id) THEN
        PERFORM fairlane.refuse('FL006', 'this session has ended or was declared dead; register under a new id');
    END IF;
    RETURN false;
END $$;

-- Whether a session has an expired lease, and jobs of its pool found no live worker meanwhile.
CREATE FUNCTION fairlane.is_missed(p_id text, m fairlane.moment) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT 1 FROM fairlane.session s WHERE s.id = p_id AND s.state = 'live' AND s.idx IS NOT NULL AND s.expires <= m.lease
        AND cardinality(fairlane.unbound(s.pool, 1)) > 0)
$$;

-- Free an index for a new session, because no two may hold it. On the same host it is the old worker restarted.
CREATE FUNCTION fairlane.make_room(p_pool text, p_index integer, p_host text, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    s fairlane.session;
BEGIN
    SELECT * INTO s FROM fairlane.session x
    WHERE x.pool = p_pool AND x.idx = p_index AND x.idx IS NOT NULL AND x.state IN ('live', 'stopping') FOR UPDATE;
    IF FOUND THEN
        IF s.expires > m.lease AND s.host <> p_host THEN
            PERFORM fairlane.refuse('FL004', format('index %s of pool %L belongs to a live worker on %s; choose another index, or wait',
                p_index, p_pool, s.host), (s.expires - m.lease)::text);
        END IF;
        PERFORM fairlane.declare_dead(s, s.host = p_host AND s.expires > m.lease, m);
        RETURN;
    END IF;
    SELECT * INTO s FROM fairlane.session x WHERE x.pool = p_pool AND x.idx = p_index AND x.idx IS NOT NULL ORDER BY x.seq DESC LIMIT 1;
    IF s.host <> p_host OR s.expires <= m.lease THEN
        -- The state behind its sticky keys is on another machine, or was given up.
        PERFORM fairlane.lose(p_pool, p_index, m);
    END IF;
END $$;

-- Extend a lease, and reconcile what the session believes it holds with what the store has. `lost`: indexes, from 0, of the
-- named claims that the session no longer holds. Usually nothing has to be taken back or bound, and no lock is needed;
-- otherwise `again` asks for the same call with `p_alone`.
CREATE FUNCTION fairlane.renew(p_session text, p_ids text[], p_fences integer[], p_claim bigint, p_stopping boolean,
    p_alone boolean DEFAULT false, p_now double precision DEFAULT NULL, p_lease double precision DEFAULT NULL,
    OUT lost integer[], OUT cancel text[], OUT taken_back text[], OUT again boolean, OUT now double precision, OUT topics text[])
LANGUAGE plpgsql AS $$
DECLARE
    m fairlane.moment;
    s fairlane.session;
    l fairlane.active_job;
    v_ids text[];
    v_fences integer[];
    v_unknown bigint[];
    v_seq bigint;
    v_missed boolean;
BEGIN
    IF p_alone THEN
        PERFORM fairlane.lock_alone();
    END IF;
    m := fairlane.moment_of(p_now, p_lease);
    v_missed := NOT p_alone AND fairlane.is_missed(p_session, m);
    UPDATE fairlane.session x SET expires = m.lease + x.lease, state = CASE WHEN p_stopping THEN 'stopping' ELSE x.state END
    WHERE x.id = p_session AND x.state IN ('live', 'stopping') RETURNING * INTO s;
    IF NOT FOUND THEN
        PERFORM fairlane.refuse('FL006',
            'this session is unknown, ended or declared dead; drop its jobs and register a new one');
    END IF;
    -- Turns are not claimed, so they are never taken back.
    SELECT coalesce(array_agg(y.id), '{}'), coalesce(array_agg(y.fence), '{}'),
        coalesce(array_agg(y.id) FILTER (WHERE y.named AND y.cancel), '{}'),
        coalesce(array_agg(y.seq) FILTER (WHERE NOT y.named AND y.claim <= p_claim), '{}')
    INTO v_ids, v_fences, cancel, v_unknown
    FROM (SELECT x.seq, j.id, x.fence, x.cancel, x.claim,
              ((j.id, x.fence) IN (SELECT u.id, u.fence FROM unnest(p_ids, p_fences) u(id, fence))) IS TRUE AS named
          FROM fairlane.active_job x CROSS JOIN LATERAL (SELECT i.id FROM fairlane.job i WHERE i.seq = x.seq OFFSET 0) j
          WHERE x.session = s.seq ORDER BY x.arrival) y;
    lost := ARRAY(SELECT u.ord::integer - 1 FROM unnest(p_ids, p_fences) WITH ORDINALITY u(id, fence, ord)
        WHERE ((u.id, u.fence) IN (SELECT h.id, h.fence FROM unnest(v_ids, v_fences) h(id, fence))) IS NOT TRUE ORDER BY u.ord);
    taken_back := '{}';
    again := (cardinality(v_unknown) > 0 AND NOT p_alone) OR v_missed;
    IF p_alone AND s.idx IS NOT NULL THEN
        PERFORM fairlane.bind_unbound(fairlane.unbound(s.pool, 1000), m);
    END IF;
    IF NOT again THEN
        FOREACH v_seq IN ARRAY v_unknown LOOP
            SELECT * INTO l FROM fairlane.active_job x WHERE x.seq = v_seq;
            PERFORM fairlane.take_back(l, s.id, fairlane.worker_of(s), MOVE.TAKE_BACK::smallint, 0, m);
            taken_back := taken_back || (SELECT j.id FROM fairlane.job j WHERE j.seq = v_seq);
        END LOOP;
    END IF;
    now := m.now;
    topics := fairlane.topics();
END $$;

-- End a session and return its jobs: claims named in `p_ids` and `p_fences` as after a crash (NULL: all of them), the others
-- uncharged.
CREATE FUNCTION fairlane.leave(p_session text, p_ids text[], p_fences integer[], p_now double precision DEFAULT NULL,
    p_lease double precision DEFAULT NULL, OUT topics text[])
LANGUAGE plpgsql AS $$
DECLARE
    m fairlane.moment;
    s fairlane.session;
    l fairlane.active_job;
    r record;
BEGIN
    topics := '{}';
    SELECT * INTO s FROM fairlane.session x WHERE x.id = p_session;
    IF NOT FOUND THEN
        PERFORM fairlane.refuse('FL001', format('there is no session %L', p_session));
    END IF;
    IF s.state IN ('ended', 'dead') THEN
        RETURN;
    END IF;
    PERFORM fairlane.lock_alone();
    m := fairlane.moment_of(p_now, p_lease);
    UPDATE fairlane.session x SET state = 'ended', ended_at = m.now
    WHERE x.seq = s.seq AND x.state IN ('live', 'stopping') RETURNING * INTO s;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    PERFORM fairlane.waiter_gone(s.seq, m);
    IF s.idx IS NOT NULL AND NOT s.named THEN
        PERFORM fairlane.lose(s.pool, s.idx, m);
    END IF;
    FOR r IN SELECT x.seq, p_ids IS NULL OR x.claim IS NULL
            OR ((j.id, x.fence) IN (SELECT u.id, u.fence FROM unnest(p_ids, p_fences) u(id, fence))) IS TRUE AS begun
        FROM fairlane.active_job x CROSS JOIN LATERAL (SELECT i.id FROM fairlane.job i WHERE i.seq = x.seq OFFSET 0) j
        WHERE x.session = s.seq ORDER BY x.arrival
    LOOP
        SELECT * INTO l FROM fairlane.active_job x WHERE x.seq = r.seq AND x.session = s.seq;
        IF NOT FOUND THEN
            CONTINUE;
        ELSIF r.begun THEN
            PERFORM fairlane.crash(l, s.id, fairlane.worker_of(s), m);
        ELSE
            PERFORM fairlane.take_back(l, s.id, fairlane.worker_of(s), MOVE.TAKE_BACK::smallint, 0, m);
        END IF;
    END LOOP;
    topics := fairlane.topics();
END $$;

-- Cancel the turns that a session waits for, before ending those it holds; otherwise the next would start in a dead session.
CREATE FUNCTION fairlane.waiter_gone(p_session bigint, m fairlane.moment) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    l fairlane.active_job;
    v_seq bigint;
    v_gone integer := 0;
BEGIN
    FOR v_seq IN SELECT x.seq FROM fairlane.job_extra x WHERE x.waiter = p_session ORDER BY x.seq LOOP
        -- Read again: the end of one turn may have started the next. Running ones are ended with the rest of what the session
        -- holds.
        SELECT * INTO l FROM fairlane.active_job x WHERE x.seq = v_seq AND x.state <> STATE.RUNNING;
        IF FOUND THEN
            PERFORM fairlane.end_job(l, STATE.CANCELLED::smallint, 'waiter_gone', NULL, NULL, NULL, NULL, m);
            v_gone := v_gone + 1;
        END IF;
    END LOOP;
    RETURN v_gone;
END $$;

-- Declare a session dead, for good. Its bindings are closed first, so that its jobs are placed again at once. `fates`: how many
-- of its jobs went to each state, from 0 on.
CREATE FUNCTION fairlane.declare_dead(s fairlane.session, p_keep_bindings boolean, m fairlane.moment, OUT lost integer,
    OUT fates integer[]) LANGUAGE plpgsql AS $$
DECLARE
    l fairlane.active_job;
    v_seq bigint;
    v_state smallint;
BEGIN
    UPDATE fairlane.session SET state = 'dead', ended_at = m.now WHERE seq = s.seq;
    fates := ARRAY[0, 0, 0, 0, 0, 0, fairlane.waiter_gone(s.seq, m)];
    lost := 0;
    IF s.idx IS NOT NULL AND NOT p_keep_bindings THEN
        lost := fairlane.lose(s.pool, s.idx, m);
    END IF;
    FOR v_seq IN SELECT x.seq FROM fairlane.active_job x WHERE x.session = s.seq ORDER BY x.arrival LOOP
        SELECT * INTO l FROM fairlane.active_job x WHERE x.seq = v_seq AND x.session = s.seq;
        IF FOUND THEN
            v_state := fairlane.crash(l, s.id, fairlane.worker_of(s), m);
            fates[v_state + 1] := fates[v_state + 1] + 1;
        END IF;
    END LOOP;
END $$;

-- Running jobs whose session is gone. The parent of a broadcast has no session and needs none. The recursive query skips from
-- one session to the next in the index, so the cost depends on the number of sessions, not of jobs.
CREATE FUNCTION fairlane.orphans(p_limit integer) RETURNS bigint[] LANGUAGE sql STABLE AS $$
    WITH RECURSIVE holder (session) AS (
        SELECT (SELECT min(x.session) FROM fairlane.active_job x WHERE x.session IS NOT NULL)
        UNION ALL
        SELECT (SELECT min(x.session) FROM fairlane.active_job x WHERE x.session > h.session) FROM holder h WHERE h.session IS NOT NULL
    )
    SELECT ARRAY(SELECT x.seq FROM holder h JOIN fairlane.active_job x ON x.session = h.session WHERE NOT EXISTS (
        SELECT 1 FROM fairlane.session s WHERE s.seq = h.session AND s.state IN ('live', 'stopping')) LIMIT p_limit)
$$;

-- Declare expired sessions dead, take back the jobs of dead and missing ones, and close bindings without a worker. A pass first
-- checks whether there is anything to do: usually not, and then no other call has to wait.
CREATE FUNCTION fairlane.rescue(p_limit integer, p_declare boolean, p_term bigint, p_now double precision DEFAULT NULL,
    p_lease double precision DEFAULT NULL, OUT declared text[], OUT retried integer, OUT failed integer, OUT cancelled integer,
    OUT lost_bindings integer, OUT drained integer, OUT more boolean, OUT now double precision, OUT topics text[])
LANGUAGE plpgsql AS $$
DECLARE
    m fairlane.moment := fairlane.moment_of(p_now, p_lease);
    s fairlane.session;
    l fairlane.active_job;
    d record;
    v_fates integer[] := '{0,0,0,0,0,0,0}';
    v_seqs bigint[];
    v_seq bigint;
    v_state smallint;
BEGIN
    PERFORM fairlane.check_term(p_term, false, m);
    declared := '{}';
    lost_bindings := 0;
    drained := 0;
    more := false;
    IF fairlane.needs_rescue(p_declare, m) THEN
        PERFORM fairlane.lock_alone();
        m := fairlane.moment_of(p_now, p_lease);
        PERFORM fairlane.check_term(p_term, true, m);
        IF p_declare THEN
            -- Locked and checked again: a concurrent renewal counts.
            FOR s IN SELECT x.* FROM fairlane.session x WHERE x.state IN ('live', 'stopping') AND x.expires <= m.lease
                ORDER BY x.seq FOR UPDATE
            LOOP
                more := (SELECT sum(f) FROM unnest(v_fates) f) >= p_limit;
                EXIT WHEN more;
                declared := declared || s.id;
                d := fairlane.declare_dead(s, false, m);
                lost_bindings := lost_bindings + d.lost;
                v_fates := ARRAY(SELECT a + b FROM unnest(v_fates, d.fates) x(a, b));
            END LOOP;
        END IF;
        v_seqs := fairlane.orphans(p_limit);
        FOREACH v_seq IN ARRAY v_seqs LOOP
            SELECT * INTO l FROM fairlane.active_job x WHERE x.seq = v_seq AND x.session IS NOT NULL;
            CONTINUE WHEN NOT FOUND;
            SELECT * INTO s FROM fairlane.session x WHERE x.seq = l.session;
            v_state := fairlane.crash(l, coalesce(s.id, 'unknown'), coalesce(fairlane.worker_of(s), 'unknown'), m);
            v_fates[v_state + 1] := v_fates[v_state + 1] + 1;
        END LOOP;
        FOR d IN SELECT u.pool, u.idx FROM fairlane.bindings_unserved(m) u LOOP
            lost_bindings := lost_bindings + fairlane.lose(d.pool, d.idx, m);
        END LOOP;
        PERFORM fairlane.abandon(fairlane.children_unserved(p_limit, m), m);
        drained := fairlane.drain_idle(p_limit, m);
        more := more OR cardinality(v_seqs) = p_limit OR drained = p_limit;
    END IF;
    retried := v_fates[2] + v_fates[3];
    failed := v_fates[6];
    cancelled := v_fates[7];
    now := m.now;
    topics := fairlane.topics();
END $$;

-- Workers with bindings that are gone and whose lease is over. The recursive query skips from one worker to the next in the
-- index, so the cost depends on the number of workers, not of bindings.
CREATE FUNCTION fairlane.bindings_unserved(m fairlane.moment) RETURNS TABLE (pool text, idx integer) LANGUAGE sql STABLE AS $$
    WITH RECURSIVE place (pool, idx) AS (
        (SELECT b.pool, b.idx FROM fairlane.binding b WHERE b.closed_at IS NULL ORDER BY b.pool, b.idx LIMIT 1)
        UNION ALL
        SELECT n.pool, n.idx FROM place p CROSS JOIN LATERAL (SELECT b.pool, b.idx FROM fairlane.binding b
            WHERE b.closed_at IS NULL AND (b.pool, b.idx) > (p.pool, p.idx) ORDER BY b.pool, b.idx LIMIT 1) n
    )
    SELECT p.pool, p.idx FROM place p WHERE NOT fairlane.served(p.pool, p.idx, m)
$$;

CREATE FUNCTION fairlane.needs_rescue(p_declare boolean, m fairlane.moment) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT (p_declare AND EXISTS (SELECT 1 FROM fairlane.session s WHERE s.state IN ('live', 'stopping') AND s.expires <= m.lease))
        OR cardinality(fairlane.orphans(1)) > 0
        OR EXISTS (SELECT 1 FROM fairlane.bindings_unserved(m))
        OR cardinality(fairlane.children_unserved(1, m)) > 0
        OR EXISTS (SELECT 1 FROM fairlane.binding b WHERE b.state = 'open' AND b.used_at <= m.now - 86400)
$$;

-- Reject a claim of a session that is not live, and one that is out of date.
CREATE FUNCTION fairlane.check_claim(s fairlane.session, p_last bigint, p_number bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF s.seq IS NULL OR s.state NOT IN ('live', 'stopping') THEN
        PERFORM fairlane.refuse('FL006', 'this session is unknown, ended or declared dead; register a new one');
    ELSIF p_number < p_last THEN
        PERFORM fairlane.refuse('FL005', format('claim %s is older than the last one, %s', p_number, p_last));
    END IF;
END $$;
