-- The terms of lanes, and the places of limited lanes. Everything here runs under the lock of the queue. Functions that take an
-- active row return the changed row, and the caller saves it.

-- The rule of a lane: the longest literal prefix wins, and an exact key before a prefix of equal length.
CREATE FUNCTION fairlane.terms(p_queue integer, p_lane text) RETURNS fairlane.rule LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_rule fairlane.rule;
BEGIN
    IF p_lane IS NOT NULL AND p_lane <> '' THEN
        SELECT r.* INTO v_rule FROM fairlane.rule r
        WHERE r.queue = p_queue AND CASE WHEN r.exact THEN r.pattern = p_lane ELSE starts_with(p_lane, r.prefix) END
        ORDER BY length(r.prefix) DESC, r.exact DESC LIMIT 1;
        IF FOUND THEN
            RETURN v_rule;
        END IF;
    END IF;
    v_rule.queue := p_queue;
    v_rule.weight := 1.0;
    v_rule.ordered := false;
    RETURN v_rule;
END $$;

-- Free slots for a class, given a limit, its reservations and the running jobs by class: the same for workers and for limited
-- queues.
CREATE FUNCTION fairlane.room(p_total integer, p_high integer, p_normal integer, r0 bigint, r1 bigint, r2 bigint, p_class integer)
RETURNS integer LANGUAGE sql IMMUTABLE AS $$
    SELECT greatest(0, least(p_total - r0 - r1 - r2,
        CASE WHEN p_class >= CLASS.NORMAL THEN p_total - p_high - r1 - r2 ELSE p_total END,
        CASE WHEN p_class = CLASS.LOW THEN p_total - p_high - p_normal - r2 ELSE p_total END))::integer
$$;

-- The limited lane of a key, created when it has no jobs yet; NULL fields if the lane has no limit.
CREATE FUNCTION fairlane.lane_for(p_queue integer, p_key text) RETURNS fairlane.lane LANGUAGE plpgsql AS $$
DECLARE
    n fairlane.lane;
    v_rule fairlane.rule := fairlane.terms(p_queue, p_key);
BEGIN
    IF v_rule.places IS NOT NULL THEN
        SELECT * INTO n FROM fairlane.lane x WHERE x.queue = p_queue AND x.key = p_key;
        IF NOT FOUND THEN
            INSERT INTO fairlane.lane (queue, key, places, ordered)
            VALUES (p_queue, p_key, v_rule.places, v_rule.ordered) RETURNING * INTO n;
        END IF;
    END IF;
    RETURN n;
END $$;

-- Start a turn in its waiter: turns are never claimed.
CREATE FUNCTION fairlane.start_turn(l fairlane.active_job, m fairlane.moment) RETURNS fairlane.active_job LANGUAGE plpgsql AS $$
BEGIN
    PERFORM fairlane.count_move(l.queue, l.class, l.state, STATE.RUNNING, 1);
    l.state := STATE.RUNNING;
    l.session := l.waiter;
    l.fence := l.fence + 1;
    l.attempt := l.attempt + 1;
    l.started_at := m.now;
    PERFORM fairlane.notify('job:' || j.id), fairlane.notify('session:' || s.id)
    FROM fairlane.job j, fairlane.session s WHERE j.seq = l.seq AND s.seq = l.waiter;
    PERFORM fairlane.notify_lane(l);
    RETURN l;
END $$;

-- A job was granted a place: a turn starts, an ungated job becomes claimable.
CREATE FUNCTION fairlane.open_job(l fairlane.active_job, m fairlane.moment) RETURNS fairlane.active_job LANGUAGE plpgsql AS $$
BEGIN
    IF l.kind = KIND.TURN THEN
        RETURN fairlane.start_turn(l, m);
    ELSIF l.gate = GATE.NONE THEN
        RETURN fairlane.enter(l, m);
    ELSIF l.lane IS NOT NULL THEN
        l.granted_at := m.now;
    END IF;
    RETURN l;
END $$;

-- The last job, in order, that holds a place of a lane and has not started.
CREATE FUNCTION fairlane.weakest(p_lane bigint) RETURNS fairlane.active_job LANGUAGE plpgsql STABLE AS $$
DECLARE
    w fairlane.active_job;
BEGIN
    SELECT l.* INTO w FROM fairlane.active_job l WHERE l.lane = p_lane AND l.lane IS NOT NULL AND l.granted AND l.session IS NULL
    ORDER BY l.rank DESC, l.arrival DESC LIMIT 1;
    RETURN w;
END $$;

CREATE FUNCTION fairlane.ungrant(l fairlane.active_job) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    l := fairlane.withdraw(l);
    l.granted := false;
    l.granted_at := NULL;
    PERFORM fairlane.save(l);
END $$;

-- Add a pending job to its lane, and to its flow if it may start.
CREATE FUNCTION fairlane.arrive(l fairlane.active_job, m fairlane.moment) RETURNS fairlane.active_job LANGUAGE plpgsql AS $$
DECLARE
    n fairlane.lane;
    w fairlane.active_job;
BEGIN
    IF l.arrival IS NULL THEN
        l.arrival := nextval('fairlane.arrival');
    END IF;
    n := fairlane.lane_for(l.queue, fairlane.lane_key(l.seq));
    IF n.id IS NULL THEN
        l.lane := NULL;
        l.granted := true;
        l.rank := 0;
        RETURN fairlane.open_job(l, m);
    END IF;
    l.lane := n.id;
    l.granted := false;
    l.rank := CASE WHEN n.ordered THEN 0 ELSE l.class END;
    IF l.kind = KIND.TURN AND l.expires_at < m.now THEN
        RETURN l;  -- too late to start; the promoter cancels it
    END IF;
    IF n.granted < n.places THEN
        UPDATE fairlane.lane SET granted = granted + 1 WHERE id = n.id;
        l.granted := true;
    ELSIF NOT n.ordered AND l.class < CLASS.LOW THEN
        -- In an unordered lane, a job of a higher class takes the place of the last one that has not started.
        w := fairlane.weakest(n.id);
        IF w.class > l.class THEN
            PERFORM fairlane.ungrant(w);
            l.granted := true;
        END IF;
    END IF;
    IF l.granted THEN
        RETURN fairlane.open_job(l, m);
    END IF;
    RETURN l;
END $$;

-- The gate of a pending job has opened.
CREATE FUNCTION fairlane.ungate(l fairlane.active_job, m fairlane.moment) RETURNS fairlane.active_job LANGUAGE plpgsql AS $$
BEGIN
    l.gate := GATE.NONE;
    IF l.granted THEN
        RETURN fairlane.open_job(l, m);
    END IF;
    RETURN l;
END $$;

-- A job that kept its grant is pending again.
CREATE FUNCTION fairlane.resume(l fairlane.active_job, m fairlane.moment) RETURNS fairlane.active_job LANGUAGE plpgsql AS $$
BEGIN
    IF l.lane IS NOT NULL THEN
        l.rank := CASE WHEN (SELECT n.ordered FROM fairlane.lane n WHERE n.id = l.lane) THEN 0 ELSE l.class END;
    END IF;
    RETURN fairlane.open_job(l, m);
END $$;

-- The next job to be granted a place. Expired jobs get none; the promoter cancels them.
CREATE FUNCTION fairlane.next_in_lane(p_lane bigint, p_now double precision) RETURNS fairlane.active_job LANGUAGE plpgsql STABLE AS $$
DECLARE
    w fairlane.active_job;
BEGIN
    SELECT l.* INTO w FROM fairlane.active_job l WHERE l.lane = p_lane AND l.lane IS NOT NULL AND NOT l.granted AND l.session IS NULL
    AND (l.expires_at IS NULL OR l.expires_at > p_now) ORDER BY l.rank, l.arrival LIMIT 1;
    RETURN w;
END $$;

-- Grant a place to a waiting job.
CREATE FUNCTION fairlane.grant(p_lane bigint, p_seq bigint, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE fairlane.lane SET granted = granted + 1 WHERE id = p_lane;
    PERFORM fairlane.open_granted(p_seq, m);
END $$;

-- The same, but the caller counts the place.
CREATE FUNCTION fairlane.open_granted(p_seq bigint, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    l fairlane.active_job;
BEGIN
    SELECT * INTO l FROM fairlane.active_job x WHERE x.seq = p_seq;
    l.granted := true;
    IF l.state = STATE.PENDING THEN
        l := fairlane.open_job(l, m);
    END IF;
    PERFORM fairlane.save(l);
END $$;

-- Grant the free places of a lane to the next jobs; returns how many were granted. The row of an empty lane is deleted.
CREATE FUNCTION fairlane.hand_on(p_lane bigint, m fairlane.moment) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    n fairlane.lane;
    v_seq bigint;
    v_given integer := 0;
BEGIN
    SELECT * INTO n FROM fairlane.lane x WHERE x.id = p_lane;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    -- Like `next_in_lane`, for all free places in one scan: one by one, each look-up would pass the dead index entries of those
    -- before.
    FOR v_seq IN SELECT l.seq FROM fairlane.active_job l WHERE l.lane = p_lane AND l.lane IS NOT NULL AND NOT l.granted AND l.session IS NULL
        AND (l.expires_at IS NULL OR l.expires_at > m.now) ORDER BY l.rank, l.arrival LIMIT greatest(0, n.places - n.granted)
    LOOP
        PERFORM fairlane.open_granted(v_seq, m);
        v_given := v_given + 1;
    END LOOP;
    IF v_given > 0 THEN
        UPDATE fairlane.lane SET granted = granted + v_given WHERE id = p_lane;
    ELSIF n.granted = 0 THEN
        DELETE FROM fairlane.lane x WHERE x.id = p_lane AND NOT EXISTS (
            SELECT 1 FROM fairlane.active_job w WHERE w.lane = p_lane AND w.lane IS NOT NULL AND NOT w.granted AND w.session IS NULL);
    END IF;
    RETURN v_given;
END $$;

-- Release the place of a job that is gone, or whose saved row is not in the lane any more.
CREATE FUNCTION fairlane.vacate(l fairlane.active_job, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF l.lane IS NULL THEN
        RETURN;
    END IF;
    IF l.granted THEN
        UPDATE fairlane.lane SET granted = granted - 1 WHERE id = l.lane;
    END IF;
    PERFORM fairlane.notify_lane(l);
    PERFORM fairlane.hand_on(l.lane, m);
END $$;

-- A limit was lowered while jobs ran: revoke unstarted grants, newest first, until it holds.
CREATE FUNCTION fairlane.trim(p_lane bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    n fairlane.lane;
    w fairlane.active_job;
    v_taken integer := 0;
BEGIN
    SELECT * INTO n FROM fairlane.lane x WHERE x.id = p_lane;
    IF NOT FOUND OR n.granted <= n.places THEN
        RETURN;
    END IF;
    -- Like `weakest`, for all of them in one scan.
    FOR w IN SELECT l.* FROM fairlane.active_job l WHERE l.lane = p_lane AND l.lane IS NOT NULL AND l.granted AND l.session IS NULL
        ORDER BY l.rank DESC, l.arrival DESC LIMIT n.granted - n.places
    LOOP
        PERFORM fairlane.ungrant(w);
        v_taken := v_taken + 1;
    END LOOP;
    UPDATE fairlane.lane SET granted = granted - v_taken WHERE id = p_lane AND v_taken > 0;
END $$;

-- After a job went back from running to waiting, or the order changed: give the places to the jobs that come first, by arrival
-- in an ordered lane and by class in an unordered one.
CREATE FUNCTION fairlane.regrant(p_lane bigint, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_ordered boolean;
    best fairlane.active_job;
    w fairlane.active_job;
BEGIN
    SELECT n.ordered INTO v_ordered FROM fairlane.lane n WHERE n.id = p_lane;
    LOOP
        best := fairlane.next_in_lane(p_lane, m.now);
        w := fairlane.weakest(p_lane);
        EXIT WHEN best.seq IS NULL OR w.seq IS NULL;
        EXIT WHEN NOT CASE WHEN v_ordered THEN best.arrival < w.arrival ELSE best.class < w.class END;
        PERFORM fairlane.ungrant(w);
        UPDATE fairlane.lane SET granted = granted - 1 WHERE id = p_lane;
        PERFORM fairlane.grant(p_lane, best.seq, m);
    END LOOP;
END $$;
