-- The rows that are written after the identity of new jobs: together if the jobs are alike, otherwise one by one.

-- The active rows of new jobs of one queue and class that are due: the arrays of the call are used as they are. Their arrivals
-- are consecutive.
CREATE FUNCTION fairlane.store_alike(p_seqs bigint[], p_queue integer, p_class integer, p_lanes text[], p_costs double precision[],
    p_expires double precision[], m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    d fairlane.domain := fairlane.domain_for(p_queue, p_class, '');
    v_first bigint := nextval('fairlane.arrival');
    v_flows bigint[];
    v_heads bigint[];
BEGIN
    IF p_lanes IS NULL THEN
        v_flows := fairlane.flows_of(d, ARRAY['']);
        v_heads := ARRAY[v_first];
        INSERT INTO fairlane.active_job (seq, queue, class, cost, state, arrival, flow, granted, expires_at)
        SELECT p_seqs[g.i], p_queue, p_class, coalesce(p_costs[g.i], 1.0), STATE.PENDING, v_first + g.i - 1, v_flows[1], true, m.now + p_expires[g.i]
        FROM generate_series(1, cardinality(p_seqs)) g(i);
    ELSE
        v_flows := fairlane.flows_of(d, p_lanes);
        INSERT INTO fairlane.active_job (seq, queue, class, cost, state, arrival, flow, granted, expires_at)
        SELECT p_seqs[g.i], p_queue, p_class, coalesce(p_costs[g.i], 1.0), STATE.PENDING, v_first + g.i - 1, v_flows[g.i], true, m.now + p_expires[g.i]
        FROM generate_series(1, cardinality(p_seqs)) g(i);
        SELECT array_agg(x.flow ORDER BY x.flow), array_agg(x.head ORDER BY x.flow) INTO v_flows, v_heads FROM (
            SELECT g.flow, min(v_first + g.i - 1) AS head FROM unnest(v_flows) WITH ORDINALITY g(flow, i) GROUP BY g.flow) x;
    END IF;
    PERFORM fairlane.raise_heads(d, v_flows, v_heads);
    INSERT INTO fairlane.queue_count (queue, class, pending) VALUES (p_queue, p_class, cardinality(p_seqs));
    IF p_expires IS NOT NULL THEN
        PERFORM fairlane.set_expiries(p_seqs);
    END IF;
END $$;

-- The active rows of new plain jobs, as arriving. With `p_admit` they are admitted at once, otherwise by the next call that has
-- the locks: a claim, an enqueue or the admitter.
CREATE FUNCTION fairlane.store_plain(p_seqs bigint[], p_admit boolean, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO fairlane.active_job (seq, queue, class, cost, state, gate, due, expires_at)
    -- A job without a delay has no due time: the call that admits it may have read its clock a moment earlier, and would take
    -- it for scheduled.
    SELECT j.seq, j.queue, j.class, j.cost, STATE.ARRIVING, GATE.UNADMITTED, coalesce(j.run_at, m.now + nullif(j.delay, 0)), m.now + j.expires
    FROM unnest(p_seqs) g CROSS JOIN LATERAL (SELECT y.* FROM fairlane.job y WHERE y.seq = g OFFSET 0) j;
    PERFORM fairlane.set_expiries(p_seqs);
    IF p_admit THEN
        PERFORM fairlane.admit_jobs(p_seqs, m);
    END IF;
END $$;

CREATE FUNCTION fairlane.is_counted(q fairlane.queue) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT q.max_pending IS NOT NULL
        OR (q.ruled AND EXISTS (SELECT 1 FROM fairlane.rule r WHERE r.queue = q.id AND r.max_pending IS NOT NULL)));
END $$;

CREATE FUNCTION fairlane.is_limited(q fairlane.queue, p_lanes text[]) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT EXISTS (SELECT 1 FROM fairlane.rule r WHERE r.queue = q.id AND r.places IS NOT NULL)
        AND EXISTS (SELECT 1 FROM (SELECT DISTINCT g FROM unnest(p_lanes) g WHERE g IS NOT NULL) x
                    WHERE (fairlane.terms(q.id, x.g)).places IS NOT NULL));
END $$;

-- The same one by one, for lanes with a limit, and for queues and lanes that limit their waiting jobs.
CREATE FUNCTION fairlane.store_counted(p_seqs bigint[], p_count boolean, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_seq bigint;
    q fairlane.queue;
    j fairlane.job;
    l fairlane.active_job;
BEGIN
    FOREACH v_seq IN ARRAY p_seqs LOOP
        SELECT * INTO j FROM fairlane.job x WHERE x.seq = v_seq;
        IF q.id IS DISTINCT FROM j.queue THEN
            SELECT * INTO q FROM fairlane.queue x WHERE x.id = j.queue;
        END IF;
        IF p_count THEN
            PERFORM fairlane.check_room(q, j.lane, j.class);
        END IF;
        l := fairlane.new_active_job(j, m);
        PERFORM fairlane.count_move(l.queue, l.class, NULL, l.state);
        IF l.state = STATE.PENDING THEN
            l := fairlane.arrive(l, m);
        END IF;
        PERFORM fairlane.put(l);
    END LOOP;
END $$;

-- The active row of a job whose identity was just stored, scheduled or pending.
CREATE FUNCTION fairlane.new_active_job(j fairlane.job, m fairlane.moment) RETURNS fairlane.active_job LANGUAGE plpgsql AS $$
DECLARE
    l fairlane.active_job;
    v_due double precision := coalesce(j.run_at, m.now + coalesce(j.delay, 0));
BEGIN
    l.seq := j.seq;
    l.queue := j.queue;
    l.class := j.class;
    l.kind := j.kind;
    l.cost := j.cost;
    l.state := CASE WHEN v_due > m.now THEN STATE.SCHEDULED ELSE STATE.PENDING END;
    l.due := CASE WHEN v_due > m.now THEN v_due END;
    l.expires_at := m.now + j.expires;
    l.inbox := '';
    l.gate := GATE.NONE;
    l.rank := 0;
    l.fence := 0;
    l.attempt := 0;
    l.crashes := 0;
    l.refused := 0;
    l.paid := 0;
    l.granted := false;
    l.suspect := false;
    l.returns := 0;
    l.cancel := false;
    -- Ending a plain job affects only its lane, so many can be ended at once.
    l.plain := j.kind = KIND.JOB AND j.sticky IS NULL AND j.uniq IS NULL AND j.parent IS NULL;
    RETURN l;
END $$;

-- Jobs of any kind, one by one: turns, broadcasts, sticky and direct jobs, jobs with a unique value or of a schedule.
CREATE FUNCTION fairlane.enqueue_any(p_ids text[], p_tasks text[], p_queues text[], p_payloads bytea[], p_lanes text[],
    p_classes smallint[], p_costs double precision[], p_delays double precision[], p_run_ats double precision[],
    p_expires double precision[], p_retries integer[], p_backoffs bytea[], p_timeouts double precision[], p_pools text[],
    p_retry_ofs text[], p_headers bytea[], p_kinds smallint[], p_uniques text[], p_unique_fors double precision[], p_stickies text[],
    p_workers integer[], p_waiters text[], p_ttls double precision[], p_crons text[], p_slots double precision[],
    p_now double precision DEFAULT NULL, p_lease double precision DEFAULT NULL,
    OUT ids text[], OUT created boolean[], OUT states smallint[], OUT topics text[])
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    m fairlane.moment := fairlane.moment_of(p_now, p_lease);
    j fairlane.job;
    q fairlane.queue;
    v_numbers integer[] := '{}';
    v_seqs bigint[] := ARRAY(SELECT nextval('fairlane.job_seq_seq') FROM unnest(p_ids));
    v_holder text;
    v_name text;
    i integer;
BEGIN
    IF NOT fairlane.is_trusted() THEN
        PERFORM fairlane.check_all_new(p_ids, p_tasks, p_queues, p_payloads, p_lanes, p_classes, p_costs, p_delays, p_run_ats, p_expires,
            p_retries, p_backoffs, p_timeouts, p_pools, p_retry_ofs, p_headers);
        PERFORM fairlane.check_kinds(p_kinds, p_uniques, p_unique_fors, p_stickies, p_workers, p_ttls, p_crons);
    END IF;
    ids := p_ids;
    created := array_fill(false, ARRAY[cardinality(p_ids)]);
    -- Names in the order of all calls; see `locks.sql`.
    FOR v_name IN SELECT DISTINCT n FROM unnest(p_queues) n ORDER BY n LOOP
        PERFORM fairlane.queue_number(v_name);
    END LOOP;
    FOR i IN SELECT g.ord FROM unnest(p_ids) WITH ORDINALITY g(id, ord) ORDER BY g.id COLLATE "C", g.ord LOOP
        j := NULL;
        SELECT v_seqs[i], NULL, m.now, coalesce(p_costs[i], 1.0), p_timeouts[i], p_delays[i], p_run_ats[i],
            p_expires[i], fairlane.queue_number(p_queues[i]), coalesce(p_retries[i], 3), p_workers[i], coalesce(p_classes[i], CLASS.NORMAL),
            coalesce(p_kinds[i], KIND.JOB), p_ids[i], p_tasks[i], coalesce(p_pools[i], 'default'), p_lanes[i], p_stickies[i], p_uniques[i],
            p_retry_ofs[i], p_backoffs[i], p_payloads[i], p_headers[i] INTO j;
        created[i] := fairlane.store_identity(j, m);
    END LOOP;
    FOR i IN SELECT g.ord FROM unnest(p_tasks, p_uniques, created) WITH ORDINALITY g(task, value, new, ord)
             WHERE g.value IS NOT NULL AND g.new ORDER BY g.task COLLATE "C", g.value COLLATE "C", g.ord LOOP
        SELECT * INTO j FROM fairlane.job x WHERE x.seq = v_seqs[i];
        v_holder := fairlane.hold_unique(j, m.now + p_unique_fors[i], m);
        IF v_holder IS NOT NULL THEN
            PERFORM fairlane.forget(ARRAY[j.seq]);
            ids := array_replace(ids, j.id, v_holder);  -- also if the call names it a second time
            created[i] := false;
        END IF;
    END LOOP;
    FOR v_name, i IN SELECT g.cron, g.ord FROM unnest(p_crons, created, ids, p_ids) WITH ORDINALITY g(cron, new, id, given, ord)
                     WHERE g.cron IS NOT NULL AND (g.new OR g.id <> g.given) ORDER BY g.cron, g.ord LOOP
        UPDATE fairlane.schedule SET last_slot = greatest(coalesce(last_slot, 0), p_slots[i]) WHERE name = v_name;
    END LOOP;
    v_numbers := ARRAY(SELECT x.queue FROM fairlane.job x WHERE x.seq = ANY (v_seqs));
    PERFORM set_config('lock_timeout', '0', true);
    PERFORM fairlane.lock_for(v_seqs, v_numbers);
    m := fairlane.moment_of(p_now, p_lease);
    FOR i IN 1 .. cardinality(p_ids) LOOP
        CONTINUE WHEN NOT created[i];
        SELECT * INTO j FROM fairlane.job x WHERE x.seq = v_seqs[i];
        SELECT * INTO q FROM fairlane.queue x WHERE x.id = j.queue;
        PERFORM fairlane.check_lane(q, j.lane);
        PERFORM fairlane.check_room(q, j.lane, j.class);
        PERFORM fairlane.store_any(j, q, p_waiters[i], coalesce(p_ttls[i], 0), m);
    END LOOP;
    states := fairlane.states_of(ids);
    topics := fairlane.topics();
END $$;

-- Store the identity of a job. False if its id is taken, with the same content.
CREATE FUNCTION fairlane.store_identity(j fairlane.job, m fairlane.moment) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF fairlane.known(j, m) IS NOT NULL THEN
        RETURN false;
    END IF;
    INSERT INTO fairlane.job SELECT j.* ON CONFLICT (id) DO NOTHING;
    IF NOT FOUND THEN
        PERFORM fairlane.known(j, m);
        RETURN false;
    END IF;
    PERFORM fairlane.link_job(j);
    RETURN true;
END $$;

-- Insert the link rows of a new job (sticky key, parent).
CREATE FUNCTION fairlane.link_job(j fairlane.job) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF j.sticky IS NOT NULL THEN
        INSERT INTO fairlane.job_link (kind, key, seq) VALUES ('s', j.sticky, j.seq);
    END IF;
    IF j.parent IS NOT NULL THEN
        INSERT INTO fairlane.job_link (kind, key, seq) VALUES ('p', j.parent::text, j.seq);
    END IF;
END $$;

-- Remove identities.
CREATE FUNCTION fairlane.forget(p_seqs bigint[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM fairlane.job WHERE seq = ANY (p_seqs);
    DELETE FROM fairlane.job_link WHERE seq = ANY (p_seqs);
END $$;

-- The children of a broadcast.
CREATE FUNCTION fairlane.children_of(p_parent bigint) RETURNS SETOF bigint LANGUAGE plpgsql STABLE ROWS 10 AS $$
BEGIN
    RETURN QUERY SELECT r.seq FROM fairlane.job_link r WHERE r.kind = 'p' AND r.key = p_parent::text;
END $$;

-- Take a unique value for a job. Returns the id of the job that already has it, or NULL if this job has it now.
CREATE FUNCTION fairlane.hold_unique(j fairlane.job, p_until double precision, m fairlane.moment) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_holder text;
BEGIN
    LOOP
        -- The row of a job that has the value is only read: ending that job, which releases the value, must not wait for this
        -- step.
        SELECT h.id INTO v_holder FROM fairlane.holder_of(j, m) h;
        IF v_holder IS NOT NULL OR fairlane.take_unique(j, p_until, m) THEN
            RETURN v_holder;
        END IF;
    END LOOP;
END $$;

-- Store the active row of a job of any kind, and start what depends on it.
CREATE FUNCTION fairlane.store_any(j fairlane.job, q fairlane.queue, p_waiter text, p_ttl double precision, m fairlane.moment)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    l fairlane.active_job := fairlane.new_active_job(j, m);
BEGIN
    IF j.kind = KIND.TURN THEN
        IF (fairlane.terms(j.queue, j.lane)).places IS NULL THEN
            PERFORM fairlane.refuse('FL008', format(
                'a turn needs a lane with a limit; set one with app.queue(%L).lane(%L, limit=1)', q.name, j.lane), 'lane');
        END IF;
        SELECT s.seq INTO l.waiter FROM fairlane.session s WHERE s.id = p_waiter AND s.state IN ('live', 'stopping') FOR SHARE;
        IF NOT FOUND THEN
            PERFORM fairlane.refuse('FL008', 'the session that waits is not live; register it first', 'waiter');
        END IF;
    END IF;
    IF j.kind = KIND.BROADCAST THEN
        l.state := STATE.RUNNING;
        l.gate := GATE.PARENT;
        l.started_at := m.now;
        l.due := CASE WHEN p_ttl > 0 THEN m.now + p_ttl END;
    END IF;
    PERFORM fairlane.count_move(l.queue, l.class, NULL, l.state, (j.kind = KIND.BROADCAST)::integer);
    IF l.state = STATE.PENDING THEN
        l := fairlane.admit_job(l, m);
    END IF;
    PERFORM fairlane.put(l);
    IF j.kind = KIND.BROADCAST THEN
        PERFORM fairlane.begin_broadcast(l.seq, p_ttl, m);
    END IF;
END $$;

-- A digest of what must be equal in two requests with the same id, for ids that outlive their jobs. Headers are not included: a
-- repeated request has another trace. Numbers and bytes are encoded so that no session setting affects them. An id stands for
-- the content that was enqueued, also after a retry has replaced the payload.
CREATE FUNCTION fairlane.fingerprint(j fairlane.job) RETURNS bytea LANGUAGE sql STABLE AS $$
    SELECT coalesce(j.fingerprint, sha256(convert_to(ROW(j.task, (SELECT q.name FROM fairlane.queue q WHERE q.id = j.queue), j.kind, j.class, j.lane,
        encode(float8send(j.cost), 'hex'), encode(sha256(j.payload), 'hex'), j.retries, encode(j.backoff, 'hex'),
        encode(float8send(j.timeout), 'hex'), j.uniq, j.pool, j.sticky, j.direct, j.retry_of, encode(float8send(j.delay), 'hex'),
        encode(float8send(j.run_at), 'hex'), encode(float8send(j.expires), 'hex'))::text, 'UTF8')))
$$;
