-- The leader's passes over due and arriving jobs. A pass first reads without locks, and then locks only the queues and pools of
-- what it found: a pass that finds nothing writes nothing.

-- Cancel expired jobs, then promote due ones: by class, then due time, then id. `next_due`: seconds until there is something to
-- do again.
CREATE FUNCTION fairlane.promote(p_limit integer, p_term bigint, p_now double precision DEFAULT NULL,
    p_lease double precision DEFAULT NULL, OUT promoted integer, OUT expired integer, OUT more boolean,
    OUT next_due double precision, OUT late double precision, OUT topics text[], OUT queues text[])
LANGUAGE plpgsql AS $$
DECLARE
    m fairlane.moment := fairlane.moment_of(p_now, p_lease);
    l fairlane.active_job;
    v_expired bigint[];
    v_due bigint[] := '{}';
    v_over bigint[];
    v_seq bigint;
BEGIN
    PERFORM fairlane.check_term(p_term, false, m);
    topics := '{}';
    promoted := 0;
    expired := 0;
    v_expired := ARRAY(SELECT a.seq FROM fairlane.job_extra a
        CROSS JOIN LATERAL (SELECT x.state FROM fairlane.active_job x WHERE x.seq = a.seq OFFSET 0) y
        WHERE a.expires_at <= m.now AND y.state IN (STATE.SCHEDULED, STATE.PENDING) ORDER BY a.expires_at LIMIT p_limit);
    FOR c IN CLASS.HIGH .. CLASS.LOW LOOP
        v_due := v_due || ARRAY(SELECT y.seq FROM (
                SELECT x.seq, x.due FROM fairlane.job_extra x WHERE x.class = c AND x.scheduled AND x.due <= m.now
                ORDER BY x.due LIMIT p_limit - cardinality(v_due)) y
            CROSS JOIN LATERAL (SELECT i.id FROM fairlane.job i WHERE i.seq = y.seq OFFSET 0) j ORDER BY y.due, j.id COLLATE "C");
    END LOOP;
    v_over := ARRAY(SELECT x.seq FROM fairlane.job_extra x WHERE x.gate = GATE.PARENT AND x.due <= m.now LIMIT p_limit);
    more := p_limit IN (cardinality(v_expired), cardinality(v_due), cardinality(v_over));
    IF cardinality(v_expired || v_due || v_over) > 0 THEN
        PERFORM fairlane.lock_for(v_expired || v_due || v_over);
        m := fairlane.moment_of(p_now, p_lease);
        PERFORM fairlane.check_term(p_term, true, m);
        -- First in bulk, then one by one; among the latter, jobs that hold a place of a lane come last.
        v_expired := ARRAY(SELECT x.seq FROM fairlane.active_job x WHERE x.seq = ANY (v_expired) AND x.state IN (STATE.SCHEDULED, STATE.PENDING)
            AND x.expires_at <= m.now ORDER BY x.granted, x.expires_at FOR UPDATE SKIP LOCKED);
        topics := ARRAY(SELECT 'job:' || j.id FROM fairlane.job j WHERE j.seq = ANY (v_expired));
        expired := fairlane.end_waiting(v_expired, 'expired', m);
        FOREACH v_seq IN ARRAY v_expired LOOP
            -- Read one by one: the end of one job can make another claimable, such as a clean-up or a job behind it.
            SELECT * INTO l FROM fairlane.active_job x WHERE x.seq = v_seq AND x.state IN (STATE.SCHEDULED, STATE.PENDING) AND x.expires_at <= m.now
            FOR UPDATE SKIP LOCKED;
            IF FOUND THEN
                PERFORM fairlane.end_job(l, STATE.CANCELLED::smallint, 'expired', NULL, NULL, NULL, NULL, m);
                expired := expired + 1;
            END IF;
        END LOOP;
        late := m.now - (SELECT min(x.due) FROM fairlane.job_extra x WHERE x.seq = ANY (v_due));
        promoted := fairlane.admit_jobs(v_due, m);
        IF promoted = 0 THEN
            late := NULL;
        END IF;
        PERFORM fairlane.close_joining(v_over, m);
        topics := topics || fairlane.topics() || ARRAY(SELECT 'job:' || j.id FROM fairlane.job j WHERE j.seq = ANY (v_due));
        -- Also those without a topic, because they had claimable jobs before.
        queues := ARRAY(SELECT q.name FROM fairlane.queue q WHERE q.id IN (
            SELECT x.queue FROM fairlane.active_job x WHERE x.seq = ANY (v_due)));
    END IF;
    SELECT CASE WHEN min(t.moment) > m.now THEN min(t.moment) - m.now ELSE 0 END INTO next_due FROM (
        (SELECT x.due AS moment FROM fairlane.job_extra x WHERE x.class = CLASS.HIGH AND x.scheduled ORDER BY x.due LIMIT 1)
        UNION ALL (SELECT x.due FROM fairlane.job_extra x WHERE x.class = CLASS.NORMAL AND x.scheduled ORDER BY x.due LIMIT 1)
        UNION ALL (SELECT x.due FROM fairlane.job_extra x WHERE x.class = CLASS.LOW AND x.scheduled ORDER BY x.due LIMIT 1)
        UNION ALL (SELECT a.expires_at FROM fairlane.job_extra a
            CROSS JOIN LATERAL (SELECT x.state FROM fairlane.active_job x WHERE x.seq = a.seq OFFSET 0) y
            WHERE a.expires_at IS NOT NULL AND y.state IN (STATE.SCHEDULED, STATE.PENDING) ORDER BY a.expires_at LIMIT 1)
        UNION ALL SELECT min(x.due) FROM fairlane.job_extra x WHERE x.gate = GATE.PARENT) t HAVING min(t.moment) IS NOT NULL;
    IF next_due = 0 AND cardinality(v_expired || v_due || v_over) = 0 THEN
        -- A job is due whose identity is missing. It gets another one, and the next pass promotes it.
        PERFORM fairlane.adopt(ARRAY(SELECT x.seq FROM fairlane.job_extra x WHERE x.scheduled AND x.due <= m.now));
    END IF;
END $$;

-- Admit scheduled jobs that are due, and arriving ones, in the given order. Returns how many were admitted. Five hundred at a
-- time, because positions in arrays are found by linear search.
CREATE FUNCTION fairlane.admit_jobs(p_seqs bigint[], m fairlane.moment) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_done integer := 0;
BEGIN
    FOR k IN 0 .. (cardinality(p_seqs) - 1) / 500 LOOP
        v_done := v_done + fairlane.admit_some(p_seqs[k * 500 + 1 : k * 500 + 500], m);
    END LOOP;
    RETURN v_done;
END $$;

-- Unrestricted jobs are admitted together, up to the next one that is bound, sent to one worker, in a limited lane, or comes
-- back to a place or an arrival that it has kept; those are admitted one by one. An arriving job that is not due yet becomes
-- scheduled.
CREATE FUNCTION fairlane.admit_some(p_seqs bigint[], m fairlane.moment) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    l fairlane.active_job;
    r record;
    v_done integer := 0;
    v_run bigint;
    v_first bigint;
BEGIN
    FOR r IN SELECT y.before, y.queue, y.class, y.state, y.later, y.alone, array_agg(y.seq ORDER BY y.ord) AS seqs,
            array_agg(y.lane ORDER BY y.ord) AS lanes, array_agg(y.ord ORDER BY y.ord) AS ords
        FROM (SELECT g.seq, g.ord, x.queue, x.class, x.state, x.later, coalesce(j.lane, '') AS lane, j.alone,
                  count(*) FILTER (WHERE j.alone) OVER (ORDER BY g.ord) AS before
              FROM unnest(p_seqs) WITH ORDINALITY g(seq, ord)
              CROSS JOIN LATERAL (
                  SELECT v.queue, v.class, v.state, coalesce(v.due > m.now, false) AS later,
                      v.kind <> KIND.JOB OR v.lane IS NOT NULL OR v.arrival IS NOT NULL AS kept
                  FROM fairlane.active_job v WHERE v.seq = g.seq AND (v.state = STATE.ARRIVING OR (v.state = STATE.SCHEDULED AND v.due <= m.now)) OFFSET 0) x
              CROSS JOIN LATERAL (
                  SELECT i.lane, x.kept OR i.sticky IS NOT NULL OR i.direct IS NOT NULL OR CASE WHEN i.lane IS NOT NULL
                      AND (SELECT q.ruled FROM fairlane.queue q WHERE q.id = i.queue)
                      THEN (fairlane.terms(i.queue, i.lane)).places IS NOT NULL ELSE false END AS alone
                  FROM fairlane.job i WHERE i.seq = g.seq OFFSET 0) j) y
        GROUP BY y.before, y.alone, y.queue, y.class, y.state, y.later ORDER BY min(y.ord)
    LOOP
        IF r.alone THEN
            SELECT * INTO l FROM fairlane.active_job x WHERE x.seq = r.seqs[1];
            IF l.state = STATE.SCHEDULED THEN
                PERFORM fairlane.promote_job(l, m);
            ELSE
                PERFORM fairlane.admit_one(l, m);
            END IF;
        ELSIF r.later THEN
            UPDATE fairlane.active_job SET state = STATE.SCHEDULED, gate = GATE.NONE WHERE seq = ANY (r.seqs);
            PERFORM fairlane.save_extra(x) FROM fairlane.active_job x WHERE x.seq = ANY (r.seqs);
        ELSE
            -- Jobs that are admitted together arrive in their order, whatever their class.
            IF v_run IS DISTINCT FROM r.before THEN
                v_first := nextval('fairlane.arrival');
                v_run := r.before;
            END IF;
            PERFORM fairlane.queue_all(r.queue, r.class, r.seqs, r.lanes,
                ARRAY(SELECT v_first + g.ord - 1 FROM unnest(r.ords) WITH ORDINALITY g(ord, n) ORDER BY g.n), m);
        END IF;
        IF NOT r.alone THEN
            INSERT INTO fairlane.queue_count (queue, class, scheduled, pending)
            VALUES (r.queue, r.class, cardinality(r.seqs) * (r.later::integer - r.state), cardinality(r.seqs) * (NOT r.later)::integer);
        END IF;
        v_done := v_done + cardinality(r.seqs);
    END LOOP;
    RETURN v_done;
END $$;

-- Add jobs of one queue and class to the flows of their lanes, all in one statement.
CREATE FUNCTION fairlane.queue_all(p_queue integer, p_class smallint, p_seqs bigint[], p_lanes text[], p_arrivals bigint[],
    m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    d fairlane.domain := fairlane.domain_for(p_queue, p_class, '');
    v_flows bigint[];
    v_heads bigint[];
BEGIN
    v_flows := fairlane.flows_of(d, p_lanes);
    UPDATE fairlane.active_job u SET state = STATE.PENDING, due = NULL, gate = GATE.NONE, granted = true, inbox = '',
        (arrival, flow) = (SELECT p_arrivals[n], v_flows[n] FROM array_position(p_seqs, u.seq) n)
    WHERE u.seq = ANY (p_seqs);
    -- Only jobs that expire still need a row in `job_extra`.
    DELETE FROM fairlane.job_extra a WHERE a.seq = ANY (p_seqs) AND a.expires_at IS NULL;
    UPDATE fairlane.job_extra u SET due = NULL, scheduled = false, gate = GATE.NONE, inbox = '', arrival = p_arrivals[array_position(p_seqs, u.seq)]
    WHERE u.seq = ANY (p_seqs);
    SELECT array_agg(x.flow ORDER BY x.flow), array_agg(x.head ORDER BY x.flow) INTO v_flows, v_heads FROM (
        SELECT g.flow, min(g.arrival) AS head FROM unnest(v_flows, p_arrivals) g(flow, arrival) GROUP BY g.flow) x;
    PERFORM fairlane.raise_heads(d, v_flows, v_heads);
END $$;

-- Admit one arriving job of any sort.
CREATE FUNCTION fairlane.admit_one(l fairlane.active_job, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    l.gate := GATE.NONE;
    IF l.due > m.now THEN
        l.state := STATE.SCHEDULED;
    ELSE
        l.state := STATE.PENDING;
        l.due := NULL;
    END IF;
    PERFORM fairlane.count_move(l.queue, l.class, NULL, l.state);
    IF l.state = STATE.PENDING THEN
        l := fairlane.admit_job(l, m);
    END IF;
    PERFORM fairlane.save(l);
END $$;

-- Admit arriving jobs, bind unbound ones, move idle grants, repair lanes, and add up tallies.
CREATE FUNCTION fairlane.admit(p_limit integer, p_term bigint, p_now double precision DEFAULT NULL,
    p_lease double precision DEFAULT NULL, OUT admitted integer, OUT moved integer, OUT repaired integer, OUT more boolean,
    OUT topics text[])
LANGUAGE plpgsql AS $$
DECLARE
    m fairlane.moment := fairlane.moment_of(p_now, p_lease);
    l fairlane.active_job;
    v_arriving bigint[] := '{}';
    v_unbound bigint[];
    v_idle bigint[];
    v_declined bigint[];
    v_lanes bigint[];
    v_other bigint;
    v_seq bigint;
BEGIN
    PERFORM fairlane.check_term(p_term, false, m);
    topics := '{}';
    admitted := 0;
    moved := 0;
    repaired := 0;
    IF EXISTS (SELECT 1 FROM fairlane.active_job x WHERE x.state = STATE.ARRIVING) THEN
        v_arriving := ARRAY(SELECT a.seq FROM fairlane.queue q CROSS JOIN LATERAL (
            SELECT x.seq FROM fairlane.active_job x WHERE x.queue = q.id AND x.state = STATE.ARRIVING ORDER BY x.seq LIMIT p_limit) a
            ORDER BY a.seq LIMIT p_limit);
    END IF;
    v_unbound := fairlane.bindable(p_limit, m);
    v_idle := ARRAY(SELECT h.seq FROM fairlane.idle_grants(p_limit, m) h WHERE fairlane.could_use_place_of(h.seq, m) IS NOT NULL
        ORDER BY h.granted_at);
    v_lanes := fairlane.lanes_with_room(p_limit, m);
    v_declined := ARRAY(SELECT d.seq FROM fairlane.declined d WHERE d.until <= m.now AND d.until IS NOT NULL ORDER BY d.until LIMIT p_limit);
    more := p_limit IN (cardinality(v_arriving), cardinality(v_unbound), cardinality(v_declined));
    IF cardinality(v_arriving || v_unbound || v_idle || v_lanes || v_declined) > 0 THEN
        PERFORM fairlane.lock_for(v_arriving || v_unbound || v_idle || v_declined,
            ARRAY(SELECT n.queue FROM fairlane.lane n WHERE n.id = ANY (v_lanes)));
        m := fairlane.moment_of(p_now, p_lease);
        PERFORM fairlane.check_term(p_term, true, m);
        admitted := fairlane.admit_jobs(v_arriving, m);
        PERFORM fairlane.bind_unbound(v_unbound, m);
        PERFORM fairlane.offer_again(d, m) FROM unnest(v_declined) d;
        FOREACH v_seq IN ARRAY v_idle LOOP
            v_other := fairlane.could_use_place_of(v_seq, m);
            CONTINUE WHEN v_other IS NULL;
            SELECT * INTO l FROM fairlane.active_job x WHERE x.seq = v_seq;
            PERFORM fairlane.ungrant(l);
            UPDATE fairlane.lane SET granted = granted - 1 WHERE id = l.lane;
            PERFORM fairlane.grant(l.lane, v_other, m);
            moved := moved + 1;
        END LOOP;
        -- Only the lanes that were found before are repaired: those changed in this pass have already granted their free
        -- places.
        FOREACH v_seq IN ARRAY v_lanes LOOP
            repaired := repaired + fairlane.hand_on(v_seq, m);
        END LOOP;
        topics := fairlane.topics();
    END IF;
    PERFORM fairlane.add_up(p_term, m);
END $$;

-- Jobs that have held a place of an unordered lane for two seconds. Of more than `p_limit`, one page at random: no job may be
-- left out for ever because those before it cannot give their places away.
CREATE FUNCTION fairlane.idle_grants(p_limit integer, m fairlane.moment, OUT seq bigint, OUT granted_at double precision)
RETURNS SETOF record LANGUAGE plpgsql AS $$
DECLARE
    v_held integer := (SELECT count(*) FROM fairlane.held_grants(p_limit, 0, m));
BEGIN
    IF v_held = p_limit THEN
        v_held := (SELECT count(*) FROM fairlane.held_grants(50 * p_limit, 0, m));
    END IF;
    RETURN QUERY SELECT h.seq, h.granted_at
        FROM fairlane.held_grants(p_limit, floor(random() * ceil(v_held::numeric / p_limit))::integer * p_limit, m) h;
END $$;

CREATE FUNCTION fairlane.held_grants(
    p_limit integer, p_skipped integer, m fairlane.moment, OUT seq bigint, OUT granted_at double precision
) RETURNS SETOF record LANGUAGE sql STABLE AS $$
    SELECT a.seq, a.granted_at FROM fairlane.job_extra a
    CROSS JOIN LATERAL (SELECT x.lane, x.granted_at FROM fairlane.active_job x WHERE x.seq = a.seq OFFSET 0) y
    WHERE a.granted_at <= m.now - 2 AND y.granted_at IS NOT NULL
    AND NOT (SELECT n.ordered FROM fairlane.lane n WHERE n.id = y.lane)
    ORDER BY a.granted_at OFFSET p_skipped LIMIT p_limit;
$$;

-- Unbound jobs whose pool has a live worker.
CREATE FUNCTION fairlane.bindable(p_limit integer, m fairlane.moment) RETURNS bigint[] LANGUAGE sql STABLE AS $$
    WITH RECURSIVE waiting (inbox) AS (
        SELECT (SELECT min(x.inbox) FROM fairlane.job_extra x WHERE x.gate = GATE.UNBOUND)
        UNION ALL
        SELECT (SELECT min(x.inbox) FROM fairlane.job_extra x WHERE x.gate = GATE.UNBOUND AND x.inbox > w.inbox) FROM waiting w WHERE w.inbox IS NOT NULL
    )
    SELECT ARRAY(SELECT s.seq FROM waiting w CROSS JOIN LATERAL unnest(fairlane.unbound(rtrim(w.inbox, '/'), p_limit)) s(seq)
        WHERE EXISTS (SELECT 1 FROM fairlane.session v WHERE v.pool = rtrim(w.inbox, '/') AND v.idx IS NOT NULL AND v.state = 'live'
            AND v.expires > m.lease) LIMIT p_limit)
$$;

-- Lanes with a free place and a job that waits for it: there are none unless something went wrong.
CREATE FUNCTION fairlane.lanes_with_room(p_limit integer, m fairlane.moment) RETURNS bigint[] LANGUAGE sql STABLE AS $$
    SELECT ARRAY(SELECT n.id FROM fairlane.lane n WHERE n.granted < n.places AND EXISTS (SELECT 1 FROM fairlane.active_job x
        WHERE x.lane = n.id AND x.lane IS NOT NULL AND NOT x.granted AND x.session IS NULL AND (x.expires_at IS NULL OR x.expires_at > m.now)) LIMIT p_limit)
$$;

-- Replace tally rows by their sums once there are many, so that reading them stays cheap.
CREATE FUNCTION fairlane.add_up(p_term bigint, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF (SELECT count(*) FROM fairlane.queue_count) <= 1000 + 3 * (SELECT count(*) FROM fairlane.queue) THEN
        RETURN;
    END IF;
    PERFORM fairlane.check_term(p_term, true, m);
    WITH old AS (
        DELETE FROM fairlane.queue_count t WHERE t.ctid = ANY (ARRAY(SELECT x.ctid FROM fairlane.queue_count x FOR UPDATE SKIP LOCKED)) RETURNING t.*
    )
    INSERT INTO fairlane.queue_count (queue, class, scheduled, pending, running, slotless, completed, failed, cancelled)
    SELECT o.queue, o.class, sum(o.scheduled), sum(o.pending), sum(o.running), sum(o.slotless), sum(o.completed), sum(o.failed),
        sum(o.cancelled) FROM old o GROUP BY o.queue, o.class;
END $$;
