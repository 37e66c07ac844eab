-- Who may start next: the fair order between lanes, and the places of limited lanes. Everything here runs under the lock
-- of its queue. Functions that take a live row return it changed, for the caller to save.

CREATE FUNCTION fairlane.domain_for(p_queue integer, p_class integer, p_inbox text) RETURNS fairlane.domain LANGUAGE plpgsql AS $$
DECLARE
    d fairlane.domain;
BEGIN
    SELECT * INTO d FROM fairlane.domain x WHERE x.inbox = p_inbox AND x.class = p_class AND x.queue = p_queue;
    IF NOT FOUND THEN
        INSERT INTO fairlane.domain (queue, class, inbox) VALUES (p_queue, p_class, p_inbox) RETURNING * INTO d;
        INSERT INTO fairlane.clock VALUES (d.id, 0);
    END IF;
    RETURN d;
END $$;

-- The flow of the jobs of a class that have no lane and are for every worker, by far the most. Its number follows from the
-- queue's, so it needs no look-up: those cost an enqueue as much as its writes (measured: 20 of 420 µs).
CREATE FUNCTION fairlane.bare_flow(p_queue integer, p_class integer) RETURNS bigint LANGUAGE sql IMMUTABLE
RETURN -(4 * p_queue::bigint + p_class);

CREATE FUNCTION fairlane.flow_number(d fairlane.domain, p_lane text) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
    RETURN CASE WHEN p_lane = '' AND d.inbox = '' THEN fairlane.bare_flow(d.queue, d.class) ELSE nextval('fairlane.flow_id_seq') END;
END $$;

-- The newest versions of what changes with every call, found from the end; see `0001_tables.sql`.
CREATE FUNCTION fairlane.clock_of(p_domain bigint) RETURNS bigint LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT c.value FROM fairlane.clock c WHERE c.domain >= p_domain AND c.domain <= p_domain ORDER BY c.domain DESC LIMIT 1);
END $$;

CREATE FUNCTION fairlane.pace_of(p_flow bigint) RETURNS fairlane.pace LANGUAGE plpgsql STABLE AS $$
DECLARE
    p fairlane.pace;
BEGIN
    SELECT * INTO p FROM fairlane.pace x WHERE x.flow >= p_flow AND x.flow <= p_flow ORDER BY x.flow DESC LIMIT 1;
    RETURN p;
END $$;

-- Where they lie. Nobody but who holds the lock of their queue moves them.
CREATE FUNCTION fairlane.paces_at(p_flows bigint[]) RETURNS tid[] LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN ARRAY(SELECT x.place FROM unnest(p_flows) g(flow) CROSS JOIN LATERAL (
        SELECT y.ctid AS place FROM fairlane.pace y WHERE y.flow >= g.flow AND y.flow <= g.flow ORDER BY y.flow DESC LIMIT 1) x);
END $$;

CREATE FUNCTION fairlane.set_clock(p_domain bigint, p_value bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_place tid;
BEGIN
    SELECT c.ctid INTO v_place FROM fairlane.clock c WHERE c.domain >= p_domain AND c.domain <= p_domain
    ORDER BY c.domain DESC LIMIT 1;
    UPDATE fairlane.clock SET value = p_value WHERE ctid = v_place;
END $$;

-- Give a flow another tag and head, or neither when nothing of it is claimable. Where it stood in line is told by its pace.
CREATE FUNCTION fairlane.move_flow(p fairlane.pace, p_tag bigint, p_head bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF p.tag IS NOT NULL THEN
        DELETE FROM fairlane.line x WHERE x.domain = p.domain AND x.tag = p.tag AND x.head = p.head;
    END IF;
    UPDATE fairlane.pace SET tag = p_tag, head = p_head WHERE ctid = ANY (fairlane.paces_at(ARRAY[p.flow]));
    IF p_tag IS NOT NULL THEN
        INSERT INTO fairlane.line VALUES (p.domain, p_tag, p_head, p.flow);
    END IF;
END $$;

-- Put an arrival into the flow of its lane, and tell those who could start it. Returns the number of the flow.
CREATE FUNCTION fairlane.join_flow(p_queue integer, p_class integer, p_inbox text, p_lane text, p_arrival bigint)
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    d fairlane.domain := fairlane.domain_for(p_queue, p_class, p_inbox);
    p fairlane.pace;
    v_flow bigint;
    v_clock bigint;
BEGIN
    SELECT x.id INTO v_flow FROM fairlane.flow x WHERE x.domain = d.id AND x.lane = p_lane;
    IF v_flow IS NULL THEN
        v_clock := fairlane.clock_of(d.id);
        INSERT INTO fairlane.flow (id, domain, lane) VALUES (fairlane.flow_number(d, p_lane), d.id, p_lane) RETURNING id INTO v_flow;
        INSERT INTO fairlane.pace (flow, domain, finish, tag, head, weight)
        VALUES (v_flow, d.id, 0, v_clock, p_arrival, (fairlane.terms(p_queue, p_lane)).weight);
        INSERT INTO fairlane.line VALUES (d.id, v_clock, p_arrival, v_flow);
    ELSE
        p := fairlane.pace_of(v_flow);
        IF p.tag IS NULL OR p_arrival < p.head THEN
            PERFORM fairlane.move_flow(p, coalesce(p.tag, greatest(fairlane.clock_of(d.id), p.finish)), p_arrival);
        END IF;
    END IF;
    PERFORM fairlane.tell_ready(p_queue, p_inbox);
    RETURN v_flow;
END $$;

CREATE FUNCTION fairlane.lane_key(p_seq bigint) RETURNS text LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN coalesce((SELECT j.lane FROM fairlane.job j WHERE j.seq = p_seq), '');
END $$;

-- Make a job claimable. It is pending, granted and ungated.
CREATE FUNCTION fairlane.enter(l fairlane.live, m fairlane.moment) RETURNS fairlane.live LANGUAGE plpgsql AS $$
BEGIN
    l.flow := fairlane.join_flow(l.queue, l.class, l.inbox, fairlane.lane_key(l.seq), l.arrival);
    -- Only a job that somebody else cannot take can hold its lane's place idle; see `move_idle_grants`.
    l.granted_at := CASE WHEN l.lane IS NOT NULL AND l.inbox <> '' THEN m.now END;
    RETURN l;
END $$;

-- Look up the next job of a flow after its head has gone; its tag stays, because nobody has paid. It comes after the
-- one that has gone: looked for from the beginning, every dead row of the flow would be in the way.
CREATE FUNCTION fairlane.find_head(p_flow bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    p fairlane.pace := fairlane.pace_of(p_flow);
    v_head bigint;
BEGIN
    SELECT l.arrival INTO v_head FROM fairlane.live l
    WHERE l.flow = p_flow AND l.flow IS NOT NULL AND l.session IS NULL AND l.arrival >= p.head ORDER BY l.arrival LIMIT 1;
    IF v_head IS DISTINCT FROM p.head THEN
        PERFORM fairlane.move_flow(p, CASE WHEN v_head IS NOT NULL THEN p.tag END, v_head);
    END IF;
END $$;

-- Take a job out of the line, before it has started. Nothing was charged for it, so nothing is owed.
CREATE FUNCTION fairlane.withdraw(l fairlane.live) RETURNS fairlane.live LANGUAGE plpgsql AS $$
DECLARE
    v_flow bigint := l.flow;
BEGIN
    IF v_flow IS NULL THEN
        RETURN l;
    END IF;
    l.flow := NULL;
    l.granted_at := NULL;
    UPDATE fairlane.live SET flow = NULL, granted_at = NULL WHERE seq = l.seq;
    IF (fairlane.pace_of(v_flow)).head = l.arrival THEN
        PERFORM fairlane.find_head(v_flow);
    END IF;
    RETURN l;
END $$;

-- Return what an interrupted start had paid, so that starting again pays once in all.
CREATE FUNCTION fairlane.give_back(l fairlane.live) RETURNS fairlane.live LANGUAGE plpgsql AS $$
DECLARE
    d fairlane.domain := fairlane.domain_for(l.queue, l.class, l.inbox);
    p fairlane.pace;
    v_flow bigint;
BEGIN
    SELECT f.id INTO v_flow FROM fairlane.flow f WHERE f.domain = d.id AND f.lane = fairlane.lane_key(l.seq);
    IF v_flow IS NOT NULL THEN
        UPDATE fairlane.pace u SET finish = greatest(0, u.finish - l.paid) WHERE u.ctid = ANY (fairlane.paces_at(ARRAY[v_flow]))
        RETURNING * INTO p;
        IF p.tag IS NOT NULL THEN
            PERFORM fairlane.move_flow(p, greatest(fairlane.clock_of(d.id), p.finish), p.head);
        END IF;
    END IF;
    l.paid := 0;
    RETURN l;
END $$;

-- The limited lane of a key, made when it has no jobs yet; nothing (a NULL id) when the lane has no limit.
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

-- Start a turn in its waiter: it is never claimed.
CREATE FUNCTION fairlane.start_turn(l fairlane.live, m fairlane.moment) RETURNS fairlane.live LANGUAGE plpgsql AS $$
BEGIN
    PERFORM fairlane.tally_move(l.queue, l.class, l.state, 3, 1);
    l.state := 3;
    l.session := l.waiter;
    l.fence := l.fence + 1;
    l.attempt := l.attempt + 1;
    l.started_at := m.now;
    PERFORM fairlane.tell('job:' || j.id), fairlane.tell('session:' || s.id)
    FROM fairlane.job j, fairlane.session s WHERE j.seq = l.seq AND s.seq = l.waiter;
    PERFORM fairlane.tell_line(l);
    RETURN l;
END $$;

-- A granted job: a turn starts, a job that nothing else holds becomes claimable.
CREATE FUNCTION fairlane.open_job(l fairlane.live, m fairlane.moment) RETURNS fairlane.live LANGUAGE plpgsql AS $$
BEGIN
    IF l.kind = 1 THEN
        RETURN fairlane.start_turn(l, m);
    ELSIF l.gate = 0 THEN
        RETURN fairlane.enter(l, m);
    ELSIF l.lane IS NOT NULL THEN
        l.granted_at := m.now;
    END IF;
    RETURN l;
END $$;

-- The last of those that hold a place of a lane and have not started.
CREATE FUNCTION fairlane.weakest(p_lane bigint) RETURNS fairlane.live LANGUAGE plpgsql STABLE AS $$
DECLARE
    w fairlane.live;
BEGIN
    SELECT l.* INTO w FROM fairlane.live l WHERE l.lane = p_lane AND l.lane IS NOT NULL AND l.granted AND l.session IS NULL
    ORDER BY l.rank DESC, l.arrival DESC LIMIT 1;
    RETURN w;
END $$;

CREATE FUNCTION fairlane.ungrant(l fairlane.live) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    l := fairlane.withdraw(l);
    l.granted := false;
    l.granted_at := NULL;
    PERFORM fairlane.save(l);
END $$;

-- Let a pending job take its place in its lane, and in the line if it may start.
CREATE FUNCTION fairlane.arrive(l fairlane.live, m fairlane.moment) RETURNS fairlane.live LANGUAGE plpgsql AS $$
DECLARE
    n fairlane.lane;
    w fairlane.live;
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
    IF l.kind = 1 AND l.expires_at < m.now THEN
        RETURN l;  -- too late to start; the sweeper cancels it
    END IF;
    IF n.granted < n.places THEN
        UPDATE fairlane.lane SET granted = granted + 1 WHERE id = n.id;
        l.granted := true;
    ELSIF NOT n.ordered AND l.class < 2 THEN
        -- In an unordered lane a job of a higher class takes the place of the weakest one that has not started.
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
CREATE FUNCTION fairlane.ungate(l fairlane.live, m fairlane.moment) RETURNS fairlane.live LANGUAGE plpgsql AS $$
BEGIN
    l.gate := 0;
    IF l.granted THEN
        RETURN fairlane.open_job(l, m);
    END IF;
    RETURN l;
END $$;

-- A job that kept its grant is pending again.
CREATE FUNCTION fairlane.resume(l fairlane.live, m fairlane.moment) RETURNS fairlane.live LANGUAGE plpgsql AS $$
BEGIN
    IF l.lane IS NOT NULL THEN
        l.rank := CASE WHEN (SELECT n.ordered FROM fairlane.lane n WHERE n.id = l.lane) THEN 0 ELSE l.class END;
    END IF;
    RETURN fairlane.open_job(l, m);
END $$;

-- The next in line for a place. What has expired gets none; the sweeper cancels it.
CREATE FUNCTION fairlane.next_in_lane(p_lane bigint, p_now double precision) RETURNS fairlane.live LANGUAGE plpgsql STABLE AS $$
DECLARE
    w fairlane.live;
BEGIN
    SELECT l.* INTO w FROM fairlane.live l WHERE l.lane = p_lane AND l.lane IS NOT NULL AND NOT l.granted AND l.session IS NULL
    AND (l.expires_at IS NULL OR l.expires_at > p_now) ORDER BY l.rank, l.arrival LIMIT 1;
    RETURN w;
END $$;

-- Give a place to a waiting job.
CREATE FUNCTION fairlane.grant(p_lane bigint, p_seq bigint, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE fairlane.lane SET granted = granted + 1 WHERE id = p_lane;
    PERFORM fairlane.open_granted(p_seq, m);
END $$;

-- The same for a place that the caller counts.
CREATE FUNCTION fairlane.open_granted(p_seq bigint, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    l fairlane.live;
BEGIN
    SELECT * INTO l FROM fairlane.live x WHERE x.seq = p_seq;
    l.granted := true;
    IF l.state = 2 THEN
        l := fairlane.open_job(l, m);
    END IF;
    PERFORM fairlane.save(l);
END $$;

-- Give the free places of a lane to the next in it; returns how many were given. An empty lane leaves nothing.
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
    -- As `next_in_lane`, for all free places in one scan: looked for one by one, each would pass the dead entries of those before.
    FOR v_seq IN SELECT l.seq FROM fairlane.live l WHERE l.lane = p_lane AND l.lane IS NOT NULL AND NOT l.granted AND l.session IS NULL
        AND (l.expires_at IS NULL OR l.expires_at > m.now) ORDER BY l.rank, l.arrival LIMIT greatest(0, n.places - n.granted)
    LOOP
        PERFORM fairlane.open_granted(v_seq, m);
        v_given := v_given + 1;
    END LOOP;
    IF v_given > 0 THEN
        UPDATE fairlane.lane SET granted = granted + v_given WHERE id = p_lane;
    ELSIF n.granted = 0 THEN
        DELETE FROM fairlane.lane x WHERE x.id = p_lane AND NOT EXISTS (
            SELECT 1 FROM fairlane.live w WHERE w.lane = p_lane AND w.lane IS NOT NULL AND NOT w.granted AND w.session IS NULL);
    END IF;
    RETURN v_given;
END $$;

-- A job that is gone, or whose row names no lane any more, gives up its place.
CREATE FUNCTION fairlane.vacate(l fairlane.live, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF l.lane IS NULL THEN
        RETURN;
    END IF;
    IF l.granted THEN
        UPDATE fairlane.lane SET granted = granted - 1 WHERE id = l.lane;
    END IF;
    PERFORM fairlane.tell_line(l);
    PERFORM fairlane.hand_on(l.lane, m);
END $$;

-- A limit was lowered while jobs ran: take back unstarted grants, newest first, until it holds.
CREATE FUNCTION fairlane.trim(p_lane bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    n fairlane.lane;
    w fairlane.live;
    v_taken integer := 0;
BEGIN
    SELECT * INTO n FROM fairlane.lane x WHERE x.id = p_lane;
    IF NOT FOUND OR n.granted <= n.places THEN
        RETURN;
    END IF;
    -- As `weakest`, for all of them in one scan.
    FOR w IN SELECT l.* FROM fairlane.live l WHERE l.lane = p_lane AND l.lane IS NOT NULL AND l.granted AND l.session IS NULL
        ORDER BY l.rank DESC, l.arrival DESC LIMIT n.granted - n.places
    LOOP
        PERFORM fairlane.ungrant(w);
        v_taken := v_taken + 1;
    END LOOP;
    UPDATE fairlane.lane SET granted = granted - v_taken WHERE id = p_lane AND v_taken > 0;
END $$;

-- After a job went back from running to waiting, or the order changed: whoever comes first has the place. By arrival in
-- an ordered lane; by class in an unordered one.
CREATE FUNCTION fairlane.settle(p_lane bigint, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_ordered boolean;
    best fairlane.live;
    w fairlane.live;
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
