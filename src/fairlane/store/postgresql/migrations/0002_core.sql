-- What every step uses: locks, time, hints, tallies, queues and the terms of lanes.
--
-- The order of locks. Every function that writes takes what it needs of this list from top to bottom, each step sorted,
-- and waits for nothing above a step once it holds something of that step. So no two calls can wait for each other:
--
--   1. names: new queues, then job ids, then unique values, then rows of `schedule`. An insert waits for a call that stores the
--      same name at this moment, 2 s at most, and holds no lock of steps 2 to 7 meanwhile. Only copies of a broadcast get their
--      ids later, because those follow from which workers there are; that wait ends after 0.1 s, with an error.
--   2. the store: an advisory lock, shared by the many, alone by the few. With the store alone nothing of steps 3 to 5 is
--      held by anybody else.
--   3. running jobs: rows of `live` that have a session, by `seq`; then their rows of `progress`.
--   4. pools: advisory, by number. A pool's lock guards its bindings.
--   5. queues: advisory, by number. A queue's lock guards its line: domains, flows, lanes, jobs that wait or arrive, parents of
--      broadcasts, and the rows of `aside`. Those are never waited for.
--   6. the row of `leader`, shared by the leader's passes. Renewing a term takes this step alone.
--   7. the row of `session`, then that of `load`. Renewing a lease takes this step alone.
--
-- Whatever is needed out of order is taken only if it is free: `pg_try_…`, SKIP LOCKED or NOWAIT. Of the remaining rows
-- `tally`, `outcome`, `attempt` and `relation` are only added to; a call that counts in them, adds them up or removes them skips
-- what is locked, or is the only one that does (`prune`). Locks end with their transaction, or with a block that is undone.

CREATE TYPE fairlane.moment AS (
    now   double precision,        -- for due times, which a person may have named
    lease double precision         -- for leases and terms
);

-- Two schemas in one database must not wait for each other: the number of a type tells them apart.
CREATE FUNCTION fairlane.space() RETURNS integer LANGUAGE sql STABLE AS $$
    SELECT pg_catalog.pg_typeof(NULL::fairlane.queue)::oid::integer
$$;

CREATE FUNCTION fairlane.lock_alone() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(fairlane.space(), 0);
END $$;

CREATE FUNCTION fairlane.lock_some(p_pools text[], p_queues integer[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_space integer := fairlane.space();
    v_key integer;
BEGIN
    PERFORM pg_advisory_xact_lock_shared(v_space, 0);
    IF cardinality(p_queues) = 1 AND coalesce(cardinality(p_pools), 0) = 0 THEN
        PERFORM pg_advisory_xact_lock(v_space, p_queues[1]);
        RETURN;
    END IF;
    -- Pools are negative numbers, queues positive ones. Two pools that share a number wait for each other, no more.
    FOR v_key IN SELECT DISTINCT -1 - (hashtext(p) & 1073741823) FROM unnest(p_pools) p ORDER BY 1 LOOP
        PERFORM pg_advisory_xact_lock(v_space, v_key);
    END LOOP;
    FOR v_key IN SELECT DISTINCT q FROM unnest(p_queues) q ORDER BY 1 LOOP
        PERFORM pg_advisory_xact_lock(v_space, v_key);
    END LOOP;
END $$;

-- The same without waiting: true when all of it was free.
CREATE FUNCTION fairlane.try_lock(p_queues integer[], p_pools text[] DEFAULT NULL) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_space integer := fairlane.space();
    v_key integer;
BEGIN
    IF NOT pg_try_advisory_xact_lock_shared(v_space, 0) THEN
        RETURN false;
    ELSIF cardinality(p_queues) = 1 AND p_pools IS NULL THEN
        RETURN pg_try_advisory_xact_lock(v_space, p_queues[1]);
    END IF;
    FOR v_key IN SELECT -1 - (hashtext(p) & 1073741823) FROM unnest(p_pools) p UNION SELECT q FROM unnest(p_queues) q ORDER BY 1 LOOP
        IF NOT pg_try_advisory_xact_lock(v_space, v_key) THEN
            RETURN false;
        END IF;
    END LOOP;
    RETURN true;
END $$;

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

-- Hints are collected in the transaction and published by the caller once it is committed.
-- A call that moves thousands of jobs tells no more than a part of them: hints may be lost, and the rest polls.
CREATE FUNCTION fairlane.tell(p_topic text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_told text := current_setting('fairlane_step.topics', true);
BEGIN
    IF length(v_told) > 50000 THEN
        RETURN;
    END IF;
    PERFORM set_config('fairlane_step.topics', concat(v_told, p_topic, E'\n'), true);
END $$;

CREATE FUNCTION fairlane.topics() RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    v_told text := current_setting('fairlane_step.topics', true);
BEGIN
    IF v_told IS NULL OR v_told = '' THEN
        RETURN '{}';
    END IF;
    PERFORM set_config('fairlane_step.topics', '', true);
    RETURN ARRAY(SELECT DISTINCT t FROM unnest(string_to_array(rtrim(v_told, E'\n'), E'\n')) t);
END $$;

-- Somebody may start a job: any worker of the queue, or the one whose inbox it is in.
CREATE FUNCTION fairlane.tell_ready(p_queue integer, p_inbox text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF p_inbox = '' OR left(p_inbox, 1) = '~' THEN
        PERFORM fairlane.tell('queue:' || q.name) FROM fairlane.queue q WHERE q.id = p_queue;
    ELSE
        PERFORM fairlane.tell('worker:' || p_inbox);
    END IF;
END $$;

-- A running job leaves: where its queue has a limit, somebody else may start now, in any inbox.
CREATE FUNCTION fairlane.tell_room(p_queue integer) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM fairlane.queue q WHERE q.id = p_queue AND q.slots IS NOT NULL) THEN
        PERFORM fairlane.tell_waiting(p_queue);
    END IF;
END $$;

CREATE FUNCTION fairlane.tell_waiting(p_queue integer) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM fairlane.tell_ready(p_queue, '');
    PERFORM fairlane.tell('worker:' || d.inbox) FROM fairlane.domain d WHERE d.queue = p_queue AND d.inbox <> ''
        AND fairlane.next_flow(d.id) IS NOT NULL;
END $$;

-- Whoever waits behind this job in its limited lane has moved up.
CREATE FUNCTION fairlane.tell_line(l fairlane.live) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM fairlane.tell('place:' || q.name || '/' || j.lane)
    FROM fairlane.job j, fairlane.queue q WHERE j.seq = l.seq AND j.lane IS NOT NULL AND q.id = l.queue;
END $$;

-- One job went from one state to another; NULL is no state, and what is arriving is not counted.
CREATE FUNCTION fairlane.tally_move(p_queue integer, p_class integer, p_was integer, p_becomes integer, p_slotless integer DEFAULT 0)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO fairlane.tally (queue, class, scheduled, pending, running, slotless, completed, failed, cancelled)
    VALUES (p_queue, p_class,
        (p_becomes IS NOT DISTINCT FROM 1)::integer - (p_was IS NOT DISTINCT FROM 1)::integer,
        (p_becomes IS NOT DISTINCT FROM 2)::integer - (p_was IS NOT DISTINCT FROM 2)::integer,
        (p_becomes IS NOT DISTINCT FROM 3)::integer - (p_was IS NOT DISTINCT FROM 3)::integer,
        p_slotless,
        (p_becomes IS NOT DISTINCT FROM 4)::integer, (p_becomes IS NOT DISTINCT FROM 5)::integer,
        (p_becomes IS NOT DISTINCT FROM 6)::integer);
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

-- What holds for a lane: the longest literal prefix wins, an exact key before a prefix of equal length.
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

-- Whether a job has anything that few have, and so a row in `aside`.
CREATE FUNCTION fairlane.is_aside(l fairlane.live) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN l.state = 1 OR l.gate IN (1, 2, 4) OR l.inbox <> ''
        OR num_nonnulls(l.expires_at, l.binding, l.waiter) > 0;
END $$;

-- Let `aside` say what `live` says of a job.
CREATE FUNCTION fairlane.set_aside(l fairlane.live) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF fairlane.is_aside(l) THEN
        INSERT INTO fairlane.aside (seq, arrival, waiter, binding, granted_at, due, expires_at, class, gate, scheduled, inbox)
        VALUES (l.seq, l.arrival, l.waiter, l.binding, l.granted_at, l.due, l.expires_at, l.class, l.gate, l.state = 1, l.inbox)
        ON CONFLICT (seq) DO UPDATE SET arrival = excluded.arrival, binding = excluded.binding, granted_at = excluded.granted_at,
            due = excluded.due, expires_at = excluded.expires_at, gate = excluded.gate, scheduled = excluded.scheduled, inbox = excluded.inbox;
    ELSE
        DELETE FROM fairlane.aside a WHERE a.seq = l.seq;
    END IF;
END $$;

-- The same for new jobs that have nothing else than that some of them expire.
CREATE FUNCTION fairlane.set_expiries(p_seqs bigint[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO fairlane.aside (seq, arrival, due, expires_at, class, gate, scheduled, inbox)
    SELECT l.seq, l.arrival, l.due, l.expires_at, l.class, l.gate, false, '' FROM fairlane.live l
    WHERE l.seq = ANY (p_seqs) AND l.expires_at IS NOT NULL;
END $$;

-- Store the live row of a new job.
CREATE FUNCTION fairlane.put(l fairlane.live) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO fairlane.live SELECT l.*;
    IF fairlane.is_aside(l) THEN
        PERFORM fairlane.set_aside(l);
    END IF;
END $$;

-- Write what moves of a live job.
CREATE FUNCTION fairlane.save(l fairlane.live) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM fairlane.set_aside(l);
    UPDATE fairlane.live SET state = l.state, gate = l.gate, flow = l.flow, inbox = l.inbox, lane = l.lane, rank = l.rank,
        granted = l.granted, granted_at = l.granted_at, arrival = l.arrival, due = l.due, session = l.session,
        claim = l.claim, binding = l.binding, fence = l.fence, attempt = l.attempt, crashes = l.crashes,
        suspect = l.suspect, cancel = l.cancel, refused = l.refused, paid = l.paid, started_at = l.started_at,
        expires_at = l.expires_at, returns = l.returns
    WHERE seq = l.seq;
END $$;

-- Free slots for a class, out of a limit, its reservations and what runs: the rule of workers and of limited queues.
CREATE FUNCTION fairlane.room(p_total integer, p_high integer, p_normal integer, r0 bigint, r1 bigint, r2 bigint, p_class integer)
RETURNS integer LANGUAGE sql IMMUTABLE AS $$
    SELECT greatest(0, least(p_total - r0 - r1 - r2,
        CASE WHEN p_class >= 1 THEN p_total - p_high - r1 - r2 ELSE p_total END,
        CASE WHEN p_class = 2 THEN p_total - p_high - p_normal - r2 ELSE p_total END))::integer
$$;

CREATE FUNCTION fairlane.refuse(p_code text, p_message text, p_detail text DEFAULT '') RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = p_code, MESSAGE = p_message, DETAIL = p_detail;
END $$;
