-- Settings of queues and lanes, schedules, and leadership: the small records that everybody shares. And how all that is derived
-- from the jobs is computed anew.

-- Store settings, and bring lanes in line with them. A change is an object with the names of the columns of `queue`: `queue`
-- (its name), `stamp` (as it was read), `version`, `declared`, `override`, and what counts of the two: `paused`, `slots`,
-- `reserved_high`, `reserved_normal`, `max_pending`, `closed`, and `rules`, a list of `pattern`, `places`, `weight`, `ordered`,
-- `max_pending`. Each queue at most once. `applied` false: a stamp is not the present one, nothing was changed, read again.
CREATE FUNCTION fairlane.configure(p_changes jsonb, p_now double precision DEFAULT NULL, p_lease double precision DEFAULT NULL,
    OUT applied boolean, OUT topics text[])
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off SET join_collapse_limit = 1 SET from_collapse_limit = 1 SET enable_material = off AS $$
DECLARE
    m fairlane.moment;
    v_change jsonb;
BEGIN
    topics := '{}';
    applied := true;
    IF NOT EXISTS (SELECT 1 FROM jsonb_array_elements(p_changes) c WHERE NOT fairlane.is_set(c)) THEN
        RETURN;
    END IF;
    FOR v_change IN SELECT c FROM jsonb_array_elements(p_changes) c ORDER BY c ->> 'queue' LOOP
        PERFORM fairlane.queue_number(v_change ->> 'queue');
    END LOOP;
    PERFORM fairlane.lock_alone();
    m := fairlane.moment_of(p_now, p_lease);
    applied := NOT EXISTS (SELECT 1 FROM jsonb_array_elements(p_changes) c JOIN fairlane.queue q ON q.name = c ->> 'queue'
        WHERE q.stamp <> (c ->> 'stamp')::bigint);
    IF applied THEN
        FOR v_change IN SELECT c FROM jsonb_array_elements(p_changes) c LOOP
            PERFORM fairlane.configure_queue(v_change, m);
        END LOOP;
        topics := fairlane.topics();
    END IF;
END $$;

-- Whether a queue has these settings already.
CREATE FUNCTION fairlane.is_set(p_change jsonb) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT 1 FROM fairlane.queue q WHERE q.name = p_change ->> 'queue' AND q.version = (p_change ->> 'version')::bigint
        AND q.declared = p_change ->> 'declared' AND q.override IS NOT DISTINCT FROM p_change ->> 'override')
$$;

CREATE FUNCTION fairlane.configure_queue(p_change jsonb, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_queue integer := fairlane.queue_number(p_change ->> 'queue');
    v_rules fairlane.rule[];
BEGIN
    IF fairlane.is_set(p_change) THEN
        RETURN;
    END IF;
    v_rules := ARRAY(
        SELECT (v_queue, r ->> 'pattern', regexp_replace(r ->> 'pattern', '\*$', ''), right(r ->> 'pattern', 1) <> '*',
            (r ->> 'places')::integer, (r ->> 'weight')::double precision, (r ->> 'ordered')::boolean,
            (r ->> 'max_pending')::integer)::fairlane.rule
        FROM jsonb_array_elements(coalesce(nullif(p_change -> 'rules', 'null'), '[]')) r ORDER BY 1);
    UPDATE fairlane.queue SET version = (p_change ->> 'version')::bigint, declared = p_change ->> 'declared',
        override = p_change ->> 'override', stamp = stamp + 1, paused = coalesce((p_change ->> 'paused')::boolean, false),
        slots = (p_change ->> 'slots')::integer, reserved_high = coalesce((p_change ->> 'reserved_high')::integer, 0),
        reserved_normal = coalesce((p_change ->> 'reserved_normal')::integer, 0),
        max_pending = (p_change ->> 'max_pending')::integer, ruled = cardinality(v_rules) > 0,
        closed = (SELECT array_agg(c) FROM jsonb_array_elements_text(coalesce(nullif(p_change -> 'closed', 'null'), '[]')) c)
    WHERE id = v_queue;
    IF v_rules IS DISTINCT FROM ARRAY(SELECT r FROM fairlane.rule r WHERE r.queue = v_queue ORDER BY r) THEN
        DELETE FROM fairlane.rule WHERE queue = v_queue;
        INSERT INTO fairlane.rule SELECT * FROM unnest(v_rules);
        PERFORM fairlane.apply_rules(v_queue, m);
    END IF;
    PERFORM fairlane.tell_waiting(v_queue);
END $$;

-- Lanes that have jobs get their new terms. Costs as much as the queue has lanes, which is why settings change rarely.
CREATE FUNCTION fairlane.apply_rules(p_queue integer, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    n fairlane.lane;
    v_rule fairlane.rule;
    v_key text;
BEGIN
    UPDATE fairlane.pace u SET weight = x.weight
    FROM (SELECT f.id, (fairlane.terms(p_queue, f.lane)).weight FROM fairlane.domain d JOIN fairlane.flow f ON f.domain = d.id
          WHERE d.queue = p_queue OFFSET 0) x WHERE u.flow = x.id AND u.weight <> x.weight;
    FOR n IN SELECT x.* FROM fairlane.lane x WHERE x.queue = p_queue LOOP
        v_rule := fairlane.terms(p_queue, n.key);
        IF v_rule.places IS NULL THEN
            PERFORM fairlane.abolish(n, m);
        ELSIF v_rule.places <> n.places OR v_rule.ordered <> n.ordered THEN
            PERFORM fairlane.resize(n, v_rule.places, v_rule.ordered, m);
        END IF;
    END LOOP;
    -- Lanes without a limit are found where their jobs are: in line, behind a gate, or running.
    FOR v_key IN SELECT k.key FROM (
            SELECT f.lane AS key FROM fairlane.domain d JOIN fairlane.flows f ON f.domain = d.id
            WHERE d.queue = p_queue AND f.tag IS NOT NULL AND f.lane <> ''
            UNION SELECT j.lane FROM fairlane.aside a JOIN fairlane.live x ON x.seq = a.seq JOIN fairlane.job j ON j.seq = a.seq
            WHERE a.gate > 0 AND x.state = 2 AND x.queue = p_queue AND j.lane IS NOT NULL
            UNION SELECT j.lane FROM fairlane.live x JOIN fairlane.job j ON j.seq = x.seq
            WHERE x.session IS NOT NULL AND x.queue = p_queue AND j.lane IS NOT NULL) k
        WHERE (fairlane.terms(p_queue, k.key)).places IS NOT NULL
        AND NOT EXISTS (SELECT 1 FROM fairlane.lane e WHERE e.queue = p_queue AND e.key = k.key) ORDER BY k.key
    LOOP
        PERFORM fairlane.establish(p_queue, v_key, m);
    END LOOP;
END $$;

-- Apply new terms: a lower limit takes back unstarted grants, newest first; a higher one hands out at once.
CREATE FUNCTION fairlane.resize(n fairlane.lane, p_places integer, p_ordered boolean, m fairlane.moment) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF p_ordered <> n.ordered THEN
        -- Only of those that wait; a running job gets its rank when it comes back.
        UPDATE fairlane.live SET rank = CASE WHEN p_ordered THEN 0 ELSE class END WHERE seq = ANY (fairlane.unstarted(n.id));
        IF NOT p_ordered THEN
            PERFORM fairlane.drop_kept(n.id);
        END IF;
    END IF;
    UPDATE fairlane.lane SET places = p_places, ordered = p_ordered WHERE id = n.id;
    PERFORM fairlane.trim(n.id);
    PERFORM fairlane.settle(n.id, m);
    PERFORM fairlane.hand_on(n.id, m);
END $$;

-- The jobs of a limited lane that have not started: those that wait for a place, and those that hold one.
CREATE FUNCTION fairlane.unstarted(p_lane bigint) RETURNS bigint[] LANGUAGE sql STABLE AS $$
    SELECT ARRAY(SELECT x.seq FROM fairlane.live x WHERE x.lane = p_lane AND x.lane IS NOT NULL AND NOT x.granted AND x.session IS NULL
        UNION ALL SELECT x.seq FROM fairlane.live x WHERE x.lane = p_lane AND x.lane IS NOT NULL AND x.granted AND x.session IS NULL)
$$;

-- In an unordered lane a job that waits for its retry holds no place: it comes back when it is due.
CREATE FUNCTION fairlane.drop_kept(p_lane bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE fairlane.lane SET granted = granted - (SELECT count(*) FROM fairlane.live x
        WHERE x.lane = p_lane AND x.lane IS NOT NULL AND x.granted AND x.session IS NULL AND x.due IS NOT NULL) WHERE id = p_lane;
    UPDATE fairlane.live SET lane = NULL, granted = false
    WHERE lane = p_lane AND lane IS NOT NULL AND session IS NULL AND due IS NOT NULL;
END $$;

-- The lane has no limit any more: everybody in it may start.
CREATE FUNCTION fairlane.abolish(n fairlane.lane, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_seq bigint;
    v_flow bigint;
    r record;
BEGIN
    -- An expired turn would be started, so it is left out. Other expired jobs are not: in line a claim finds and cancels them.
    FOR v_seq IN SELECT x.seq FROM fairlane.live x WHERE x.lane = n.id AND x.lane IS NOT NULL AND NOT x.granted AND x.session IS NULL AND x.kind = 1
        AND (x.expires_at IS NULL OR x.expires_at > m.now) ORDER BY x.rank, x.arrival
    LOOP
        PERFORM fairlane.grant(n.id, v_seq, m);
    END LOOP;
    -- Of those that go into the same flow the first one goes there, and takes the others along.
    FOR r IN SELECT array_agg(x.seq ORDER BY x.arrival) AS seqs FROM fairlane.live x WHERE x.lane = n.id AND x.lane IS NOT NULL
        AND NOT x.granted AND x.session IS NULL AND x.kind <> 1 AND x.state = 2 AND x.gate = 0 GROUP BY x.class, x.inbox
    LOOP
        PERFORM fairlane.grant(n.id, r.seqs[1], m);
        SELECT x.flow INTO v_flow FROM fairlane.live x WHERE x.seq = r.seqs[1];
        UPDATE fairlane.live SET flow = v_flow WHERE seq = ANY (r.seqs[2:]);
    END LOOP;
    -- Without a place are now turns that have expired, which the sweeper cancels, and what waits behind a gate.
    UPDATE fairlane.live SET lane = NULL, granted = true, granted_at = NULL WHERE seq = ANY (fairlane.unstarted(n.id));
    UPDATE fairlane.live SET lane = NULL WHERE session IS NOT NULL AND lane = n.id;
    DELETE FROM fairlane.lane WHERE id = n.id;
END $$;

-- A lane that had no limit has one now: running jobs have their places first, then the others in order.
CREATE FUNCTION fairlane.establish(p_queue integer, p_key text, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    n fairlane.lane := fairlane.lane_for(p_queue, p_key);
    v_waiting bigint[];
    v_running bigint[];
BEGIN
    v_waiting := ARRAY(
        SELECT x.seq FROM fairlane.domain d JOIN fairlane.flow f ON f.domain = d.id AND f.lane = p_key
        JOIN fairlane.live x ON x.flow = f.id AND x.session IS NULL WHERE d.queue = p_queue
        UNION ALL SELECT x.seq FROM fairlane.aside a JOIN fairlane.live x ON x.seq = a.seq JOIN fairlane.job j ON j.seq = a.seq
        WHERE a.gate > 0 AND x.state = 2 AND x.queue = p_queue AND j.lane = p_key);
    v_running := ARRAY(SELECT x.seq FROM fairlane.live x JOIN fairlane.job j ON j.seq = x.seq
        WHERE x.session IS NOT NULL AND x.queue = p_queue AND j.lane = p_key);
    PERFORM fairlane.move_flow(fairlane.pace_of(f.id), NULL, NULL)
    FROM fairlane.domain d JOIN fairlane.flows f ON f.domain = d.id AND f.lane = p_key WHERE d.queue = p_queue AND f.tag IS NOT NULL;
    UPDATE fairlane.live SET flow = NULL, granted = false, granted_at = NULL, lane = n.id,
        rank = CASE WHEN n.ordered THEN 0 ELSE class END WHERE seq = ANY (v_waiting);
    UPDATE fairlane.live SET granted = true, lane = n.id, rank = CASE WHEN n.ordered THEN 0 ELSE class END WHERE seq = ANY (v_running);
    UPDATE fairlane.lane SET granted = cardinality(v_running) WHERE id = n.id;
    PERFORM fairlane.hand_on(n.id, m);
END $$;

-- Store schedules; a changed timetable begins anew.
CREATE FUNCTION fairlane.declare(p_names text[], p_timetables text[], p_jobs bytea[], p_now double precision DEFAULT NULL,
    p_lease double precision DEFAULT NULL, OUT topics text[])
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off SET join_collapse_limit = 1 SET from_collapse_limit = 1 SET enable_material = off AS $$
DECLARE
    m fairlane.moment := fairlane.moment_of(p_now, p_lease);
BEGIN
    -- The last one of a name counts; in the order of names, so that two who declare the same do not wait for each other.
    INSERT INTO fairlane.schedule AS s (name, timetable, job, stored_at, declared_at)
    SELECT DISTINCT ON (g.name) g.name, g.timetable, g.job, m.now, m.now
    FROM unnest(p_names, p_timetables, p_jobs) WITH ORDINALITY g(name, timetable, job, ord) ORDER BY g.name, g.ord DESC
    ON CONFLICT (name) DO UPDATE SET job = excluded.job, declared_at = excluded.declared_at, timetable = excluded.timetable,
        stored_at = CASE s.timetable WHEN excluded.timetable THEN s.stored_at ELSE excluded.stored_at END;
    topics := '{}';
END $$;

-- Store a token, unless its id is taken; `token` is what is stored then. Whether it is the same one is seen by the caller.
CREATE FUNCTION fairlane.add_token(p_id text, p_name text, p_digest bytea, p_scopes text, p_queues text, p_lane_prefix text,
    p_expires double precision, p_hint text, p_now double precision DEFAULT NULL, p_lease double precision DEFAULT NULL,
    OUT token fairlane.token)
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off SET join_collapse_limit = 1 SET from_collapse_limit = 1 SET enable_material = off AS $$
DECLARE
    m fairlane.moment := fairlane.moment_of(p_now, p_lease);
BEGIN
    INSERT INTO fairlane.token VALUES (p_id, p_name, p_digest, p_scopes, p_queues, p_lane_prefix, m.now, m.now + p_expires, NULL, p_hint)
    ON CONFLICT (id) DO NOTHING;
    SELECT * INTO token FROM fairlane.token t WHERE t.id = p_id;
END $$;

-- Revoke a token. `revoked`: whether this call did; NULL: there is no such token.
CREATE FUNCTION fairlane.revoke_token(p_id text, p_now double precision DEFAULT NULL, p_lease double precision DEFAULT NULL,
    OUT revoked boolean)
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off SET join_collapse_limit = 1 SET from_collapse_limit = 1 SET enable_material = off AS $$
DECLARE
    m fairlane.moment := fairlane.moment_of(p_now, p_lease);
BEGIN
    UPDATE fairlane.token t SET revoked_at = m.now WHERE t.id = p_id AND t.revoked_at IS NULL;
    revoked := FOUND;
    IF NOT FOUND AND NOT EXISTS (SELECT 1 FROM fairlane.token t WHERE t.id = p_id) THEN
        revoked := NULL;
    END IF;
END $$;

-- Refuse a leader whose term has ended; NULL is nobody's term and passes. `p_hold`: nobody else can lead before this step is
-- over. A pass that finds nothing to do does not hold it, so that an idle pass writes nothing; and it is held last, so that the
-- leader can renew its term while a pass waits for locks.
CREATE FUNCTION fairlane.check_term(p_term bigint, p_hold boolean, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF p_term IS NULL THEN
        RETURN;
    END IF;
    IF p_hold THEN
        PERFORM 1 FROM fairlane.leader r WHERE r.one = 1 FOR SHARE;
    END IF;
    IF NOT EXISTS (SELECT 1 FROM fairlane.leader r WHERE r.one = 1 AND r.term = p_term AND r.session IS NOT NULL AND r.expires > m.lease) THEN
        PERFORM fairlane.refuse('FL007', format('term %s has ended; stop leading and stand again', p_term));
    END IF;
END $$;

-- Stand for leadership (`p_term` NULL), or extend a term. `number` NULL: somebody else leads, or the term is over.
CREATE FUNCTION fairlane.lead(p_session text, p_seconds double precision, p_term bigint, p_now double precision DEFAULT NULL,
    p_lease double precision DEFAULT NULL, OUT number bigint, OUT topics text[])
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off SET join_collapse_limit = 1 SET from_collapse_limit = 1 SET enable_material = off AS $$
DECLARE
    m fairlane.moment := fairlane.moment_of(p_now, p_lease);
    r fairlane.leader;
    v_over boolean;
BEGIN
    topics := '{}';
    -- First without a lock: a standby asks every two seconds, and writes nothing while somebody leads.
    SELECT * INTO r FROM fairlane.leader x WHERE x.one = 1;
    IF r.session <> p_session AND r.expires > m.lease THEN
        RETURN;
    END IF;
    IF r.one IS NULL THEN
        IF p_term IS NOT NULL THEN
            RETURN;
        END IF;
        INSERT INTO fairlane.leader (term, session, lease, expires) VALUES (0, NULL, 0, 0) ON CONFLICT (one) DO NOTHING;
    END IF;
    SELECT * INTO r FROM fairlane.leader x WHERE x.one = 1 FOR UPDATE;
    m := fairlane.moment_of(p_now, p_lease);
    v_over := r.session IS NULL OR r.expires <= m.lease;
    IF p_term IS NULL AND v_over THEN
        number := r.term + 1;
    ELSIF NOT v_over AND r.session = p_session AND coalesce(p_term, r.term) = r.term THEN
        number := r.term;  -- extended; or it leads already, and the reply to its call was lost
    ELSE
        RETURN;
    END IF;
    UPDATE fairlane.leader SET term = number, session = p_session, lease = p_seconds, expires = m.lease + p_seconds WHERE one = 1;
END $$;

-- Give up a term; its number stays, so that the next one is higher.
CREATE FUNCTION fairlane.resign(p_term bigint, p_now double precision DEFAULT NULL, p_lease double precision DEFAULT NULL,
    OUT topics text[]) LANGUAGE plpgsql AS $$
BEGIN
    UPDATE fairlane.leader SET session = NULL WHERE one = 1 AND term = p_term AND session IS NOT NULL;
    IF FOUND THEN
        PERFORM fairlane.tell('leader');
    END IF;
    topics := fairlane.topics();
END $$;

-- Compare tallies, lanes, flows and loads with the jobs they are derived from, and correct them. `jobs`: those not final.
CREATE FUNCTION fairlane.recount(p_now double precision DEFAULT NULL, p_lease double precision DEFAULT NULL, OUT jobs bigint,
    OUT differences text[], OUT topics text[])
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off SET join_collapse_limit = 1 SET from_collapse_limit = 1 SET enable_material = off AS $$
DECLARE
    m fairlane.moment;
BEGIN
    PERFORM fairlane.lock_alone();
    m := fairlane.moment_of(p_now, p_lease);
    differences := ARRAY(SELECT format('job %s: its identity was missing', g) FROM unnest(fairlane.adopt(NULL)) g)
        || fairlane.recount_aside() || fairlane.recount_tallies() || fairlane.recount_loads() || fairlane.recount_lanes(m) || fairlane.recount_flows(m);
    SELECT count(*) INTO jobs FROM fairlane.live;
    topics := fairlane.topics();
END $$;

-- `aside` has a row for every job that has something few have, and says the same.
CREATE FUNCTION fairlane.recount_aside() RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    l fairlane.live;
    v_seq bigint;
    v_found text[] := '{}';
BEGIN
    FOR l IN SELECT x.* FROM fairlane.live x LEFT JOIN fairlane.aside a ON a.seq = x.seq
        WHERE (a.seq IS NOT NULL) <> fairlane.is_aside(x) OR (a.seq IS NOT NULL
            AND (a.arrival, a.waiter, a.binding, a.due, a.expires_at, a.class, a.gate, a.scheduled, a.inbox)
            IS DISTINCT FROM (x.arrival, x.waiter, x.binding, x.due, x.expires_at, x.class, x.gate, x.state = 1, x.inbox))
    LOOP
        v_found := v_found || (SELECT format('job %s: was set aside wrongly, or not at all', j.id) FROM fairlane.job j WHERE j.seq = l.seq);
        PERFORM fairlane.set_aside(l);
    END LOOP;
    FOR v_seq IN DELETE FROM fairlane.aside a WHERE NOT EXISTS (SELECT 1 FROM fairlane.live x WHERE x.seq = a.seq) RETURNING a.seq LOOP
        v_found := v_found || format('job number %s: it is gone, and was set aside', v_seq);
    END LOOP;
    RETURN v_found;
END $$;

CREATE FUNCTION fairlane.recount_tallies() RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    r record;
    v_names text[] := ARRAY['scheduled', 'pending', 'running', 'slotless'];
    v_found text[] := '{}';
BEGIN
    FOR r IN SELECT q.name, y.* FROM (
            SELECT x.queue, x.class, ARRAY[sum(x.k1), sum(x.k2), sum(x.k3), sum(x.k4)]::bigint[] AS kept,
                ARRAY[sum(x.t1), sum(x.t2), sum(x.t3), sum(x.t4)]::bigint[] AS true
            FROM (SELECT t.queue, t.class, t.scheduled, t.pending, t.running, t.slotless, 0, 0, 0, 0 FROM fairlane.tally t
                UNION ALL SELECT l.queue, l.class, 0, 0, 0, 0, (l.state = 1)::integer, (l.state = 2)::integer, (l.state = 3)::integer,
                    (l.state = 3 AND (l.waiter IS NOT NULL OR l.session IS NULL))::integer
                FROM fairlane.live l WHERE l.state > 0) x(queue, class, k1, k2, k3, k4, t1, t2, t3, t4) GROUP BY x.queue, x.class) y
        JOIN fairlane.queue q ON q.id = y.queue WHERE y.kept <> y.true ORDER BY y.queue, y.class
    LOOP
        FOR i IN 1 .. 4 LOOP
            IF r.kept[i] <> r.true[i] THEN
                v_found := v_found || format('queue %s, class %s: %s was %s, is %s', r.name, r.class, v_names[i], r.kept[i], r.true[i]);
            END IF;
        END LOOP;
        INSERT INTO fairlane.tally (queue, class, scheduled, pending, running, slotless)
        VALUES (r.queue, r.class, r.true[1] - r.kept[1], r.true[2] - r.kept[2], r.true[3] - r.kept[3], r.true[4] - r.kept[4]);
    END LOOP;
    RETURN v_found;
END $$;

-- What sessions run, by class.
CREATE FUNCTION fairlane.recount_loads() RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    r record;
    v_found text[] := '{}';
BEGIN
    FOR r IN SELECT s.seq, s.id, ARRAY[s.running_high, s.running_normal, s.running_low] AS kept, y.true FROM (
            SELECT x.session, ARRAY[sum(x.r0), sum(x.r1), sum(x.r2)]::integer[] AS true
            FROM (SELECT s.seq, 0, 0, 0 FROM fairlane.session s
                UNION ALL SELECT l.session, (l.class = 0)::integer, (l.class = 1)::integer, (l.class = 2)::integer
                FROM fairlane.live l WHERE l.session IS NOT NULL AND l.kind <> 1) x(session, r0, r1, r2) GROUP BY x.session) y
        JOIN fairlane.sessions s ON s.seq = y.session WHERE ARRAY[s.running_high, s.running_normal, s.running_low] <> y.true
    LOOP
        v_found := v_found || format('session %s: running was %s, is %s', r.id, r.kept, r.true);
        UPDATE fairlane.load SET running_high = r.true[1], running_normal = r.true[2], running_low = r.true[3] WHERE session = r.seq;
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
                UNION ALL SELECT v.lane, v.granted::integer FROM fairlane.live v WHERE v.lane IS NOT NULL) x(lane, granted) GROUP BY x.lane) y
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
    FOR r IN SELECT v.seq, j.id FROM fairlane.live v JOIN fairlane.job j ON j.seq = v.seq
        WHERE v.lane IS NOT NULL AND NOT EXISTS (SELECT 1 FROM fairlane.lane n WHERE n.id = v.lane)
    LOOP
        v_found := v_found || format('job %s: its lane was gone', r.id);
        UPDATE fairlane.live SET lane = NULL, granted = state <> 1 WHERE seq = r.seq;
    END LOOP;
    RETURN v_found;
END $$;

-- Flows have the right head, no tag below the clock, and everything that may start is in one.
CREATE FUNCTION fairlane.recount_flows(m fairlane.moment) RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    r record;
    l fairlane.live;
    v_found text[] := '{}';
BEGIN
    FOR r IN SELECT x.* FROM (
            SELECT f.id, f.lane, f.head AS kept, f.tag, f.finish, d.clock, (SELECT min(v.arrival) FROM fairlane.live v
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
        SELECT 1 FROM fairlane.line x WHERE x.domain = f.domain AND x.tag = f.tag AND x.head = f.head AND x.flow = f.id)
    LOOP
        v_found := v_found || format('flow of lane %L: was not in line', r.lane);
        INSERT INTO fairlane.line VALUES (r.domain, r.tag, r.head, r.id);
    END LOOP;
    FOR r IN DELETE FROM fairlane.line x WHERE NOT EXISTS (SELECT 1 FROM fairlane.pace f WHERE f.flow = x.flow
        AND f.domain = x.domain AND f.tag = x.tag AND f.head = x.head) RETURNING x.flow
    LOOP
        v_found := v_found || format('line: flow %s stood in it twice, or where it is not', r.flow);
    END LOOP;
    FOR l IN SELECT v.* FROM fairlane.live v WHERE v.state = 2 AND v.gate = 0 AND v.granted AND v.kind <> 1
        AND NOT EXISTS (SELECT 1 FROM fairlane.flow f WHERE f.id = v.flow)
    LOOP
        v_found := v_found || (SELECT format('job %s: was not in line', j.id) FROM fairlane.job j WHERE j.seq = l.seq);
        PERFORM fairlane.save(fairlane.enter(l, m));
    END LOOP;
    RETURN v_found;
END $$;

-- How many more jobs of a class a queue may run. What others finish at this moment still counts: never too many.
CREATE FUNCTION fairlane.queue_room(p_queue integer, p_class integer) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    q fairlane.queue;
    r bigint[];
BEGIN
    SELECT * INTO q FROM fairlane.queue x WHERE x.id = p_queue;
    SELECT ARRAY[coalesce(sum(t.running - t.slotless) FILTER (WHERE t.class = 0), 0),
        coalesce(sum(t.running - t.slotless) FILTER (WHERE t.class = 1), 0),
        coalesce(sum(t.running - t.slotless) FILTER (WHERE t.class = 2), 0)] INTO r FROM fairlane.tally t WHERE t.queue = p_queue;
    RETURN fairlane.room(q.slots, q.reserved_high, q.reserved_normal, r[1], r[2], r[3], p_class);
END $$;
