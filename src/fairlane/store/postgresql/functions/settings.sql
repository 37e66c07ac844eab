-- Settings of queues and lanes, and the effect of changes on waiting jobs.

-- Store settings, and apply them to the lanes. A change is an object with the column names of `queue`: `queue` (its name),
-- `stamp` (as it was read), `version`, `declared`, `override`, and the effective values: `paused`, `slots`, `reserved_high`,
-- `reserved_normal`, `max_pending`, `closed`, and `rules`, a list of `pattern`, `places`, `weight`, `ordered`, `max_pending`.
-- Each queue may be named once. `applied` false: a stamp is outdated and nothing was changed; the caller reads the settings
-- again.
CREATE FUNCTION fairlane.configure(p_changes jsonb, p_now double precision DEFAULT NULL, p_lease double precision DEFAULT NULL,
    OUT applied boolean, OUT topics text[])
LANGUAGE plpgsql AS $$
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

-- Whether a queue already has these settings.
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
    PERFORM fairlane.notify_waiting(v_queue);
END $$;

-- Apply new rules to the lanes that have jobs. The cost grows with the number of lanes; settings change rarely.
CREATE FUNCTION fairlane.apply_rules(p_queue integer, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    n fairlane.lane;
    v_rule fairlane.rule;
    v_key text;
BEGIN
    UPDATE fairlane.lane_pace u SET weight = x.weight
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
    -- Lanes without a limit are found by their jobs: claimable, gated, or running.
    FOR v_key IN SELECT k.key FROM (
            SELECT f.lane AS key FROM fairlane.domain d JOIN fairlane.flows f ON f.domain = d.id
            WHERE d.queue = p_queue AND f.tag IS NOT NULL AND f.lane <> ''
            UNION SELECT j.lane FROM fairlane.job_extra a JOIN fairlane.active_job x ON x.seq = a.seq JOIN fairlane.job j ON j.seq = a.seq
            WHERE a.gate > GATE.NONE AND x.state = STATE.PENDING AND x.queue = p_queue AND j.lane IS NOT NULL
            UNION SELECT j.lane FROM fairlane.active_job x JOIN fairlane.job j ON j.seq = x.seq
            WHERE x.session IS NOT NULL AND x.queue = p_queue AND j.lane IS NOT NULL) k
        WHERE (fairlane.terms(p_queue, k.key)).places IS NOT NULL
        AND NOT EXISTS (SELECT 1 FROM fairlane.lane e WHERE e.queue = p_queue AND e.key = k.key) ORDER BY k.key
    LOOP
        PERFORM fairlane.establish(p_queue, v_key, m);
    END LOOP;
END $$;

-- Apply a new limit and order: a lower limit revokes unstarted grants, newest first; a higher one grants at once.
CREATE FUNCTION fairlane.resize(n fairlane.lane, p_places integer, p_ordered boolean, m fairlane.moment) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF p_ordered <> n.ordered THEN
        -- Waiting jobs only: a running job gets its rank when it comes back.
        UPDATE fairlane.active_job SET rank = CASE WHEN p_ordered THEN 0 ELSE class END WHERE seq = ANY (fairlane.unstarted(n.id));
        IF NOT p_ordered THEN
            PERFORM fairlane.drop_kept(n.id);
        END IF;
    END IF;
    UPDATE fairlane.lane SET places = p_places, ordered = p_ordered WHERE id = n.id;
    PERFORM fairlane.trim(n.id);
    PERFORM fairlane.regrant(n.id, m);
    PERFORM fairlane.hand_on(n.id, m);
END $$;

-- The jobs of a limited lane that have not started: those that wait for a place, and those that hold one.
CREATE FUNCTION fairlane.unstarted(p_lane bigint) RETURNS bigint[] LANGUAGE sql STABLE AS $$
    SELECT ARRAY(SELECT x.seq FROM fairlane.active_job x WHERE x.lane = p_lane AND x.lane IS NOT NULL AND NOT x.granted AND x.session IS NULL
        UNION ALL SELECT x.seq FROM fairlane.active_job x WHERE x.lane = p_lane AND x.lane IS NOT NULL AND x.granted AND x.session IS NULL)
$$;

-- In an unordered lane a retrying job holds no place: it comes back when it is due.
CREATE FUNCTION fairlane.drop_kept(p_lane bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE fairlane.lane SET granted = granted - (SELECT count(*) FROM fairlane.active_job x
        WHERE x.lane = p_lane AND x.lane IS NOT NULL AND x.granted AND x.session IS NULL AND x.due IS NOT NULL) WHERE id = p_lane;
    UPDATE fairlane.active_job SET lane = NULL, granted = false
    WHERE lane = p_lane AND lane IS NOT NULL AND session IS NULL AND due IS NOT NULL;
END $$;

-- The lane has no limit any more: all of its jobs may start.
CREATE FUNCTION fairlane.abolish(n fairlane.lane, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_seq bigint;
    v_flow bigint;
    r record;
BEGIN
    -- An expired turn would start, so it is left out. Other expired jobs are included: a claim finds and cancels them.
    FOR v_seq IN SELECT x.seq FROM fairlane.active_job x WHERE x.lane = n.id AND x.lane IS NOT NULL AND NOT x.granted AND x.session IS NULL AND x.kind = KIND.TURN
        AND (x.expires_at IS NULL OR x.expires_at > m.now) ORDER BY x.rank, x.arrival
    LOOP
        PERFORM fairlane.grant(n.id, v_seq, m);
    END LOOP;
    -- The first job of each flow is granted a place, and the others are added to the same flow.
    FOR r IN SELECT array_agg(x.seq ORDER BY x.arrival) AS seqs FROM fairlane.active_job x WHERE x.lane = n.id AND x.lane IS NOT NULL
        AND NOT x.granted AND x.session IS NULL AND x.kind <> KIND.TURN AND x.state = STATE.PENDING AND x.gate = GATE.NONE GROUP BY x.class, x.inbox
    LOOP
        PERFORM fairlane.grant(n.id, r.seqs[1], m);
        SELECT x.flow INTO v_flow FROM fairlane.active_job x WHERE x.seq = r.seqs[1];
        UPDATE fairlane.active_job SET flow = v_flow WHERE seq = ANY (r.seqs[2:]);
    END LOOP;
    -- Still without a place: expired turns, which the promoter cancels, and gated jobs.
    UPDATE fairlane.active_job SET lane = NULL, granted = true, granted_at = NULL WHERE seq = ANY (fairlane.unstarted(n.id));
    UPDATE fairlane.active_job SET lane = NULL WHERE session IS NOT NULL AND lane = n.id;
    DELETE FROM fairlane.lane WHERE id = n.id;
END $$;

-- A lane becomes limited: running jobs get their places first, then the others in order.
CREATE FUNCTION fairlane.establish(p_queue integer, p_key text, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    n fairlane.lane := fairlane.lane_for(p_queue, p_key);
    v_waiting bigint[];
    v_running bigint[];
BEGIN
    v_waiting := ARRAY(
        SELECT x.seq FROM fairlane.domain d JOIN fairlane.flow f ON f.domain = d.id AND f.lane = p_key
        JOIN fairlane.active_job x ON x.flow = f.id AND x.session IS NULL WHERE d.queue = p_queue
        UNION ALL SELECT x.seq FROM fairlane.job_extra a JOIN fairlane.active_job x ON x.seq = a.seq JOIN fairlane.job j ON j.seq = a.seq
        WHERE a.gate > GATE.NONE AND x.state = STATE.PENDING AND x.queue = p_queue AND j.lane = p_key);
    v_running := ARRAY(SELECT x.seq FROM fairlane.active_job x JOIN fairlane.job j ON j.seq = x.seq
        WHERE x.session IS NOT NULL AND x.queue = p_queue AND j.lane = p_key);
    PERFORM fairlane.move_flow(fairlane.pace_of(f.id), NULL, NULL)
    FROM fairlane.domain d JOIN fairlane.flows f ON f.domain = d.id AND f.lane = p_key WHERE d.queue = p_queue AND f.tag IS NOT NULL;
    UPDATE fairlane.active_job SET flow = NULL, granted = false, granted_at = NULL, lane = n.id,
        rank = CASE WHEN n.ordered THEN 0 ELSE class END WHERE seq = ANY (v_waiting);
    UPDATE fairlane.active_job SET granted = true, lane = n.id, rank = CASE WHEN n.ordered THEN 0 ELSE class END WHERE seq = ANY (v_running);
    UPDATE fairlane.lane SET granted = cardinality(v_running) WHERE id = n.id;
    PERFORM fairlane.hand_on(n.id, m);
END $$;

-- How many more jobs of a class a queue may run. Jobs that are being finished concurrently still count, so the limit is never
-- exceeded.
CREATE FUNCTION fairlane.queue_room(p_queue integer, p_class integer) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    q fairlane.queue;
    r bigint[];
BEGIN
    SELECT * INTO q FROM fairlane.queue x WHERE x.id = p_queue;
    SELECT ARRAY[coalesce(sum(t.running - t.slotless) FILTER (WHERE t.class = CLASS.HIGH), 0),
        coalesce(sum(t.running - t.slotless) FILTER (WHERE t.class = CLASS.NORMAL), 0),
        coalesce(sum(t.running - t.slotless) FILTER (WHERE t.class = CLASS.LOW), 0)] INTO r FROM fairlane.queue_count t WHERE t.queue = p_queue;
    RETURN fairlane.room(q.slots, q.reserved_high, q.reserved_normal, r[1], r[2], r[3], p_class);
END $$;
