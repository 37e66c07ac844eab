-- Enqueueing. The identity is written first, because that is where an enqueue may have to wait, at most two seconds, for
-- another open transaction with the same id or unique value. The locks are taken after that, so that no other call has to wait
-- for that transaction.

-- The flows of lanes in a domain, in the order of the lanes; new ones are created. Each has a look-up of its own, so that no
-- plan can scan all flows.
CREATE FUNCTION fairlane.flows_of(d fairlane.domain, p_lanes text[]) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    v_ruled boolean;
    v_flows bigint[] := ARRAY(SELECT (SELECT f.id FROM fairlane.flow f WHERE f.domain = d.id AND f.lane = coalesce(g.lane, ''))
                              FROM unnest(p_lanes) WITH ORDINALITY g(lane, ord) ORDER BY g.ord);
BEGIN
    IF array_position(v_flows, NULL) IS NULL THEN
        RETURN v_flows;
    END IF;
    SELECT q.ruled INTO v_ruled FROM fairlane.queue q WHERE q.id = d.queue;
    WITH new AS (
        INSERT INTO fairlane.flow (id, domain, lane) SELECT fairlane.flow_number(d, g.lane), d.id, g.lane
        FROM (SELECT DISTINCT coalesce(x.lane, '') AS lane FROM unnest(p_lanes, v_flows) x(lane, flow) WHERE x.flow IS NULL) g
        RETURNING id, lane
    )
    INSERT INTO fairlane.lane_pace (flow, domain, finish, weight)
    SELECT n.id, d.id, 0, CASE WHEN v_ruled AND n.lane <> '' THEN (fairlane.terms(d.queue, n.lane)).weight ELSE 1.0 END FROM new n;
    RETURN ARRAY(SELECT coalesce(g.flow, (SELECT f.id FROM fairlane.flow f WHERE f.domain = d.id AND f.lane = coalesce(g.lane, '')))
                 FROM unnest(p_lanes, v_flows) WITH ORDINALITY g(lane, flow, ord) ORDER BY g.ord);
END $$;

-- Flows without claimable jobs get the tag and the head of the first job that has just arrived in each. `p_flows` is sorted.
-- Workers are notified only for these flows: for a lane that already has claimable jobs, they were notified before or are busy.
CREATE FUNCTION fairlane.raise_heads(d fairlane.domain, p_flows bigint[], p_heads bigint[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_clock bigint := fairlane.clock_of(d.id);
    v_paces tid[] := fairlane.paces_at(p_flows);
BEGIN
    WITH raised AS (
        UPDATE fairlane.lane_pace u SET tag = greatest(v_clock, u.finish), head = p_heads[width_bucket(u.flow, p_flows)]
        WHERE u.ctid = ANY (v_paces) AND u.tag IS NULL RETURNING u.flow, u.tag, u.head
    )
    INSERT INTO fairlane.ready_lane (domain, tag, head, flow) SELECT d.id, r.tag, r.head, r.flow FROM raised r;
    IF FOUND THEN
        PERFORM fairlane.notify_ready(d.queue, d.inbox);
    END IF;
END $$;

-- The state of the job that has an id already, NULL if the id is free. Other content under the same id is rejected.
CREATE FUNCTION fairlane.known(p_new fairlane.job, m fairlane.moment) RETURNS smallint LANGUAGE plpgsql AS $$
DECLARE
    j fairlane.job;
    v_print bytea;
    v_state smallint;
BEGIN
    SELECT * INTO j FROM fairlane.job x WHERE x.id = p_new.id;
    IF FOUND THEN
        v_print := fairlane.fingerprint(j);
        SELECT coalesce(o.state, l.state) INTO v_state FROM (SELECT 1) one LEFT JOIN fairlane.active_job l ON l.seq = j.seq
        LEFT JOIN fairlane.outcome o ON o.seq = j.seq;
    ELSE
        SELECT r.fingerprint, r.state INTO v_print, v_state FROM fairlane.reserved_id r WHERE r.id = p_new.id AND r.until > m.now;
        IF NOT FOUND THEN
            RETURN NULL;
        END IF;
    END IF;
    IF v_print <> fairlane.fingerprint(p_new) THEN
        PERFORM fairlane.refuse('FL002', format('job %L exists already with other content; choose another id', p_new.id));
    END IF;
    RETURN v_state;
END $$;

-- Reject a lane that is not one of the queue's declared lanes.
CREATE FUNCTION fairlane.check_lane(q fairlane.queue, p_lane text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF q.closed IS NOT NULL AND (p_lane IS NULL OR p_lane <> ALL (q.closed)) THEN
        PERFORM fairlane.refuse('FL008', format('%s is not one of the lanes of queue %L', coalesce(quote_literal(p_lane), 'None'),
            q.name), 'lane');
    END IF;
END $$;

CREATE FUNCTION fairlane.check_room(q fairlane.queue, p_lane text, p_class integer) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_waiting bigint;
    v_rule fairlane.rule;
BEGIN
    IF q.max_pending IS NOT NULL THEN
        SELECT sum(t.scheduled + t.pending) INTO v_waiting FROM fairlane.queue_count t WHERE t.queue = q.id;
        IF v_waiting >= q.max_pending THEN
            PERFORM fairlane.refuse('FL003', format('queue %L has %s jobs waiting and takes at most %s', q.name, v_waiting,
                q.max_pending), jsonb_build_object('queue', q.name, 'class', p_class)::text);
        END IF;
    END IF;
    IF q.ruled AND p_lane IS NOT NULL THEN
        v_rule := fairlane.terms(q.id, p_lane);
        IF v_rule.max_pending IS NOT NULL THEN
            v_waiting := fairlane.lane_backlog(q.id, p_lane, v_rule.max_pending);
            IF v_waiting >= v_rule.max_pending THEN
                PERFORM fairlane.refuse('FL003', format('lane %L of queue %L has %s jobs waiting and takes at most %s', p_lane,
                    q.name, v_waiting, v_rule.max_pending),
                    jsonb_build_object('queue', q.name, 'class', p_class, 'lane', p_lane, 'limit', v_rule.places)::text);
            END IF;
        END IF;
    END IF;
END $$;

-- Waiting jobs of a lane: those without a place, the claimable ones, and the gated ones, each counted up to a limit.
CREATE FUNCTION fairlane.lane_backlog(p_queue integer, p_lane text, p_most integer) RETURNS bigint LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT (SELECT count(*) FROM (SELECT 1 FROM fairlane.lane n JOIN fairlane.active_job l ON l.lane = n.id
            WHERE n.queue = p_queue AND n.key = p_lane AND l.lane IS NOT NULL AND NOT l.granted AND l.session IS NULL LIMIT p_most) x)
        + (SELECT count(*) FROM (SELECT 1 FROM fairlane.domain d JOIN fairlane.flow f ON f.domain = d.id AND f.lane = p_lane
            JOIN fairlane.active_job l ON l.flow = f.id WHERE d.queue = p_queue AND l.flow IS NOT NULL AND l.session IS NULL LIMIT p_most) x)
        + (SELECT count(*) FROM (SELECT 1 FROM fairlane.job_extra a JOIN fairlane.active_job l ON l.seq = a.seq
            JOIN fairlane.job j ON j.seq = a.seq WHERE a.gate > GATE.NONE AND l.granted AND l.queue = p_queue AND j.lane = p_lane LIMIT p_most) x));
END $$;

CREATE FUNCTION fairlane.states_of(p_ids text[]) RETURNS smallint[] LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT array_agg(coalesce(
        (SELECT coalesce((SELECT o.state FROM fairlane.outcome o WHERE o.seq = j.seq),
                         (SELECT l.state FROM fairlane.active_job l WHERE l.seq = j.seq)) FROM fairlane.job j WHERE j.id = g.id),
        (SELECT r.state FROM fairlane.reserved_id r WHERE r.id = g.id)) ORDER BY g.ord)
    FROM unnest(p_ids) WITH ORDINALITY g(id, ord));
END $$;

-- One plain job that is due, in a queue without rules: the hottest path, with as few statements as possible. Anything unusual
-- is left to `enqueue`: then the answer is 0, and nothing was changed. Otherwise the answer is the sum of 1 (stored), 2
-- (workers should be notified) and 4 (they are, with the commit).
--
-- If another call has the locks, the job is arriving: the next claim, or the next enqueue that gets the locks, admits it. So
-- jobs that were stored one after the other arrive in that order, and no call is made only to admit.
CREATE FUNCTION fairlane.enqueue_one(p_id text, p_task text, p_queue text, p_payload bytea, p_channel text, p_lane text DEFAULT NULL,
    p_class smallint DEFAULT CLASS.NORMAL, p_cost double precision DEFAULT 1.0, p_expires double precision DEFAULT NULL,
    p_retries integer DEFAULT 3, p_backoff bytea DEFAULT NULL, p_timeout double precision DEFAULT NULL, p_pool text DEFAULT 'default',
    p_retry_of text DEFAULT NULL, p_headers bytea DEFAULT NULL, p_now double precision DEFAULT NULL,
    p_lease double precision DEFAULT NULL) RETURNS integer
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    v_now double precision := coalesce(p_now, extract(epoch FROM clock_timestamp()));
    v_space integer := fairlane.space();
    v_queue integer;
    v_seq bigint;
    v_domain bigint;
    v_flow bigint;
    v_tag bigint;
    v_finish bigint;
    v_place tid;
    v_clock bigint;
    v_first boolean;
    v_arrival bigint;
    v_older boolean;
    v_answer integer := 1;
BEGIN
    IF NOT fairlane.is_trusted() THEN
        PERFORM fairlane.moment_of(p_now, p_lease);
        PERFORM fairlane.check_new(p_id, p_task, p_queue, p_payload, p_lane, p_class, p_cost, NULL, NULL, p_expires, p_retries, p_backoff,
            p_timeout, p_pool, p_retry_of, p_headers);
    END IF;
    -- First the identity, then the locks if they are free, then the arrival.
    INSERT INTO fairlane.job AS n (id, task, queue, kind, class, lane, cost, payload, headers, retries, backoff, timeout, pool, retry_of,
        enqueued_at, expires)
    SELECT p_id, p_task, q.id, KIND.JOB, p_class, p_lane, p_cost, p_payload, p_headers, p_retries, p_backoff, p_timeout, p_pool, p_retry_of,
        v_now, p_expires
    FROM fairlane.queue q WHERE q.name = p_queue AND NOT q.ruled AND q.max_pending IS NULL AND q.closed IS NULL
    AND (SELECT r.id FROM fairlane.reserved_id r WHERE r.id = p_id) IS NULL
    ON CONFLICT (id) DO NOTHING RETURNING n.seq, n.queue, CASE WHEN pg_try_advisory_xact_lock_shared(v_space, 0)
        AND pg_try_advisory_xact_lock(v_space, n.queue) THEN nextval('fairlane.arrival') END,
        (SELECT a.seq FROM fairlane.active_job a WHERE a.queue = n.queue AND a.state = STATE.ARRIVING ORDER BY a.seq LIMIT 1) IS NOT NULL
    INTO v_seq, v_queue, v_arrival, v_older;
    IF v_seq IS NULL THEN
        RETURN 0;
    END IF;
    IF v_arrival IS NULL OR v_older THEN
        IF v_arrival IS NULL AND NOT fairlane.lock_beside(ARRAY[v_queue]) THEN
            v_answer := 3;
        ELSIF NOT fairlane.has_waiting(v_queue, p_class) THEN
            v_answer := 3;
        END IF;
        INSERT INTO fairlane.active_job (seq, queue, class, cost, state, gate, expires_at)
        VALUES (v_seq, v_queue, p_class, p_cost, STATE.ARRIVING, GATE.UNADMITTED, v_now + p_expires);
        IF p_expires IS NOT NULL THEN
            PERFORM fairlane.set_expiries(ARRAY[v_seq]);
        END IF;
        IF v_arrival IS NOT NULL THEN
            PERFORM fairlane.admit_arriving(ARRAY[v_queue], 1000, fairlane.moment_of(p_now, p_lease));
            PERFORM fairlane.drop_queue_topics();
            PERFORM pg_notify(p_channel, t) FROM unnest(fairlane.topics()) t WHERE p_channel IS NOT NULL AND NOT starts_with(t, 'job:');
        END IF;
        RETURN v_answer;
    ELSE
        IF p_lane IS NULL THEN
            v_flow := fairlane.bare_flow(v_queue, p_class);
            SELECT x.domain, x.flow, x.tag, x.finish, x.ctid, c.value, x.tag IS NULL AND (
                SELECT n.flow FROM fairlane.ready_lane n WHERE n.domain = x.domain AND n.tag >= c.value ORDER BY n.tag, n.head LIMIT 1) IS NULL
            INTO v_domain, v_flow, v_tag, v_finish, v_place, v_clock, v_first FROM (
                SELECT y.domain, y.flow, y.tag, y.finish, y.ctid FROM fairlane.lane_pace y WHERE y.flow >= v_flow AND y.flow <= v_flow
                ORDER BY y.flow DESC LIMIT 1) x
            LEFT JOIN LATERAL (SELECT y.value FROM fairlane.clock y WHERE x.tag IS NULL AND y.domain >= x.domain AND y.domain <= x.domain
                ORDER BY y.domain DESC LIMIT 1) c ON true;
        END IF;
        IF v_flow IS NULL THEN
            SELECT d.id, f.id, p.tag, p.finish, p.tid, c.value, p.tag IS NULL AND (
                SELECT n.flow FROM fairlane.ready_lane n WHERE n.domain = d.id AND n.tag >= c.value ORDER BY n.tag, n.head LIMIT 1) IS NULL
            INTO v_domain, v_flow, v_tag, v_finish, v_place, v_clock, v_first FROM fairlane.domain d
            CROSS JOIN LATERAL (SELECT y.value FROM fairlane.clock y WHERE y.domain >= d.id AND y.domain <= d.id
                ORDER BY y.domain DESC LIMIT 1) c
            LEFT JOIN fairlane.flow f ON f.domain = d.id AND f.lane = coalesce(p_lane, '')
            LEFT JOIN LATERAL (SELECT x.tag, x.finish, x.ctid AS tid FROM fairlane.lane_pace x WHERE x.flow >= f.id AND x.flow <= f.id
                ORDER BY x.flow DESC LIMIT 1) p ON true
            WHERE d.inbox = '' AND d.class = p_class AND d.queue = v_queue;
        END IF;
        IF v_tag IS NULL THEN
            -- In a lane that has claimable jobs, workers that could start it were notified of the first one, or are busy.
            v_answer := 3;
            -- Nothing was claimable: a worker is probably idle, and is notified with the commit. A NOTIFY makes commits wait
            -- for each other, so in a busy queue the caller sends it, together with others. It is part of the condition,
            -- because a statement of its own would cost more than the NOTIFY.
            IF p_channel IS NOT NULL AND coalesce(v_first, true) AND pg_notify(p_channel, 'queue:' || p_queue) IS NOT NULL THEN
                v_answer := 7;
            END IF;
        END IF;
        IF v_tag IS NULL AND v_flow IS NOT NULL THEN
            v_tag := greatest(v_finish, v_clock);
            WITH raised AS (
                UPDATE fairlane.lane_pace SET head = v_arrival, tag = v_tag WHERE ctid = v_place
            ), in_line AS (
                INSERT INTO fairlane.ready_lane (domain, tag, head, flow) VALUES (v_domain, v_tag, v_arrival, v_flow)
            ), counted AS (
                INSERT INTO fairlane.queue_count (queue, class, pending) VALUES (v_queue, p_class, 1)
            )
            INSERT INTO fairlane.active_job (seq, queue, class, cost, state, arrival, flow, granted, expires_at)
            VALUES (v_seq, v_queue, p_class, p_cost, STATE.PENDING, v_arrival, v_flow, true, v_now + p_expires);
        ELSE
            IF v_flow IS NULL THEN
                v_flow := fairlane.join_flow(v_queue, p_class, '', coalesce(p_lane, ''), v_arrival);
            END IF;
            WITH counted AS (
                INSERT INTO fairlane.queue_count (queue, class, pending) VALUES (v_queue, p_class, 1)
            )
            INSERT INTO fairlane.active_job (seq, queue, class, cost, state, arrival, flow, granted, expires_at)
            VALUES (v_seq, v_queue, p_class, p_cost, STATE.PENDING, v_arrival, v_flow, true, v_now + p_expires);
        END IF;
    END IF;
    IF p_expires IS NOT NULL THEN
        PERFORM fairlane.set_expiries(ARRAY[v_seq]);
    END IF;
    RETURN v_answer;
END $$;

-- Plain jobs, up to a thousand at once: the hot path. A NULL array stands for the default value; a single task or queue applies
-- to all jobs.
CREATE FUNCTION fairlane.enqueue(p_ids text[], p_tasks text[], p_queues text[], p_payloads bytea[], p_lanes text[], p_classes smallint[],
    p_costs double precision[], p_delays double precision[], p_run_ats double precision[], p_expires double precision[],
    p_retries integer[], p_backoffs bytea[], p_timeouts double precision[], p_pools text[], p_retry_ofs text[], p_headers bytea[],
    p_patience text, p_now double precision DEFAULT NULL, p_lease double precision DEFAULT NULL,
    OUT created boolean[], OUT states smallint[], OUT arriving boolean, OUT topics text[])
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    m fairlane.moment := fairlane.moment_of(p_now, p_lease);
    v_count integer := cardinality(p_ids);
    v_queues integer[];          -- the queue of each job, or the only queue
    v_distinct integer[];
    v_first bigint := nextval('fairlane.job_seq_seq');
    v_seqs bigint[];
    v_new text[];
    v_counted boolean := false;  -- whether a queue or lane limits its waiting jobs
    v_limited boolean := false;  -- whether a lane has a limit
    v_admit boolean;
    v_beside boolean;
    q fairlane.queue;
    j fairlane.job;
    i integer;
BEGIN
    IF NOT fairlane.is_trusted() THEN
        PERFORM fairlane.check_all_new(p_ids, p_tasks, p_queues, p_payloads, p_lanes, p_classes, p_costs, p_delays, p_run_ats, p_expires,
            p_retries, p_backoffs, p_timeouts, p_pools, p_retry_ofs, p_headers);
    END IF;
    -- A call that serves several callers must not make all of them wait for the id of one.
    PERFORM set_config('lock_timeout', p_patience, true);
    v_queues := fairlane.queue_numbers(p_queues);
    v_distinct := ARRAY(SELECT DISTINCT n FROM unnest(v_queues) n);
    FOR q IN SELECT x.* FROM fairlane.queue x WHERE x.id = ANY (v_distinct) LOOP
        v_counted := v_counted OR fairlane.is_counted(q);
        v_limited := v_limited OR (q.ruled AND fairlane.is_limited(q, p_lanes));
        IF q.closed IS NOT NULL THEN
            FOR i IN 1 .. v_count LOOP
                IF coalesce(v_queues[i], v_queues[1]) = q.id THEN
                    PERFORM fairlane.check_lane(q, p_lanes[i]);
                END IF;
            END LOOP;
        END IF;
    END LOOP;
    -- Ids increase with time, so one look-up of their range shows that none is reserved.
    IF NOT EXISTS (SELECT 1 FROM fairlane.reserved_id r WHERE r.id BETWEEN (SELECT min(g) FROM unnest(p_ids) g)
                   AND (SELECT max(g) FROM unnest(p_ids) g)) THEN
        -- Usually all ids are new. The numbers of a call are consecutive, in the order of the call; the rows are inserted in
        -- the order of their ids, as in every call (see `locks.sql`).
        BEGIN
            INSERT INTO fairlane.job (seq, id, task, queue, kind, class, lane, cost, payload, headers, retries, backoff, timeout, pool,
                retry_of, enqueued_at, delay, run_at, expires)
            SELECT v_first + g.i - 1, p_ids[g.i], coalesce(p_tasks[g.i], p_tasks[1]), coalesce(v_queues[g.i], v_queues[1]), KIND.JOB,
                coalesce(p_classes[g.i], CLASS.NORMAL), p_lanes[g.i], coalesce(p_costs[g.i], 1.0), p_payloads[g.i], p_headers[g.i],
                coalesce(p_retries[g.i], 3), p_backoffs[g.i], p_timeouts[g.i], coalesce(p_pools[g.i], 'default'), p_retry_ofs[g.i],
                m.now, p_delays[g.i], p_run_ats[g.i], p_expires[g.i]
            FROM (SELECT x.i FROM unnest(p_ids) WITH ORDINALITY x(id, i) ORDER BY x.id COLLATE "C") g;
            v_seqs := ARRAY(SELECT v_first + g.i - 1 FROM generate_series(1, v_count) g(i));
        EXCEPTION WHEN unique_violation THEN
            NULL;
        END;
    END IF;
    IF v_seqs IS NULL THEN
        WITH stored AS (
            INSERT INTO fairlane.job (seq, id, task, queue, kind, class, lane, cost, payload, headers, retries, backoff, timeout, pool,
                retry_of, enqueued_at, delay, run_at, expires)
            SELECT v_first + g.i - 1, p_ids[g.i], coalesce(p_tasks[g.i], p_tasks[1]), coalesce(v_queues[g.i], v_queues[1]), KIND.JOB,
                coalesce(p_classes[g.i], CLASS.NORMAL), p_lanes[g.i], coalesce(p_costs[g.i], 1.0), p_payloads[g.i], p_headers[g.i],
                coalesce(p_retries[g.i], 3), p_backoffs[g.i], p_timeouts[g.i], coalesce(p_pools[g.i], 'default'), p_retry_ofs[g.i],
                m.now, p_delays[g.i], p_run_ats[g.i], p_expires[g.i]
            FROM (SELECT x.i FROM unnest(p_ids) WITH ORDINALITY x(id, i) ORDER BY x.id COLLATE "C", x.i) g
            WHERE ((SELECT r.until FROM fairlane.reserved_id r WHERE r.id = p_ids[g.i]) > m.now) IS NOT TRUE
            ON CONFLICT (id) DO NOTHING RETURNING seq, id
        )
        SELECT array_agg(s.seq ORDER BY s.seq), array_agg(s.id ORDER BY s.seq) INTO v_seqs, v_new FROM stored s;
    ELSE
        v_new := p_ids;
    END IF;
    IF v_seqs IS NOT NULL THEN
        IF v_counted OR v_limited THEN
            -- Limits are checked against admitted jobs, so these jobs must be admitted now: wait for the locks.
            PERFORM set_config('lock_timeout', '0', true);
            PERFORM fairlane.lock_some(NULL, v_distinct);
            v_admit := true;
        ELSE
            v_admit := fairlane.try_lock(v_distinct);
        END IF;
        IF v_admit AND EXISTS (SELECT 1 FROM unnest(v_distinct) g WHERE (SELECT a.seq FROM fairlane.active_job a
                WHERE a.queue = g AND a.state = STATE.ARRIVING ORDER BY a.seq LIMIT 1) IS NOT NULL) THEN
            -- What was stored before arrives before. Workers were notified of it when it was stored.
            PERFORM fairlane.admit_arriving(v_distinct, 1000, fairlane.moment_of(p_now, p_lease));
            PERFORM fairlane.drop_queue_topics();
        ELSIF NOT v_admit THEN
            v_beside := fairlane.lock_beside(v_distinct);
            PERFORM fairlane.notify('queue:' || n.name) FROM (SELECT DISTINCT k.queue, k.class FROM unnest(v_seqs) g
                CROSS JOIN LATERAL (SELECT y.queue, y.class FROM fairlane.job y WHERE y.seq = g OFFSET 0) k) x
            CROSS JOIN LATERAL (SELECT y.name FROM fairlane.queue y WHERE y.id = x.queue OFFSET 0) n
            WHERE NOT v_beside OR NOT fairlane.has_waiting(x.queue, x.class);
        END IF;
        m := fairlane.moment_of(p_now, p_lease);
        IF v_counted OR v_limited THEN
            PERFORM fairlane.store_counted(v_seqs, v_counted, m);
        ELSIF v_admit AND p_delays IS NULL AND p_run_ats IS NULL AND cardinality(v_distinct) = 1 AND cardinality(v_new) = v_count
            AND (p_classes IS NULL OR p_classes[1] = ALL (p_classes)) THEN
            PERFORM fairlane.store_alike(v_seqs, v_distinct[1], coalesce(p_classes[1], CLASS.NORMAL), p_lanes, p_costs, p_expires, m);
        ELSE
            PERFORM fairlane.store_plain(v_seqs, v_admit, m);
        END IF;
    END IF;
    arriving := NOT coalesce(v_admit, true);
    -- `created` stays NULL if all jobs are new.
    IF cardinality(v_new) IS DISTINCT FROM v_count THEN
        created := array_fill(true, ARRAY[v_count]);
        FOR i IN 1 .. v_count LOOP
            IF p_ids[i] = ANY (v_new) THEN
                v_new := array_remove(v_new, p_ids[i]);  -- a second job with this id repeats the first
                CONTINUE;
            END IF;
            SELECT NULL::bigint, NULL::bigint, m.now, coalesce(p_costs[i], 1.0), p_timeouts[i], p_delays[i], p_run_ats[i], p_expires[i],
                coalesce(v_queues[i], v_queues[1]), coalesce(p_retries[i], 3), NULL::integer, coalesce(p_classes[i], CLASS.NORMAL), KIND.JOB, p_ids[i],
                coalesce(p_tasks[i], p_tasks[1]), coalesce(p_pools[i], 'default'), p_lanes[i], NULL::text, NULL::text, p_retry_ofs[i],
                p_backoffs[i], p_payloads[i], p_headers[i] INTO j;
            PERFORM fairlane.known(j, m);
            created[i] := false;
        END LOOP;
    END IF;
    -- `states` stays NULL if all jobs are pending.
    IF p_delays IS NOT NULL OR p_run_ats IS NOT NULL OR created IS NOT NULL THEN
        states := fairlane.states_of(p_ids);
    END IF;
    topics := fairlane.topics();
END $$;

-- The numbers of queues. New ones are created in the order of their names.
CREATE FUNCTION fairlane.queue_numbers(p_names text[]) RETURNS integer[] LANGUAGE plpgsql AS $$
DECLARE
    v_name text;
BEGIN
    IF cardinality(p_names) = 1 THEN
        RETURN ARRAY[fairlane.queue_number(p_names[1])];
    END IF;
    FOR v_name IN SELECT DISTINCT n FROM unnest(p_names) n ORDER BY n LOOP
        PERFORM fairlane.queue_number(v_name);
    END LOOP;
    RETURN ARRAY(SELECT (SELECT q.id FROM fairlane.queue q WHERE q.name = g.name)
                 FROM unnest(p_names) WITH ORDINALITY g(name, ord) ORDER BY g.ord);
END $$;
