-- Writes of sessions about jobs they hold, fenced by (job, fence, session), and the claim that may follow in the same call: a
-- busy worker needs one round trip.

-- Free `p_freed` places of each lane and grant them again, with few statements: the hot path of limited lanes. Usually one
-- place passes from one plain job to the next of its lane, or no job waits; every other case takes the general way. `p_flows`,
-- `p_classes`: the flow and class of a job that freed a place, if it was in no inbox. The next job is usually in the same flow,
-- which then need not be looked up.
CREATE FUNCTION fairlane.hand_on_all(p_lanes bigint[], p_freed integer[], p_flows bigint[], p_classes smallint[], m fairlane.moment)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_unwanted bigint[];
    v_long bigint[];
    v_counted bigint[];      -- sorted: lanes whose count changes, and by how much (`v_by`)
    v_by integer[];
    v_seqs bigint[];         -- sorted: the jobs that get a place, and their flows
    v_flows bigint[];
    v_raised bigint[];       -- sorted: those flows that had no claimable job, and their new heads
    v_heads bigint[];
    v_paces tid[];
    v_domains bigint[];      -- sorted: the domains of `v_raised`
    v_clocks bigint[];
    v_bare bigint[];         -- those of `v_domains` without any claimable job
    v_boxed boolean;         -- whether one of the jobs is in an inbox
    v_lane bigint;
BEGIN
    -- `simple`: one place is free, and the next waiting job is ungated, no turn, and comes after the claimable jobs of its
    -- flow.
    SELECT array_agg(n.id) FILTER (WHERE w.seq IS NULL AND x.none_waits), array_agg(n.id) FILTER (WHERE NOT x.simple AND NOT x.none_waits),
        array_agg(n.id ORDER BY n.id) FILTER (WHERE g.freed - x.simple::integer <> 0),
        array_agg(g.freed - x.simple::integer ORDER BY n.id) FILTER (WHERE g.freed - x.simple::integer <> 0),
        array_agg(w.seq ORDER BY w.seq) FILTER (WHERE x.simple), array_agg(p.flow ORDER BY w.seq) FILTER (WHERE x.simple),
        array_agg(p.flow ORDER BY p.flow) FILTER (WHERE x.simple AND p.tag IS NULL),
        array_agg(w.arrival ORDER BY p.flow) FILTER (WHERE x.simple AND p.tag IS NULL),
        array_agg(p.tid) FILTER (WHERE x.simple AND p.tag IS NULL),
        array_agg(DISTINCT p.domain) FILTER (WHERE x.simple AND p.tag IS NULL),
        bool_or(w.inbox <> '') FILTER (WHERE x.simple)
    INTO v_unwanted, v_long, v_counted, v_by, v_seqs, v_flows, v_raised, v_heads, v_paces, v_domains, v_boxed
    FROM unnest(p_lanes, p_freed, p_flows, p_classes) g(lane, freed, flow, class)
    CROSS JOIN LATERAL (SELECT y.* FROM fairlane.lane y WHERE y.id = g.lane OFFSET 0) n
    LEFT JOIN LATERAL (SELECT y.seq, y.arrival, y.inbox, y.class, y.state, y.gate, y.waiter FROM fairlane.active_job y
        WHERE y.lane = n.id AND y.lane IS NOT NULL AND NOT y.granted AND y.session IS NULL AND (y.expires_at IS NULL OR y.expires_at > m.now)
        ORDER BY y.rank, y.arrival LIMIT 1) w ON true
    LEFT JOIN LATERAL (SELECT y.flow, y.domain, y.tag, y.head, y.ctid AS tid FROM fairlane.lane_pace y
        CROSS JOIN LATERAL (SELECT CASE WHEN g.class = w.class AND w.inbox = '' THEN g.flow ELSE (
            SELECT f.id FROM fairlane.flow f WHERE f.lane = n.key AND f.domain = (
                SELECT d.id FROM fairlane.domain d WHERE d.inbox = w.inbox AND d.class = w.class AND d.queue = n.queue)) END AS flow OFFSET 0) i
        WHERE y.flow >= i.flow AND y.flow <= i.flow ORDER BY y.flow DESC LIMIT 1) p ON true
    CROSS JOIN LATERAL (SELECT
        coalesce(w.waiter IS NULL AND w.state = STATE.PENDING AND w.gate = GATE.NONE AND n.places - n.granted + g.freed = 1
            AND p.flow IS NOT NULL AND (p.tag IS NULL OR p.head < w.arrival), false) AS simple,
        w.seq IS NULL AND (SELECT y.seq FROM fairlane.active_job y WHERE y.lane = n.id AND y.lane IS NOT NULL AND NOT y.granted AND y.session IS NULL LIMIT 1)
            IS NULL AS none_waits OFFSET 0) x;
    -- A place that passes from one job to the next does not change the count of the lane.
    IF v_counted IS NOT NULL THEN
        UPDATE fairlane.lane u SET granted = u.granted - v_by[width_bucket(u.id, v_counted)] WHERE u.id = ANY (v_counted);
    END IF;
    IF v_seqs IS NOT NULL THEN
        UPDATE fairlane.active_job u SET granted = true, flow = v_flows[width_bucket(u.seq, v_seqs)],
            granted_at = CASE WHEN u.inbox <> '' THEN m.now END
        WHERE u.seq = ANY (v_seqs);
        IF v_raised IS NOT NULL THEN
            v_bare := ARRAY(SELECT g FROM unnest(v_domains) g WHERE fairlane.next_flow(g) IS NULL);
            v_clocks := ARRAY(SELECT fairlane.clock_of(g.domain) FROM unnest(v_domains) WITH ORDINALITY g(domain, ord) ORDER BY g.ord);
            WITH raised AS (
                UPDATE fairlane.lane_pace u SET tag = greatest(u.finish, v_clocks[width_bucket(u.domain, v_domains)]),
                    head = v_heads[width_bucket(u.flow, v_raised)]
                WHERE u.ctid = ANY (v_paces) RETURNING u.flow, u.domain, u.tag, u.head
            )
            INSERT INTO fairlane.ready_lane (domain, tag, head, flow) SELECT x.domain, x.tag, x.head, x.flow FROM raised x;
            -- In domains that had claimable jobs before, workers were notified then, or are busy.
            PERFORM fairlane.notify_ready(d.queue, d.inbox) FROM fairlane.domain d WHERE d.id = ANY (v_bare);
        END IF;
        IF v_boxed THEN
            UPDATE fairlane.job_extra SET granted_at = m.now WHERE seq = ANY (v_seqs) AND inbox <> '';
        END IF;
    END IF;
    IF v_unwanted IS NOT NULL THEN
        DELETE FROM fairlane.lane u WHERE u.id = ANY (v_unwanted) AND u.granted = 0;
    END IF;
    IF v_long IS NOT NULL THEN
        FOREACH v_lane IN ARRAY v_long LOOP
            PERFORM fairlane.hand_on(v_lane, m);
        END LOOP;
    END IF;
END $$;

-- The verdict on a write by a session that does not hold the job: repeated (1) or stale (2). `p_move` NULL: a progress report.
-- A rejected write is not counted if another call holds the row: that lock would be out of order.
CREATE FUNCTION fairlane.judge(p_session text, p_id text, p_fence integer, p_move smallint, OUT acceptance smallint, OUT state smallint)
LANGUAGE plpgsql AS $$
DECLARE
    r record;
    a fairlane.attempt;
BEGIN
    acceptance := 2;
    SELECT j.seq, o.state AS final, l.state AS live, l.fence AS live_fence, o.fence, o.move, s.id AS session INTO r
    FROM fairlane.job j LEFT JOIN fairlane.active_job l ON l.seq = j.seq LEFT JOIN fairlane.outcome o ON o.seq = j.seq
    LEFT JOIN fairlane.session s ON s.seq = o.session WHERE j.id = p_id;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    state := coalesce(r.final, r.live);
    IF r.fence = p_fence AND r.move IS NOT NULL THEN
        -- A requested cancel replaces every move except a completion.
        IF r.session = p_session AND p_move IS NOT NULL AND (r.move = p_move OR (r.move = MOVE.CANCEL AND p_move <> MOVE.COMPLETE)) THEN
            acceptance := 1;
        ELSE
            UPDATE fairlane.outcome SET refused = refused + 1 WHERE ctid = (
                SELECT x.ctid FROM fairlane.outcome x WHERE x.seq = r.seq FOR UPDATE SKIP LOCKED);
        END IF;
        RETURN;
    END IF;
    SELECT * INTO a FROM fairlane.attempt x WHERE x.seq = r.seq AND x.fence = p_fence;
    IF FOUND THEN
        IF a.session = p_session AND p_move IS NOT NULL AND (
            a.outcome = (ARRAY['completed', 'failed', 'retry', 'snoozed', 'handed_back', 'crashed', 'taken_back', 'cancelled', 'declined'])[p_move - MOVE.CLAIM]
            OR (a.outcome = 'cancelled' AND p_move <> MOVE.COMPLETE)) THEN
            acceptance := 1;
            state := CASE a.state WHEN 'scheduled' THEN STATE.SCHEDULED WHEN 'pending' THEN STATE.PENDING WHEN 'completed' THEN STATE.COMPLETED WHEN 'failed' THEN STATE.FAILED ELSE STATE.CANCELLED END;
        ELSE
            UPDATE fairlane.attempt SET refused = refused + 1 WHERE ctid = (
                SELECT x.ctid FROM fairlane.attempt x WHERE x.seq = r.seq AND x.fence = p_fence FOR UPDATE SKIP LOCKED);
        END IF;
    ELSIF r.live_fence = p_fence THEN
        UPDATE fairlane.active_job SET refused = refused + 1 WHERE ctid = (
            SELECT x.ctid FROM fairlane.active_job x WHERE x.seq = r.seq AND x.state = STATE.RUNNING FOR UPDATE SKIP LOCKED);
    END IF;
END $$;

-- Apply one transition of the holder. A requested cancel replaces every move except a completion.
CREATE FUNCTION fairlane.apply(l fairlane.active_job, p_move smallint, p_delay double precision, p_result bytea, p_reason text, p_error text,
    p_group text, p_payload bytea, p_holder text, p_worker text, m fairlane.moment) RETURNS smallint LANGUAGE plpgsql AS $$
DECLARE
    v_state smallint;
BEGIN
    IF l.cancel AND p_move <> MOVE.COMPLETE THEN
        p_move := MOVE.CANCEL;
        p_reason := 'by_user';
    ELSIF l.kind = KIND.TURN AND p_move = MOVE.RETRY THEN
        p_move := MOVE.FAIL;
    ELSIF l.kind = KIND.TURN AND p_move IN (MOVE.SNOOZE, MOVE.HAND_BACK, MOVE.TAKE_BACK, MOVE.DECLINE) THEN
        p_move := MOVE.CANCEL;
        p_reason := 'by_user';
    END IF;
    IF p_move = MOVE.HAND_BACK THEN
        RETURN fairlane.hand_back(l, p_holder, p_worker, m);
    ELSIF p_move = MOVE.TAKE_BACK THEN
        RETURN fairlane.take_back(l, p_holder, p_worker, MOVE.TAKE_BACK::smallint, p_delay, m);
    ELSIF p_move = MOVE.DECLINE THEN
        RETURN fairlane.decline(l, p_delay, p_reason, p_error, p_group, p_holder, p_worker, m);
    ELSIF p_move IN (MOVE.RETRY, MOVE.SNOOZE) THEN
        v_state := CASE WHEN p_delay > 0 THEN STATE.SCHEDULED ELSE STATE.PENDING END;
        l := fairlane.record_attempt(l, p_holder, p_worker, p_move, CASE WHEN p_delay > 0 THEN 'scheduled' ELSE 'pending' END,
            p_reason, p_error, m);
        IF p_move = MOVE.SNOOZE THEN
            l.attempt := l.attempt - 1;
        END IF;
        IF p_payload IS NOT NULL THEN
            UPDATE fairlane.job j SET payload = p_payload, fingerprint = fairlane.fingerprint(j) WHERE j.seq = l.seq;
        END IF;
        PERFORM fairlane.go_again(l, p_delay, p_reason IS NOT DISTINCT FROM 'crashed', m);
        RETURN v_state;
    END IF;
    v_state := CASE p_move WHEN MOVE.COMPLETE THEN STATE.COMPLETED WHEN MOVE.FAIL THEN STATE.FAILED ELSE STATE.CANCELLED END;
    PERFORM fairlane.end_job(l, v_state, p_reason, p_result, p_error, p_group, p_move, m);
    RETURN v_state;
END $$;

-- Apply transitions. Plain jobs that complete are written together, which is the hot path and takes no queue lock for lanes
-- without a limit. `p_seqs`: where to look first (0: look up by id). `p_moves` NULL: all complete. `freed`: how many jobs of
-- each class the session no longer holds, for the caller to subtract from its load. `p_sources`: the queues the caller claims
-- from afterwards, NULL if it does not claim. If any queue is locked here, those are locked too, because later nothing may be
-- waited for; `locked`: all of them, or NULL.
CREATE FUNCTION fairlane.finish_jobs(s fairlane.session, p_sources text[], p_ids text[], p_seqs bigint[], p_fences integer[], p_moves smallint[],
    p_results bytea[], p_delays double precision[], p_reasons text[], p_errors text[], p_groups text[], p_payloads bytea[],
    p_now double precision, p_lease double precision, OUT acceptances smallint[], OUT states smallint[], OUT freed integer[], OUT locked integer[]) LANGUAGE plpgsql AS $$
DECLARE
    l fairlane.active_job;
    m fairlane.moment;
    v_holder bigint := -1;
    v_done bigint[];
    v_completed record;
    v_queues integer[];
    v_lane_queues integer[];
    v_bindings bigint[];
    v_judged record;
    i integer;
BEGIN
    IF s.state IN ('live', 'stopping') THEN
        v_holder := s.seq;
    END IF;
    IF 0 = ANY (p_seqs) THEN
        p_seqs := ARRAY(SELECT CASE WHEN g.seq > 0 THEN g.seq ELSE coalesce((SELECT j.seq FROM fairlane.job j WHERE j.id = g.id), 0) END
            FROM unnest(p_ids, p_seqs) WITH ORDINALITY g(id, seq, ord) ORDER BY g.ord);
    END IF;
    -- Anything but a plain completion needs locks. What they depend on cannot change meanwhile: only a call that holds the
    -- store exclusively changes the lane or the binding of a running job.
    SELECT array_agg(DISTINCT r.queue) FILTER (WHERE NOT r.plain OR p_moves IS NOT NULL),
        array_agg(DISTINCT r.queue) FILTER (WHERE r.lane IS NOT NULL), array_agg(r.binding) FILTER (WHERE r.binding IS NOT NULL)
    INTO v_queues, v_lane_queues, v_bindings FROM fairlane.active_job r WHERE r.seq = ANY (p_seqs) AND r.session = v_holder;
    IF v_queues IS NOT NULL THEN
        -- Rows of running jobs are locked before pools and queues. A call that only completes jobs locks them by deleting them,
        -- in the same order.
        PERFORM 1 FROM fairlane.active_job r WHERE r.seq = ANY (p_seqs) AND r.session = v_holder ORDER BY r.seq FOR UPDATE;
    END IF;
    m.now := coalesce(p_now, extract(epoch FROM clock_timestamp()));
    m.lease := coalesce(p_lease, m.now);
    v_completed := fairlane.complete_jobs(v_holder, p_seqs, p_fences, p_moves, p_results, m);
    v_done := v_completed.done;
    freed := v_completed.freed;
    IF v_queues IS NULL AND cardinality(v_done) = 0 THEN
        -- Jobs that are applied one by one need it too, for example when a job is named twice.
        PERFORM 1 FROM fairlane.active_job r WHERE r.seq = ANY (p_seqs) AND r.session = v_holder ORDER BY r.seq FOR UPDATE;
    END IF;
    v_queues := v_queues || v_lane_queues;
    IF v_bindings IS NOT NULL THEN
        -- Ending a bound job may open the gate of other jobs of its binding, in any queue.
        PERFORM fairlane.lock_some(ARRAY(SELECT b.pool FROM fairlane.binding b WHERE b.seq = ANY (v_bindings)), NULL);
        v_queues := v_queues || ARRAY(SELECT DISTINCT w.queue FROM fairlane.job_extra a
            JOIN fairlane.active_job w ON w.seq = a.seq WHERE a.binding = ANY (v_bindings));
    END IF;
    IF v_queues IS NOT NULL THEN
        IF p_sources IS NOT NULL THEN
            v_queues := v_queues || fairlane.source_queues(s, p_sources);
        END IF;
        locked := ARRAY(SELECT DISTINCT g FROM unnest(v_queues) g);
        PERFORM fairlane.lock_some(NULL, locked);
        -- Read after the locks, so that a later call has a later time.
        m.now := coalesce(p_now, extract(epoch FROM clock_timestamp()));
        m.lease := coalesce(p_lease, m.now);
    END IF;
    IF v_completed.lanes IS NOT NULL THEN
        PERFORM fairlane.hand_on_all(v_completed.lanes, v_completed.vacated, v_completed.flows, v_completed.classes, m);
    END IF;
    acceptances := array_fill(0::smallint, ARRAY[cardinality(p_ids)]);
    states := array_fill(STATE.COMPLETED::smallint, ARRAY[cardinality(p_ids)]);
    IF cardinality(v_done) < cardinality(p_ids) THEN
        FOR i IN 1 .. cardinality(p_ids) LOOP
            IF p_seqs[i] = ANY (v_done) AND coalesce(p_moves[i], 3) = 3 THEN
                -- A second transition of the same job is judged by what the first has stored.
                v_done := array_remove(v_done, p_seqs[i]);
                CONTINUE;
            END IF;
            SELECT * INTO l FROM fairlane.active_job r WHERE r.seq = p_seqs[i] AND r.session = v_holder AND r.fence = p_fences[i] FOR UPDATE;
            IF FOUND THEN
                states[i] := fairlane.apply(l, coalesce(p_moves[i], MOVE.COMPLETE::smallint), coalesce(p_delays[i], 0), p_results[i], p_reasons[i],
                    p_errors[i], p_groups[i], p_payloads[i], s.id, CASE WHEN s.idx IS NULL THEN s.host ELSE s.pool || '/' || s.idx END, m);
            ELSE
                v_judged := fairlane.judge(s.id, p_ids[i], p_fences[i], coalesce(p_moves[i], MOVE.COMPLETE::smallint));
                acceptances[i] := v_judged.acceptance;
                states[i] := v_judged.state;
            END IF;
        END LOOP;
    END IF;
END $$;

-- Complete the plain jobs among those of a session. Returns their numbers, and how many there were of each class. Waits for no
-- lock except those of the jobs. The freed places of limited lanes are returned in the form that `hand_on_all` takes; the
-- caller grants them once it has locked the queues.
CREATE FUNCTION fairlane.complete_jobs(p_holder bigint, p_seqs bigint[], p_fences integer[], p_moves smallint[], p_results bytea[],
    m fairlane.moment, OUT done bigint[], OUT freed integer[], OUT lanes bigint[], OUT vacated integer[], OUT flows bigint[],
    OUT classes smallint[]) LANGUAGE plpgsql AS $$
DECLARE
    v_asked bigint[];  -- sorted, so that a job's fence and result are found by binary search
    v_fences integer[];
    v_results bytea[];
    v_queues integer[];
    v_aside bigint[];
BEGIN
    done := '{}';
    freed := '{0,0,0}';
    SELECT array_agg(g.seq ORDER BY g.seq), array_agg(g.fence ORDER BY g.seq), array_agg(g.result ORDER BY g.seq)
    INTO v_asked, v_fences, v_results FROM unnest(p_seqs, p_fences, p_moves, p_results) g(seq, fence, move, result)
    WHERE g.move = MOVE.COMPLETE OR p_moves IS NULL;
    -- A second transition of the same job is judged by what the first has stored, so these are applied one by one.
    IF v_asked IS NULL OR (SELECT count(DISTINCT g) FROM unnest(v_asked) g) < cardinality(v_asked) THEN
        RETURN;
    END IF;
    WITH gone AS (
        DELETE FROM fairlane.active_job r WHERE r.seq = ANY (v_asked) AND r.session = p_holder AND r.plain
        AND r.fence = v_fences[width_bucket(r.seq, v_asked)]
        RETURNING r.seq, r.queue, r.class, r.lane, r.granted, CASE WHEN r.inbox = '' THEN r.flow END AS flow, r.arrival, r.attempt, r.fence, r.started_at, r.refused,
            r.expires_at IS NOT NULL OR r.inbox <> '' AS aside
    ), kept AS (
        INSERT INTO fairlane.outcome (seq, queue, state, result, session, move, arrival, attempt, fence, started_at, finished_at, refused)
        SELECT g.seq, g.queue, STATE.COMPLETED, v_results[width_bucket(g.seq, v_asked)], p_holder, MOVE.COMPLETE, g.arrival, g.attempt, g.fence, g.started_at,
            m.now, g.refused FROM gone g
    ), counted AS (
        INSERT INTO fairlane.queue_count (queue, class, running, completed)
        SELECT g.queue, g.class, -count(*), count(*) FROM gone g GROUP BY g.queue, g.class
    )
    SELECT array_agg(g.seq), array_agg(DISTINCT g.queue), array_agg(g.lane) FILTER (WHERE g.lane IS NOT NULL),
        array_agg(g.granted::integer) FILTER (WHERE g.lane IS NOT NULL), array_agg(g.flow) FILTER (WHERE g.lane IS NOT NULL),
        array_agg(g.class) FILTER (WHERE g.lane IS NOT NULL),
        ARRAY[count(*) FILTER (WHERE g.class = CLASS.HIGH), count(*) FILTER (WHERE g.class = CLASS.NORMAL), count(*) FILTER (WHERE g.class = CLASS.LOW)],
        array_agg(g.seq) FILTER (WHERE g.aside)
    INTO done, v_queues, lanes, vacated, flows, classes, freed, v_aside FROM gone g;
    IF done IS NULL THEN
        done := '{}';
        RETURN;
    END IF;
    IF v_aside IS NOT NULL THEN
        DELETE FROM fairlane.job_extra WHERE seq = ANY (v_aside);
    END IF;
    PERFORM fairlane.notify_waiting(q.id) FROM fairlane.queue q WHERE q.id = ANY (v_queues) AND q.slots IS NOT NULL;
    IF lanes IS NOT NULL AND (SELECT count(DISTINCT g) FROM unnest(lanes) g) < cardinality(lanes) THEN
        SELECT array_agg(x.lane), array_agg(x.freed), array_agg(x.flow), array_agg(x.class)
        INTO lanes, vacated, flows, classes FROM (
            SELECT g.lane, sum(g.freed)::integer AS freed, (array_agg(g.flow))[1] AS flow, (array_agg(g.class))[1] AS class
            FROM unnest(lanes, vacated, flows, classes) g(lane, freed, flow, class) GROUP BY g.lane) x;
    END IF;
END $$;

-- Create new identities for active jobs that have lost theirs, which only damage can cause, so that they can be found and
-- ended. The payload is one that cannot run: the job fails when it is claimed. `p_seqs` NULL: all such jobs. Returns the new
-- ids.
CREATE FUNCTION fairlane.adopt(p_seqs bigint[]) RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    v_ids text[];
BEGIN
    WITH lost AS (
        INSERT INTO fairlane.job (seq, id, uniq, task, queue, kind, class, lane, cost, payload, retries, pool, enqueued_at)
        SELECT l.seq, 'lost-' || l.seq, (SELECT u.value FROM fairlane.held_unique u WHERE u.seq = l.seq),
            coalesce((SELECT u.task FROM fairlane.held_unique u WHERE u.seq = l.seq), 'lost'), l.queue, l.kind, l.class, coalesce((SELECT nullif(f.lane, '') FROM fairlane.flow f
            WHERE f.id = l.flow), (SELECT n.key FROM fairlane.lane n WHERE n.id = l.lane)), 1.0, '', 0, 'default',
            coalesce(l.started_at, extract(epoch FROM clock_timestamp()))
        FROM fairlane.active_job l WHERE (p_seqs IS NULL OR l.seq = ANY (p_seqs))
        AND (SELECT j.seq FROM fairlane.job j WHERE j.seq = l.seq) IS NULL
        RETURNING id
    )
    SELECT array_agg(x.id) INTO v_ids FROM lost x;
    RETURN coalesce(v_ids, '{}');
END $$;

-- How long a job waited for its first start, from when it was due.
CREATE FUNCTION fairlane.waited(p_started_at double precision, p_enqueued_at double precision, p_delay double precision,
    p_run_at double precision) RETURNS double precision LANGUAGE sql IMMUTABLE AS $$
    SELECT greatest(0, p_started_at - greatest(p_enqueued_at + coalesce(p_delay, 0), p_run_at)) $$;

-- Finish, claim, or both in one step. Without ids nothing is finished; without a number nothing is claimed. `p_payloads`: new
-- payloads of retries, NULL if there are none.
CREATE FUNCTION fairlane.exchange(p_session text, p_ids text[], p_seqs bigint[], p_fences integer[], p_moves smallint[],
    p_results bytea[], p_delays double precision[], p_reasons text[], p_errors text[], p_groups text[], p_number bigint,
    p_total integer, p_ask_queues text[], p_ask_classes smallint[], p_ask_mosts integer[], p_ask_belows integer[],
    p_bytes bigint DEFAULT 1048576, p_now double precision DEFAULT NULL, p_lease double precision DEFAULT NULL,
    p_payloads bytea[] DEFAULT NULL, OUT acceptances smallint[], OUT states smallint[], OUT seqs bigint[], OUT ids text[], OUT fences integer[], OUT attempts integer[],
    OUT tasks text[], OUT queues text[], OUT lanes text[], OUT classes smallint[], OUT payloads bytea[], OUT retries integer[],
    OUT backoffs bytea[], OUT timeouts double precision[], OUT kinds smallint[], OUT stickies text[], OUT suspects boolean[],
    OUT limited boolean[], OUT headers bytea[], OUT waits double precision[], OUT topics text[])
LANGUAGE plpgsql AS $$
DECLARE
    s fairlane.session;
    r record;
    v_freed integer[] := '{0,0,0}';
    v_locked integer[];
    v_counted boolean := false;
BEGIN
    -- From here on no call can declare the session dead, or pause a queue.
    PERFORM pg_advisory_xact_lock_shared(fairlane.space(), 0);
    SELECT * INTO s FROM fairlane.session x WHERE x.id = p_session;
    IF cardinality(p_ids) > 0 THEN
        r := fairlane.finish_jobs(s, CASE WHEN p_number IS NOT NULL AND p_total > 0 THEN p_ask_queues END, p_ids, p_seqs, p_fences, p_moves, p_results, p_delays, p_reasons, p_errors, p_groups, p_payloads,
            p_now, p_lease);
        acceptances := r.acceptances;
        states := r.states;
        v_freed := r.freed;
        v_locked := r.locked;
    END IF;
    IF p_number IS NOT NULL THEN
        r := fairlane.claim_jobs(s, v_freed, v_locked, p_number, p_total, p_ask_queues, p_ask_classes, p_ask_mosts, p_ask_belows, p_bytes,
            p_now, p_lease);
        seqs := r.taken;
        v_counted := r.counted;
        -- Read again if an identity was missing and has been replaced.
        WHILE cardinality(seqs) > 0 LOOP
            SELECT array_agg(x.id), array_agg(x.fence), array_agg(x.attempt), array_agg(x.task), array_agg(x.queue), array_agg(x.lane),
                array_agg(x.class), array_agg(x.payload), array_agg(x.retries), array_agg(x.backoff), array_agg(x.timeout),
                array_agg(x.kind), array_agg(x.sticky), array_agg(x.suspect), array_agg(x.limited), array_agg(x.headers),
                array_agg(CASE WHEN x.fence = 1 THEN fairlane.waited(x.started_at, x.enqueued_at, x.delay, x.run_at) END)
            INTO ids, fences, attempts, tasks, queues, lanes, classes, payloads, retries, backoffs, timeouts, kinds, stickies, suspects,
                limited, headers, waits
            FROM (SELECT j.*, l.fence, l.attempt, l.suspect, l.limited, l.started_at, (SELECT q.name FROM fairlane.queue q WHERE q.id = l.number) AS queue
                  FROM unnest(seqs) WITH ORDINALITY g(seq, ord)
                  CROSS JOIN LATERAL (SELECT y.fence, y.attempt, y.suspect, y.lane IS NOT NULL AS limited, y.queue AS number,
                      y.started_at FROM fairlane.active_job y WHERE y.seq = g.seq OFFSET 0) l
                  LEFT JOIN LATERAL (SELECT y.id, y.task, y.lane, y.class, y.payload, y.retries, y.backoff, y.timeout, y.kind, y.sticky,
                      y.headers, y.enqueued_at, y.delay, y.run_at FROM fairlane.job y WHERE y.seq = g.seq OFFSET 0) j ON true
                  ORDER BY g.ord) x;
            EXIT WHEN array_position(ids, NULL) IS NULL OR fairlane.adopt(seqs) = '{}';
        END LOOP;
    END IF;
    IF NOT v_counted AND v_freed <> '{0,0,0}' THEN
        PERFORM fairlane.lighten(s.seq, v_freed[1], v_freed[2], v_freed[3]);
    END IF;
    IF current_setting('fairlane_step.topics', true) <> '' THEN
        topics := fairlane.topics();
    END IF;
END $$;

-- Store the latest progress of running jobs.
CREATE FUNCTION fairlane.report(p_session text, p_ids text[], p_fences integer[], p_values bytea[],
    p_now double precision DEFAULT NULL, p_lease double precision DEFAULT NULL, OUT acceptances smallint[],
    OUT states smallint[], OUT topics text[])
LANGUAGE plpgsql AS $$
DECLARE
    v_seq bigint;
    v_judged record;
    i integer;
BEGIN
    acceptances := '{}';
    states := '{}';
    -- Under this lock no call takes jobs away from the session, and other calls lock jobs in the same order.
    PERFORM pg_advisory_xact_lock_shared(fairlane.space(), 0);
    FOR i IN SELECT g.ord FROM unnest(p_ids) WITH ORDINALITY g(id, ord)
             ORDER BY (SELECT j.seq FROM fairlane.job j WHERE j.id = g.id), g.ord LOOP
        SELECT l.seq INTO v_seq FROM fairlane.job j JOIN fairlane.active_job l ON l.seq = j.seq JOIN fairlane.session s ON s.seq = l.session
        WHERE j.id = p_ids[i] AND l.fence = p_fences[i] AND s.id = p_session AND s.state IN ('live', 'stopping') FOR SHARE OF l;
        IF FOUND THEN
            INSERT INTO fairlane.progress (seq, value) VALUES (v_seq, p_values[i])
            ON CONFLICT (seq) DO UPDATE SET value = excluded.value;
            acceptances[i] := 0;
            states[i] := STATE.RUNNING;
            PERFORM fairlane.notify('job:' || p_ids[i]);
        ELSE
            v_judged := fairlane.judge(p_session, p_ids[i], p_fences[i], NULL);
            acceptances[i] := v_judged.acceptance;
            states[i] := v_judged.state;
        END IF;
    END LOOP;
    topics := fairlane.topics();
END $$;
