-- The row of a job that is not final, the counts of its queue, and the time of a call.

-- Read after the locks, so that a later call has a later time.
CREATE FUNCTION fairlane.moment_of(p_now double precision, p_lease double precision) RETURNS fairlane.moment
LANGUAGE plpgsql AS $$
DECLARE
    v_clock double precision := extract(epoch FROM clock_timestamp());
BEGIN
    IF coalesce(p_now, p_lease) IS NOT NULL THEN
        PERFORM fairlane.check_clock();
    END IF;
    RETURN (coalesce(p_now, v_clock), coalesce(p_lease, p_now, v_clock))::fairlane.moment;
END $$;

-- Count the move of a job from one state to another; NULL stands for no state. Arriving jobs are not counted.
CREATE FUNCTION fairlane.count_move(p_queue integer, p_class integer, p_was integer, p_becomes integer, p_slotless integer DEFAULT 0)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO fairlane.queue_count (queue, class, scheduled, pending, running, slotless, completed, failed, cancelled)
    VALUES (p_queue, p_class,
        (p_becomes IS NOT DISTINCT FROM STATE.SCHEDULED)::integer - (p_was IS NOT DISTINCT FROM STATE.SCHEDULED)::integer,
        (p_becomes IS NOT DISTINCT FROM STATE.PENDING)::integer - (p_was IS NOT DISTINCT FROM STATE.PENDING)::integer,
        (p_becomes IS NOT DISTINCT FROM STATE.RUNNING)::integer - (p_was IS NOT DISTINCT FROM STATE.RUNNING)::integer,
        p_slotless,
        (p_becomes IS NOT DISTINCT FROM STATE.COMPLETED)::integer, (p_becomes IS NOT DISTINCT FROM STATE.FAILED)::integer,
        (p_becomes IS NOT DISTINCT FROM STATE.CANCELLED)::integer);
END $$;

CREATE FUNCTION fairlane.queue_number(p_name text) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_id integer;
BEGIN
    SELECT q.id INTO v_id FROM fairlane.queue q WHERE q.name = p_name;
    IF v_id IS NULL THEN
        INSERT INTO fairlane.queue (name) VALUES (p_name) ON CONFLICT (name) DO NOTHING;
        SELECT q.id INTO v_id FROM fairlane.queue q WHERE q.name = p_name;
    END IF;
    RETURN v_id;
END $$;

-- Whether a job has a row in `job_extra`: it is scheduled, gated, in an inbox, bound, has a waiter, or expires.
CREATE FUNCTION fairlane.has_extra(l fairlane.active_job) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN l.state = STATE.SCHEDULED OR l.gate IN (GATE.UNBOUND, GATE.CLEANUP, GATE.PARENT) OR l.inbox <> ''
        OR num_nonnulls(l.expires_at, l.binding, l.waiter) > 0;
END $$;

-- Update the row in `job_extra` from the row in `active_job`.
CREATE FUNCTION fairlane.save_extra(l fairlane.active_job) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF fairlane.has_extra(l) THEN
        INSERT INTO fairlane.job_extra (seq, arrival, waiter, binding, granted_at, due, expires_at, class, gate, scheduled, inbox)
        VALUES (l.seq, l.arrival, l.waiter, l.binding, l.granted_at, l.due, l.expires_at, l.class, l.gate, l.state = STATE.SCHEDULED, l.inbox)
        ON CONFLICT (seq) DO UPDATE SET arrival = excluded.arrival, binding = excluded.binding, granted_at = excluded.granted_at,
            due = excluded.due, expires_at = excluded.expires_at, gate = excluded.gate, scheduled = excluded.scheduled, inbox = excluded.inbox;
    ELSE
        DELETE FROM fairlane.job_extra a WHERE a.seq = l.seq;
    END IF;
END $$;

-- The same for new jobs of which some expire, and which have no other optional attribute.
CREATE FUNCTION fairlane.set_expiries(p_seqs bigint[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO fairlane.job_extra (seq, arrival, due, expires_at, class, gate, scheduled, inbox)
    SELECT l.seq, l.arrival, l.due, l.expires_at, l.class, l.gate, false, '' FROM fairlane.active_job l
    WHERE l.seq = ANY (p_seqs) AND l.expires_at IS NOT NULL;
END $$;

-- Insert the active row of a new job.
CREATE FUNCTION fairlane.put(l fairlane.active_job) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO fairlane.active_job SELECT l.*;
    IF fairlane.has_extra(l) THEN
        PERFORM fairlane.save_extra(l);
    END IF;
END $$;

-- Write the columns of an active row that change.
CREATE FUNCTION fairlane.save(l fairlane.active_job) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM fairlane.save_extra(l);
    UPDATE fairlane.active_job SET state = l.state, gate = l.gate, flow = l.flow, inbox = l.inbox, lane = l.lane, rank = l.rank,
        granted = l.granted, granted_at = l.granted_at, arrival = l.arrival, due = l.due, session = l.session,
        claim = l.claim, binding = l.binding, fence = l.fence, attempt = l.attempt, crashes = l.crashes,
        suspect = l.suspect, cancel = l.cancel, refused = l.refused, paid = l.paid, started_at = l.started_at,
        expires_at = l.expires_at, returns = l.returns
    WHERE seq = l.seq;
END $$;

CREATE FUNCTION fairlane.refuse(p_code text, p_message text, p_detail text DEFAULT '') RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = p_code, MESSAGE = p_message, DETAIL = p_detail;
END $$;
