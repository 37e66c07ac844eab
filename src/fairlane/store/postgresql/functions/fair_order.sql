-- The fair order between lanes. Everything here runs under the lock of the queue. Functions that take an active row return the
-- changed row, and the caller saves it.

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

-- The flow of jobs without a lane and for any worker, which are the most frequent. Its number is computed from the queue and
-- the class, which saves a look-up (measured: 20 of the 420 µs of an enqueue).
CREATE FUNCTION fairlane.bare_flow(p_queue integer, p_class integer) RETURNS bigint LANGUAGE sql IMMUTABLE
RETURN -(4 * p_queue::bigint + p_class);

CREATE FUNCTION fairlane.flow_number(d fairlane.domain, p_lane text) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
    RETURN CASE WHEN p_lane = '' AND d.inbox = '' THEN fairlane.bare_flow(d.queue, d.class) ELSE nextval('fairlane.flow_id_seq') END;
END $$;

-- The newest version of a row that changes with every call, found by a backward scan; see the table `clock`.
CREATE FUNCTION fairlane.clock_of(p_domain bigint) RETURNS bigint LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT c.value FROM fairlane.clock c WHERE c.domain >= p_domain AND c.domain <= p_domain ORDER BY c.domain DESC LIMIT 1);
END $$;

CREATE FUNCTION fairlane.pace_of(p_flow bigint) RETURNS fairlane.lane_pace LANGUAGE plpgsql STABLE AS $$
DECLARE
    p fairlane.lane_pace;
BEGIN
    SELECT * INTO p FROM fairlane.lane_pace x WHERE x.flow >= p_flow AND x.flow <= p_flow ORDER BY x.flow DESC LIMIT 1;
    RETURN p;
END $$;

-- The row locations (`ctid`). Only the call that holds the lock of the queue moves these rows.
CREATE FUNCTION fairlane.paces_at(p_flows bigint[]) RETURNS tid[] LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN ARRAY(SELECT x.tid FROM unnest(p_flows) g(flow) CROSS JOIN LATERAL (
        SELECT y.ctid AS tid FROM fairlane.lane_pace y WHERE y.flow >= g.flow AND y.flow <= g.flow ORDER BY y.flow DESC LIMIT 1) x);
END $$;

CREATE FUNCTION fairlane.set_clock(p_domain bigint, p_value bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_place tid;
BEGIN
    SELECT c.ctid INTO v_place FROM fairlane.clock c WHERE c.domain >= p_domain AND c.domain <= p_domain
    ORDER BY c.domain DESC LIMIT 1;
    UPDATE fairlane.clock SET value = p_value WHERE ctid = v_place;
END $$;

-- Change the tag and the head of a flow, both NULL when it has no claimable job. `p` is its state before the change.
CREATE FUNCTION fairlane.move_flow(p fairlane.lane_pace, p_tag bigint, p_head bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF p.tag IS NOT NULL THEN
        DELETE FROM fairlane.ready_lane x WHERE x.domain = p.domain AND x.tag = p.tag AND x.head = p.head;
    END IF;
    UPDATE fairlane.lane_pace SET tag = p_tag, head = p_head WHERE ctid = ANY (fairlane.paces_at(ARRAY[p.flow]));
    IF p_tag IS NOT NULL THEN
        INSERT INTO fairlane.ready_lane VALUES (p.domain, p_tag, p_head, p.flow);
    END IF;
END $$;

-- Add an arriving job to the flow of its lane, and notify the workers that could start it. Returns the number of the flow.
CREATE FUNCTION fairlane.join_flow(p_queue integer, p_class integer, p_inbox text, p_lane text, p_arrival bigint)
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    d fairlane.domain := fairlane.domain_for(p_queue, p_class, p_inbox);
    p fairlane.lane_pace;
    v_flow bigint;
    v_clock bigint;
BEGIN
    SELECT x.id INTO v_flow FROM fairlane.flow x WHERE x.domain = d.id AND x.lane = p_lane;
    IF v_flow IS NULL THEN
        v_clock := fairlane.clock_of(d.id);
        INSERT INTO fairlane.flow (id, domain, lane) VALUES (fairlane.flow_number(d, p_lane), d.id, p_lane) RETURNING id INTO v_flow;
        INSERT INTO fairlane.lane_pace (flow, domain, finish, tag, head, weight)
        VALUES (v_flow, d.id, 0, v_clock, p_arrival, (fairlane.terms(p_queue, p_lane)).weight);
        INSERT INTO fairlane.ready_lane VALUES (d.id, v_clock, p_arrival, v_flow);
    ELSE
        p := fairlane.pace_of(v_flow);
        IF p.tag IS NULL OR p_arrival < p.head THEN
            PERFORM fairlane.move_flow(p, coalesce(p.tag, greatest(fairlane.clock_of(d.id), p.finish)), p_arrival);
        END IF;
    END IF;
    PERFORM fairlane.notify_ready(p_queue, p_inbox);
    RETURN v_flow;
END $$;

CREATE FUNCTION fairlane.lane_key(p_seq bigint) RETURNS text LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN coalesce((SELECT j.lane FROM fairlane.job j WHERE j.seq = p_seq), '');
END $$;

-- Make a job claimable; it is pending, granted and ungated.
CREATE FUNCTION fairlane.enter(l fairlane.active_job, m fairlane.moment) RETURNS fairlane.active_job LANGUAGE plpgsql AS $$
BEGIN
    l.flow := fairlane.join_flow(l.queue, l.class, l.inbox, fairlane.lane_key(l.seq), l.arrival);
    -- Only a job that no other worker can take can hold its lane's place idle.
    l.granted_at := CASE WHEN l.lane IS NOT NULL AND l.inbox <> '' THEN m.now END;
    RETURN l;
END $$;

-- Find the next job of a flow after its head has gone. The tag stays, because nothing was charged. The search starts at the old
-- head: from the beginning, it would read every dead row of the flow.
CREATE FUNCTION fairlane.find_head(p_flow bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    p fairlane.lane_pace := fairlane.pace_of(p_flow);
    v_head bigint;
BEGIN
    SELECT l.arrival INTO v_head FROM fairlane.active_job l
    WHERE l.flow = p_flow AND l.flow IS NOT NULL AND l.session IS NULL AND l.arrival >= p.head ORDER BY l.arrival LIMIT 1;
    IF v_head IS DISTINCT FROM p.head THEN
        PERFORM fairlane.move_flow(p, CASE WHEN v_head IS NOT NULL THEN p.tag END, v_head);
    END IF;
END $$;

-- Remove a job from its flow before it has started. Nothing was charged for it.
CREATE FUNCTION fairlane.withdraw(l fairlane.active_job) RETURNS fairlane.active_job LANGUAGE plpgsql AS $$
DECLARE
    v_flow bigint := l.flow;
BEGIN
    IF v_flow IS NULL THEN
        RETURN l;
    END IF;
    l.flow := NULL;
    l.granted_at := NULL;
    UPDATE fairlane.active_job SET flow = NULL, granted_at = NULL WHERE seq = l.seq;
    IF (fairlane.pace_of(v_flow)).head = l.arrival THEN
        PERFORM fairlane.find_head(v_flow);
    END IF;
    RETURN l;
END $$;

-- Refund the charge of an interrupted start, so that the job pays once in all.
CREATE FUNCTION fairlane.give_back(l fairlane.active_job) RETURNS fairlane.active_job LANGUAGE plpgsql AS $$
DECLARE
    d fairlane.domain := fairlane.domain_for(l.queue, l.class, l.inbox);
    p fairlane.lane_pace;
    v_flow bigint;
BEGIN
    SELECT f.id INTO v_flow FROM fairlane.flow f WHERE f.domain = d.id AND f.lane = fairlane.lane_key(l.seq);
    IF v_flow IS NOT NULL THEN
        UPDATE fairlane.lane_pace u SET finish = greatest(0, u.finish - l.paid) WHERE u.ctid = ANY (fairlane.paces_at(ARRAY[v_flow]))
        RETURNING * INTO p;
        IF p.tag IS NOT NULL THEN
            PERFORM fairlane.move_flow(p, greatest(fairlane.clock_of(d.id), p.finish), p.head);
        END IF;
    END IF;
    l.paid := 0;
    RETURN l;
END $$;
