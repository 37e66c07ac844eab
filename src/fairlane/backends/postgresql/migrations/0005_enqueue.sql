-- How jobs come in. The identity is written first, because that is where an enqueue can have to wait: for somebody's open
-- transaction with the same id or unique value, two seconds at most. The locks come after it, so that nobody else waits
-- for that transaction too.

-- The flows of lanes in a domain. A look-up by itself for each, so that no plan can turn it into a walk over all flows.
CREATE FUNCTION fairlane.make_flows(d fairlane.domain, p_lanes text[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_ruled boolean;
BEGIN
    SELECT q.ruled INTO v_ruled FROM fairlane.queue q WHERE q.id = d.queue;
    INSERT INTO fairlane.flow (domain, lane, weight)
    SELECT d.id, x.lane, CASE WHEN v_ruled AND x.lane <> '' THEN (fairlane.terms(d.queue, x.lane)).weight ELSE 1.0 END
    FROM (SELECT DISTINCT g AS lane FROM unnest(p_lanes) g) x
    WHERE (SELECT f.id FROM fairlane.flow f WHERE f.domain = d.id AND f.lane = x.lane) IS NULL;
END $$;

-- Flows that had nothing claimable get the tag and the head of what has just arrived.
-- Whoever could start something is told then; in a lane that has claimable jobs already he was told before, or is busy.
CREATE FUNCTION fairlane.raise_heads(d fairlane.domain, p_seqs bigint[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_flows bigint[];
    v_heads bigint[];
BEGIN
    SELECT array_agg(x.flow), array_agg(x.arrival) INTO v_flows, v_heads FROM (
        SELECT l.flow, min(l.arrival) AS arrival FROM fairlane.live l WHERE l.seq = ANY (p_seqs) GROUP BY l.flow) x;
    WITH raised AS (
        UPDATE fairlane.flow u SET tag = greatest(d.clock, u.finish), head = v_heads[array_position(v_flows, u.id)]
        WHERE u.id = ANY (v_flows) AND u.tag IS NULL RETURNING u.id, u.tag, u.head
    )
    INSERT INTO fairlane.line (domain, tag, head, flow) SELECT d.id, r.tag, r.head, r.id FROM raised r;
    IF FOUND THEN
        PERFORM fairlane.tell_ready(d.queue, d.inbox);
    END IF;
END $$;

-- Answer the ids that are taken: the same content is a repetition, other content a conflict.
CREATE FUNCTION fairlane.known(p_new fairlane.job, m fairlane.moment) RETURNS smallint LANGUAGE plpgsql AS $$
DECLARE
    j fairlane.job;
    v_print bytea;
    v_state smallint;
BEGIN
    SELECT * INTO j FROM fairlane.job x WHERE x.id = p_new.id;
    IF FOUND THEN
        v_print := fairlane.fingerprint(j);
        SELECT coalesce(o.state, l.state) INTO v_state FROM (SELECT 1) one LEFT JOIN fairlane.live l ON l.seq = j.seq
        LEFT JOIN fairlane.outcome o ON o.seq = j.seq;
    ELSE
        SELECT r.fingerprint, r.state INTO v_print, v_state FROM fairlane.remembered r WHERE r.id = p_new.id AND r.until > m.now;
        IF NOT FOUND THEN
            RETURN NULL;
        END IF;
    END IF;
    IF v_print <> fairlane.fingerprint(p_new) THEN
        PERFORM fairlane.refuse('FL002', format('job %L exists already with other content; choose another id', p_new.id));
    END IF;
    RETURN v_state;
END $$;

-- Refuse what a queue does not take. Counting is for the few queues that have `max_pending`.
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
        SELECT sum(t.scheduled + t.pending) INTO v_waiting FROM fairlane.tally t WHERE t.queue = q.id;
        IF v_waiting >= q.max_pending THEN
            PERFORM fairlane.refuse('FL003', format('queue %L has %s jobs waiting and takes at most %s', q.name, v_waiting,
                q.max_pending), jsonb_build_object('queue', q.name, 'class', p_class)::text);
        END IF;
    END IF;
    IF q.ruled AND p_lane IS NOT NULL THEN
        v_rule := fairlane.terms(q.id, p_lane);
        IF v_rule.max_pending IS NOT NULL THEN
            v_waiting := fairlane.lane_load(q.id, p_lane, v_rule.max_pending);
            IF v_waiting >= v_rule.max_pending THEN
                PERFORM fairlane.refuse('FL003', format('lane %L of queue %L has %s jobs waiting and takes at most %s', p_lane,
                    q.name, v_waiting, v_rule.max_pending),
                    jsonb_build_object('queue', q.name, 'class', p_class, 'lane', p_lane, 'limit', v_rule.places)::text);
            END IF;
        END IF;
    END IF;
END $$;

-- Jobs that wait in a lane: those without a place, the claimable ones, and those behind a gate; each counted up to a bound.
CREATE FUNCTION fairlane.lane_load(p_queue integer, p_lane text, p_most integer) RETURNS bigint LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT (SELECT count(*) FROM (SELECT 1 FROM fairlane.lane n JOIN fairlane.live l ON l.lane = n.id
            WHERE n.queue = p_queue AND n.key = p_lane AND l.lane IS NOT NULL AND NOT l.granted LIMIT p_most) x)
        + (SELECT count(*) FROM (SELECT 1 FROM fairlane.domain d JOIN fairlane.flow f ON f.domain = d.id AND f.lane = p_lane
            JOIN fairlane.live l ON l.flow = f.id WHERE d.queue = p_queue AND l.flow IS NOT NULL AND l.session IS NULL LIMIT p_most) x)
        + (SELECT count(*) FROM (SELECT 1 FROM fairlane.live l JOIN fairlane.job j ON j.seq = l.seq
            WHERE l.gate > 0 AND l.granted AND l.queue = p_queue AND j.lane = p_lane LIMIT p_most) x));
END $$;

CREATE FUNCTION fairlane.states_of(p_ids text[]) RETURNS smallint[] LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT array_agg(coalesce(
        (SELECT coalesce((SELECT o.state FROM fairlane.outcome o WHERE o.seq = j.seq),
                         (SELECT l.state FROM fairlane.live l WHERE l.seq = j.seq)) FROM fairlane.job j WHERE j.id = g.id),
        (SELECT r.state FROM fairlane.remembered r WHERE r.id = g.id)) ORDER BY g.ord)
    FROM unnest(p_ids) WITH ORDINALITY g(id, ord));
END $$;

-- One plain job that is due, in a queue without rules: the hottest path, with as few statements as it needs. Everything
-- unusual is left to `enqueue`: then `seq` is NULL and nothing was done.
CREATE FUNCTION fairlane.enqueue_one(p_id text, p_task text, p_queue text, p_payload bytea, p_lane text, p_class smallint,
    p_cost double precision, p_expires double precision, p_retries integer, p_backoff bytea, p_timeout double precision, p_pool text,
    p_retry_of text, p_headers bytea, p_channel text, p_now double precision DEFAULT NULL, p_lease double precision DEFAULT NULL,
    OUT seq bigint, OUT arriving boolean, OUT first boolean, OUT told boolean)
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET lock_timeout = '2s' AS $$
DECLARE
    v_now double precision := coalesce(p_now, extract(epoch FROM clock_timestamp()));
    v_queue integer;
    v_clock bigint;
    v_domain bigint;
    v_flow bigint;
    v_tag bigint;
    v_arrival bigint;
    v_space integer := fairlane.space();
BEGIN
    arriving := false;
    first := true;
    told := false;
    SELECT q.id INTO v_queue FROM fairlane.queue q
    WHERE q.name = p_queue AND NOT q.ruled AND q.max_pending IS NULL AND q.closed IS NULL;
    IF NOT FOUND OR EXISTS (SELECT 1 FROM fairlane.remembered r WHERE r.id = p_id) THEN
        RETURN;
    END IF;
    INSERT INTO fairlane.job AS j (id, task, queue, kind, class, lane, cost, payload, headers, retries, backoff, timeout, pool, retry_of,
        enqueued_at, expires)
    VALUES (p_id, p_task, v_queue, 0, p_class, p_lane, p_cost, p_payload, p_headers, p_retries, p_backoff, p_timeout, p_pool, p_retry_of,
        v_now, p_expires)
    ON CONFLICT (id) DO NOTHING RETURNING j.seq INTO seq;
    IF seq IS NULL THEN
        RETURN;
    END IF;
    IF NOT (pg_try_advisory_xact_lock_shared(v_space, 0) AND pg_try_advisory_xact_lock(v_space, v_queue)) THEN
        INSERT INTO fairlane.live (seq, queue, class, cost, state, gate, expires_at)
        VALUES (enqueue_one.seq, v_queue, p_class, p_cost, 0, 3, v_now + p_expires);
        arriving := true;
        RETURN;
    END IF;
    v_arrival := nextval('fairlane.arrival');
    SELECT d.id, d.clock, f.id, f.tag INTO v_domain, v_clock, v_flow, v_tag FROM fairlane.domain d
    LEFT JOIN fairlane.flow f ON f.domain = d.id AND f.lane = coalesce(p_lane, '')
    WHERE d.inbox = '' AND d.class = p_class AND d.queue = v_queue;
    IF v_tag IS NULL AND (v_domain IS NULL OR fairlane.next_flow(v_domain, v_clock) IS NULL) THEN
        -- Nothing at all was claimable: somebody is probably idle, and hears of it with the commit. A NOTIFY makes commits
        -- wait for each other, so in a queue that is busy the caller sends it, together with others.
        PERFORM pg_notify(p_channel, 'queue:' || p_queue);
        told := true;
    END IF;
    IF v_flow IS NULL THEN
        v_flow := fairlane.join_flow(v_queue, p_class, '', coalesce(p_lane, ''), v_arrival);
    ELSIF v_tag IS NULL THEN
        UPDATE fairlane.flow SET tag = greatest(v_clock, finish), head = v_arrival WHERE id = v_flow RETURNING tag INTO v_tag;
        INSERT INTO fairlane.line VALUES (v_domain, v_tag, v_arrival, v_flow);
    ELSE
        -- Whoever could start it has been told when the lane got its first claimable job, or is busy.
        first := false;
    END IF;
    INSERT INTO fairlane.live (seq, queue, class, cost, state, arrival, flow, granted, expires_at)
    VALUES (enqueue_one.seq, v_queue, p_class, p_cost, 2, v_arrival, v_flow, true, v_now + p_expires);
    INSERT INTO fairlane.tally (queue, class, pending) VALUES (v_queue, p_class, 1);
END $$;

-- Plain jobs, up to a thousand at once: the hot path. An array that is NULL means the usual value for all.
CREATE FUNCTION fairlane.enqueue(p_ids text[], p_tasks text[], p_queues text[], p_payloads bytea[], p_lanes text[], p_classes smallint[],
    p_costs double precision[], p_delays double precision[], p_run_ats double precision[], p_expires double precision[],
    p_retries integer[], p_backoffs bytea[], p_timeouts double precision[], p_pools text[], p_retry_ofs text[], p_headers bytea[],
    p_patience text, p_now double precision DEFAULT NULL, p_lease double precision DEFAULT NULL,
    OUT created boolean[], OUT states smallint[], OUT arriving boolean, OUT topics text[])
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off SET join_collapse_limit = 1 SET from_collapse_limit = 1 SET enable_material = off SET lock_timeout = '2s' AS $$
DECLARE
    m fairlane.moment := fairlane.moment_of(p_now, p_lease);
    v_queues integer[];
    v_seqs bigint[];
    v_new text[];
    v_counted boolean := false;  -- somebody counts what waits
    v_limited boolean := false;  -- there are lanes with a limit among them
    v_admit boolean;
    q fairlane.queue;
    j fairlane.job;
    v_name text;
    i integer;
BEGIN
    -- Whoever sends for several does not let all of them wait for the id of one.
    PERFORM set_config('lock_timeout', p_patience, true);
    FOR v_name IN SELECT DISTINCT n FROM unnest(p_queues) n ORDER BY n LOOP
        v_queues := v_queues || fairlane.queue_number(v_name);
    END LOOP;
    FOR q IN SELECT x.* FROM fairlane.queue x WHERE x.id = ANY (v_queues) LOOP
        v_counted := v_counted OR fairlane.is_counted(q);
        v_limited := v_limited OR (q.ruled AND fairlane.is_limited(q, p_lanes));
        IF q.closed IS NOT NULL THEN
            FOR i IN 1 .. cardinality(p_ids) LOOP
                IF p_queues[i] = q.name THEN
                    PERFORM fairlane.check_lane(q, p_lanes[i]);
                END IF;
            END LOOP;
        END IF;
    END LOOP;
    -- The numbers are given first, in the order of the call.
    WITH stored AS (
        INSERT INTO fairlane.job (seq, id, task, queue, kind, class, lane, cost, payload, headers, retries, backoff, timeout, pool,
            retry_of, enqueued_at, delay, run_at, expires)
        SELECT nextval('fairlane.job_seq_seq'), g.id, g.task,
            CASE WHEN cardinality(v_queues) = 1 THEN v_queues[1] ELSE (SELECT y.id FROM fairlane.queue y WHERE y.name = g.queue) END,
            0, coalesce(g.class, 1), g.lane, coalesce(g.cost, 1.0), g.payload, g.headers, coalesce(g.retries, 3), g.backoff, g.timeout,
            coalesce(g.pool, 'default'), g.retry_of, m.now, g.delay, g.run_at, g.expires
        FROM (SELECT * FROM unnest(p_ids, p_tasks, p_queues, p_payloads, p_lanes, p_classes, p_costs, p_delays, p_run_ats, p_expires,
                p_retries, p_backoffs, p_timeouts, p_pools, p_retry_ofs, p_headers) WITH ORDINALITY
                x(id, task, queue, payload, lane, class, cost, delay, run_at, expires, retries, backoff, timeout, pool, retry_of,
                headers, ord) ORDER BY ord OFFSET 0) g
        WHERE ((SELECT r.until FROM fairlane.remembered r WHERE r.id = g.id) > m.now) IS NOT TRUE
        ON CONFLICT (id) DO NOTHING RETURNING seq, id
    )
    SELECT array_agg(s.seq ORDER BY s.seq), array_agg(s.id ORDER BY s.seq) INTO v_seqs, v_new FROM stored s;
    IF v_seqs IS NOT NULL THEN
        IF v_counted OR v_limited THEN
            -- Whoever is told its place must have one: such jobs wait for the locks.
            PERFORM set_config('lock_timeout', '0', true);
            PERFORM fairlane.lock_some(NULL, v_queues);
            v_admit := true;
        ELSE
            v_admit := fairlane.try_lock(v_queues);
        END IF;
        m := fairlane.moment_of(p_now, p_lease);
        IF v_counted OR v_limited THEN
            PERFORM fairlane.store_counted(v_seqs, v_counted, m);
        ELSIF v_admit AND p_delays IS NULL AND p_run_ats IS NULL AND cardinality(v_queues) = 1
            AND cardinality(v_new) = cardinality(p_ids)
            AND (p_classes IS NULL OR p_classes[1] = ALL (p_classes)) THEN
            PERFORM fairlane.store_alike(v_seqs, q, coalesce(p_classes[1], 1), p_lanes, p_costs, p_expires, m);
        ELSE
            PERFORM fairlane.store_plain(v_seqs, v_admit, m);
        END IF;
    END IF;
    arriving := NOT coalesce(v_admit, true);
    created := array_fill(true, ARRAY[cardinality(p_ids)]);
    IF cardinality(v_new) IS DISTINCT FROM cardinality(p_ids) THEN
        FOR i IN 1 .. cardinality(p_ids) LOOP
            IF p_ids[i] = ANY (v_new) THEN
                v_new := array_remove(v_new, p_ids[i]);  -- a second one with this id repeats the first
                CONTINUE;
            END IF;
            SELECT NULL::bigint, NULL::bigint, m.now, coalesce(p_costs[i], 1.0), p_timeouts[i], p_delays[i], p_run_ats[i], p_expires[i],
                y.id, coalesce(p_retries[i], 3), NULL::integer, coalesce(p_classes[i], 1), 0, p_ids[i], p_tasks[i],
                coalesce(p_pools[i], 'default'), p_lanes[i], NULL::text, NULL::text, p_retry_ofs[i], p_backoffs[i], p_payloads[i],
                p_headers[i] INTO j FROM fairlane.queue y WHERE y.name = p_queues[i];
            PERFORM fairlane.known(j, m);
            created[i] := false;
        END LOOP;
    END IF;
    -- No states: all of them are pending.
    IF p_delays IS NOT NULL OR p_run_ats IS NOT NULL OR false = ANY (created) THEN
        states := fairlane.states_of(p_ids);
    END IF;
    topics := fairlane.topics();
END $$;

-- The live rows of new jobs that are due, of one queue and class: the arrays of the call are used as they are.
CREATE FUNCTION fairlane.store_alike(p_seqs bigint[], q fairlane.queue, p_class integer, p_lanes text[], p_costs double precision[],
    p_expires double precision[], m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    d fairlane.domain := fairlane.domain_for(q.id, p_class, '');
    v_flow bigint;
BEGIN
    IF p_lanes IS NULL THEN
        SELECT f.id INTO v_flow FROM fairlane.flow f WHERE f.domain = d.id AND f.lane = '';
        IF v_flow IS NULL THEN
            INSERT INTO fairlane.flow (domain, lane) VALUES (d.id, '') RETURNING id INTO v_flow;
        END IF;
    ELSE
        PERFORM fairlane.make_flows(d, ARRAY(SELECT coalesce(g, '') FROM unnest(p_lanes) g));
    END IF;
    INSERT INTO fairlane.live (seq, queue, class, cost, state, arrival, flow, granted, expires_at)
    SELECT x.seq, q.id, p_class, coalesce(x.cost, 1.0), 2, nextval('fairlane.arrival'),
        coalesce(v_flow, (SELECT f.id FROM fairlane.flow f WHERE f.domain = d.id AND f.lane = coalesce(x.lane, ''))), true,
        m.now + x.expires
    FROM (SELECT * FROM unnest(p_seqs, p_lanes, p_costs, p_expires) WITH ORDINALITY g(seq, lane, cost, expires, ord)
          ORDER BY g.ord OFFSET 0) x;
    PERFORM fairlane.raise_heads(d, p_seqs);
    INSERT INTO fairlane.tally (queue, class, pending) VALUES (q.id, p_class, cardinality(p_seqs));
END $$;

-- The live rows of new plain jobs, as they come. Not admitted: the next claim or the granter does it.
CREATE FUNCTION fairlane.store_plain(p_seqs bigint[], p_admit boolean, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO fairlane.live (seq, queue, class, cost, state, gate, due, expires_at)
    -- Due now is no time at all: the clock of whoever admits it may have been read a moment before.
    SELECT j.seq, j.queue, j.class, j.cost, 0, 3, coalesce(j.run_at, m.now + nullif(j.delay, 0)), m.now + j.expires
    FROM unnest(p_seqs) g CROSS JOIN LATERAL (SELECT y.* FROM fairlane.job y WHERE y.seq = g OFFSET 0) j;
    IF p_admit THEN
        PERFORM fairlane.let_in(p_seqs, m);
    ELSE
        PERFORM fairlane.tell('queue:' || q.name) FROM fairlane.queue q WHERE q.id = ANY (ARRAY(
            SELECT DISTINCT l.queue FROM fairlane.live l WHERE l.seq = ANY (p_seqs)));
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

-- The same one by one, for lanes with a limit and for queues and lanes that bound what waits.
CREATE FUNCTION fairlane.store_counted(p_seqs bigint[], p_count boolean, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_seq bigint;
    q fairlane.queue;
    j fairlane.job;
    l fairlane.live;
BEGIN
    FOREACH v_seq IN ARRAY p_seqs LOOP
        SELECT * INTO j FROM fairlane.job x WHERE x.seq = v_seq;
        IF q.id IS DISTINCT FROM j.queue THEN
            SELECT * INTO q FROM fairlane.queue x WHERE x.id = j.queue;
        END IF;
        IF p_count THEN
            PERFORM fairlane.check_room(q, j.lane, j.class);
        END IF;
        l := fairlane.new_live(j, m);
        PERFORM fairlane.tally_move(l.queue, l.class, NULL, l.state);
        IF l.state = 2 THEN
            l := fairlane.arrive(l, m);
        END IF;
        INSERT INTO fairlane.live SELECT l.*;
    END LOOP;
END $$;

-- The live row of a job that was stored just now, scheduled or pending.
CREATE FUNCTION fairlane.new_live(j fairlane.job, m fairlane.moment) RETURNS fairlane.live LANGUAGE plpgsql AS $$
DECLARE
    l fairlane.live;
    v_due double precision := coalesce(j.run_at, m.now + coalesce(j.delay, 0));
BEGIN
    l.seq := j.seq;
    l.queue := j.queue;
    l.class := j.class;
    l.kind := j.kind;
    l.cost := j.cost;
    l.state := CASE WHEN v_due > m.now THEN 1 ELSE 2 END;
    l.due := CASE WHEN v_due > m.now THEN v_due END;
    l.expires_at := m.now + j.expires;
    l.inbox := '';
    l.gate := 0;
    l.rank := 0;
    l.fence := 0;
    l.attempt := 0;
    l.crashes := 0;
    l.refused := 0;
    l.paid := 0;
    l.granted := false;
    l.suspect := false;
    l.cancel := false;
    -- Its end concerns nobody but its lane, so that many can be ended at once.
    l.plain := j.kind = 0 AND j.sticky IS NULL AND j.uniq IS NULL AND j.parent IS NULL;
    RETURN l;
END $$;
