-- Recomputes what is derived from the jobs, and corrects it.

-- Compare tallies, lanes, flows and loads with the jobs they are derived from, and correct them. `jobs`: how many are not
-- final.
CREATE FUNCTION fairlane.recount(p_now double precision DEFAULT NULL, p_lease double precision DEFAULT NULL, OUT jobs bigint,
    OUT differences text[], OUT topics text[])
LANGUAGE plpgsql AS $$
DECLARE
    m fairlane.moment;
BEGIN
    PERFORM fairlane.lock_alone();
    m := fairlane.moment_of(p_now, p_lease);
    differences := ARRAY(SELECT format('job %s: its identity was missing', g) FROM unnest(fairlane.adopt(NULL)) g)
        || fairlane.recount_extras() || fairlane.recount_queues() || fairlane.recount_sessions() || fairlane.recount_lanes(m) || fairlane.recount_flows(m);
    SELECT count(*) INTO jobs FROM fairlane.active_job;
    topics := fairlane.topics();
END $$;

-- `job_extra` has a row exactly for the jobs that need one (`has_extra`), with the same values as `active_job`.
CREATE FUNCTION fairlane.recount_extras() RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    l fairlane.active_job;
    v_seq bigint;
    v_found text[] := '{}';
BEGIN
    FOR l IN SELECT x.* FROM fairlane.active_job x LEFT JOIN fairlane.job_extra a ON a.seq = x.seq
        WHERE (a.seq IS NOT NULL) <> fairlane.has_extra(x) OR (a.seq IS NOT NULL
            AND (a.arrival, a.waiter, a.binding, a.due, a.expires_at, a.class, a.gate, a.scheduled, a.inbox)
            IS DISTINCT FROM (x.arrival, x.waiter, x.binding, x.due, x.expires_at, x.class, x.gate, x.state = STATE.SCHEDULED, x.inbox))
    LOOP
        v_found := v_found || (SELECT format('job %s: its row in job_extra was wrong or missing', j.id) FROM fairlane.job j WHERE j.seq = l.seq);
        PERFORM fairlane.save_extra(l);
    END LOOP;
    FOR v_seq IN DELETE FROM fairlane.job_extra a WHERE NOT EXISTS (SELECT 1 FROM fairlane.active_job x WHERE x.seq = a.seq) RETURNING a.seq LOOP
        v_found := v_found || format('job number %s: it does not exist, but had a row in job_extra', v_seq);
    END LOOP;
    RETURN v_found;
END $$;

CREATE FUNCTION fairlane.recount_queues() RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    r record;
    v_names text[] := ARRAY['scheduled', 'pending', 'running', 'slotless'];
    v_found text[] := '{}';
BEGIN
    FOR r IN SELECT q.name, y.* FROM (
            SELECT x.queue, x.class, ARRAY[sum(x.k1), sum(x.k2), sum(x.k3), sum(x.k4)]::bigint[] AS kept,
                ARRAY[sum(x.t1), sum(x.t2), sum(x.t3), sum(x.t4)]::bigint[] AS true
            FROM (SELECT t.queue, t.class, t.scheduled, t.pending, t.running, t.slotless, 0, 0, 0, 0 FROM fairlane.queue_count t
                UNION ALL SELECT l.queue, l.class, 0, 0, 0, 0, (l.state = STATE.SCHEDULED)::integer, (l.state = STATE.PENDING)::integer, (l.state = STATE.RUNNING)::integer,
                    (l.state = STATE.RUNNING AND (l.waiter IS NOT NULL OR l.session IS NULL))::integer
                FROM fairlane.active_job l WHERE l.state > STATE.ARRIVING) x(queue, class, k1, k2, k3, k4, t1, t2, t3, t4) GROUP BY x.queue, x.class) y
        JOIN fairlane.queue q ON q.id = y.queue WHERE y.kept <> y.true ORDER BY y.queue, y.class
    LOOP
        FOR i IN 1 .. 4 LOOP
            IF r.kept[i] <> r.true[i] THEN
                v_found := v_found || format('queue %s, class %s: %s was %s, is %s', r.name, r.class, v_names[i], r.kept[i], r.true[i]);
            END IF;
        END LOOP;
        INSERT INTO fairlane.queue_count (queue, class, scheduled, pending, running, slotless)
        VALUES (r.queue, r.class, r.true[1] - r.kept[1], r.true[2] - r.kept[2], r.true[3] - r.kept[3], r.true[4] - r.kept[4]);
    END LOOP;
    RETURN v_found;
END $$;

-- The load of each session: its running jobs by class.
CREATE FUNCTION fairlane.recount_sessions() RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    r record;
    v_found text[] := '{}';
BEGIN
    FOR r IN SELECT s.seq, s.id, ARRAY[s.running_high, s.running_normal, s.running_low] AS kept, y.true FROM (
            SELECT x.session, ARRAY[sum(x.r0), sum(x.r1), sum(x.r2)]::integer[] AS true
            FROM (SELECT s.seq, 0, 0, 0 FROM fairlane.session s
                UNION ALL SELECT l.session, (l.class = CLASS.HIGH)::integer, (l.class = CLASS.NORMAL)::integer, (l.class = CLASS.LOW)::integer
                FROM fairlane.active_job l WHERE l.session IS NOT NULL AND l.kind <> KIND.TURN) x(session, r0, r1, r2) GROUP BY x.session) y
        JOIN fairlane.sessions s ON s.seq = y.session WHERE ARRAY[s.running_high, s.running_normal, s.running_low] <> y.true
    LOOP
        v_found := v_found || format('session %s: running was %s, is %s', r.id, r.kept, r.true);
        UPDATE fairlane.session_load SET running_high = r.true[1], running_normal = r.true[2], running_low = r.true[3] WHERE session = r.seq;
    END LOOP;
    RETURN v_found;
END $$;

CREATE FUNCTION fairlane.recount_lanes(m fairlane.moment) RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    r record;
    v_given integer;
    v_found text[] := '{}';
BEGIN
    FOR r IN SELECT n.id, n.key, n.granted AS kept, y.true FROM (
            SELECT x.lane, sum(x.granted)::integer AS true FROM (SELECT n.id, 0 FROM fairlane.lane n
                UNION ALL SELECT v.lane, v.granted::integer FROM fairlane.active_job v WHERE v.lane IS NOT NULL) x(lane, granted) GROUP BY x.lane) y
        JOIN fairlane.lane n ON n.id = y.lane WHERE n.granted <> y.true
    LOOP
        v_found := v_found || format('lane %s: granted was %s, is %s', r.key, r.kept, r.true);
        UPDATE fairlane.lane SET granted = r.true WHERE id = r.id;
    END LOOP;
    FOR r IN SELECT n.id, n.key FROM fairlane.lane n WHERE n.id = ANY (fairlane.lanes_with_room(2147483647, m)) LOOP
        v_given := fairlane.hand_on(r.id, m);
        IF v_given > 0 THEN
            v_found := v_found || format('lane %s: %s places were free while jobs waited', r.key, v_given);
        END IF;
    END LOOP;
    FOR r IN SELECT v.seq, j.id FROM fairlane.active_job v JOIN fairlane.job j ON j.seq = v.seq
        WHERE v.lane IS NOT NULL AND NOT EXISTS (SELECT 1 FROM fairlane.lane n WHERE n.id = v.lane)
    LOOP
        v_found := v_found || format('job %s: its lane was gone', r.id);
        UPDATE fairlane.active_job SET lane = NULL, granted = state <> STATE.SCHEDULED WHERE seq = r.seq;
    END LOOP;
    RETURN v_found;
END $$;

-- Flows have the right head and no tag below the clock, and every claimable job is in a flow.
CREATE FUNCTION fairlane.recount_flows(m fairlane.moment) RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    r record;
    l fairlane.active_job;
    v_found text[] := '{}';
BEGIN
    FOR r IN SELECT x.* FROM (
            SELECT f.id, f.lane, f.head AS kept, f.tag, f.finish, d.clock, (SELECT min(v.arrival) FROM fairlane.active_job v
                WHERE v.flow = f.id AND v.flow IS NOT NULL AND v.session IS NULL) AS true
            FROM fairlane.flows f JOIN fairlane.domains d ON d.id = f.domain OFFSET 0) x
        WHERE x.kept IS DISTINCT FROM x.true OR x.tag < x.clock
    LOOP
        v_found := v_found || CASE WHEN r.kept IS DISTINCT FROM r.true
            THEN format('flow of lane %L: head was %s, is %s', r.lane, coalesce(r.kept::text, 'None'), coalesce(r.true::text, 'None'))
            ELSE format('flow of lane %L: tag was %s, is %s', r.lane, r.tag, r.clock) END;
        PERFORM fairlane.move_flow(fairlane.pace_of(r.id),
            CASE WHEN r.true IS NOT NULL THEN greatest(r.clock, coalesce(r.tag, r.finish)) END, r.true);
    END LOOP;
    FOR r IN SELECT f.id, f.lane, f.domain, f.tag, f.head FROM fairlane.flows f WHERE f.tag IS NOT NULL AND NOT EXISTS (
        SELECT 1 FROM fairlane.ready_lane x WHERE x.domain = f.domain AND x.tag = f.tag AND x.head = f.head AND x.flow = f.id)
    LOOP
        v_found := v_found || format('flow of lane %L: was not in line', r.lane);
        INSERT INTO fairlane.ready_lane VALUES (r.domain, r.tag, r.head, r.id);
    END LOOP;
    FOR r IN DELETE FROM fairlane.ready_lane x WHERE NOT EXISTS (SELECT 1 FROM fairlane.lane_pace f WHERE f.flow = x.flow
        AND f.domain = x.domain AND f.tag = x.tag AND f.head = x.head) RETURNING x.flow
    LOOP
        v_found := v_found || format('line: flow %s stood in it twice, or where it is not', r.flow);
    END LOOP;
    FOR l IN SELECT v.* FROM fairlane.active_job v WHERE v.state = STATE.PENDING AND v.gate = GATE.NONE AND v.granted AND v.kind <> KIND.TURN
        AND NOT EXISTS (SELECT 1 FROM fairlane.flow f WHERE f.id = v.flow)
    LOOP
        v_found := v_found || (SELECT format('job %s: was not in line', j.id) FROM fairlane.job j WHERE j.seq = l.seq);
        PERFORM fairlane.save(fairlane.enter(l, m));
    END LOOP;
    RETURN v_found;
END $$;
