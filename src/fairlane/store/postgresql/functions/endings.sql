-- How jobs end or go back to waiting: every way out of running or waiting, with all its consequences in the same step.

-- A job leaves its session and frees its slot.
CREATE FUNCTION fairlane.unload(l fairlane.active_job) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF l.session IS NOT NULL AND l.kind <> KIND.TURN THEN
        PERFORM fairlane.lighten(l.session, (l.class = CLASS.HIGH)::integer, (l.class = CLASS.NORMAL)::integer, (l.class = CLASS.LOW)::integer);
    END IF;
END $$;

CREATE FUNCTION fairlane.lighten(p_session bigint, p_high integer, p_normal integer, p_low integer) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_place tid;
BEGIN
    -- Lock the row first: another call of the same session may be changing it, which moves it.
    SELECT x.ctid INTO v_place FROM fairlane.session_load x WHERE x.session >= p_session AND x.session <= p_session
    ORDER BY x.session DESC LIMIT 1 FOR UPDATE;
    UPDATE fairlane.session_load SET running_high = running_high - p_high, running_normal = running_normal - p_normal,
        running_low = running_low - p_low WHERE ctid = v_place;
END $$;

-- Make a job final, and release what it held: place, binding, unique value, parent.
CREATE FUNCTION fairlane.end_job(l fairlane.active_job, p_state smallint, p_reason text, p_result bytea, p_error text, p_group text,
    p_move smallint, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    j record;
BEGIN
    INSERT INTO fairlane.outcome (seq, queue, state, reason, result, error, error_group, session, move, arrival, attempt,
        fence, started_at, finished_at, refused)
    VALUES (l.seq, l.queue, p_state, p_reason, p_result, p_error, p_group, CASE WHEN p_move IS NOT NULL THEN l.session END,
        CASE WHEN l.session IS NOT NULL THEN p_move END, l.arrival, l.attempt, l.fence, l.started_at, m.now, l.refused);
    DELETE FROM fairlane.active_job WHERE seq = l.seq;
    IF fairlane.has_extra(l) THEN
        DELETE FROM fairlane.job_extra WHERE seq = l.seq;
    END IF;
    SELECT x.id, x.uniq, x.parent INTO j FROM fairlane.job x WHERE x.seq = l.seq;
    PERFORM fairlane.count_move(l.queue, l.class, l.state, p_state, CASE WHEN l.state = STATE.RUNNING AND l.kind IN (KIND.TURN, KIND.BROADCAST) THEN -1 ELSE 0 END);
    PERFORM fairlane.notify('job:' || j.id);
    IF l.state = STATE.RUNNING THEN
        PERFORM fairlane.unload(l);
        PERFORM fairlane.notify_room(l.queue);
    ELSIF l.flow IS NOT NULL AND (fairlane.pace_of(l.flow)).head = l.arrival THEN
        PERFORM fairlane.find_head(l.flow);
    END IF;
    IF j.uniq IS NOT NULL THEN
        DELETE FROM fairlane.held_unique u WHERE u.seq = l.seq AND (u.until IS NULL OR u.until <= m.now);
        UPDATE fairlane.held_unique SET state = p_state WHERE seq = l.seq;
    END IF;
    PERFORM fairlane.vacate(l, m);
    IF l.kind = KIND.CLEANUP THEN
        PERFORM fairlane.cleaned(l, p_state, m);
    ELSIF l.binding IS NOT NULL THEN
        PERFORM fairlane.used(l.binding, m);
    END IF;
    IF j.parent IS NOT NULL THEN
        PERFORM fairlane.child_ended(j.parent, m);
    END IF;
END $$;

CREATE FUNCTION fairlane.expire(p_seq bigint, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    l fairlane.active_job;
BEGIN
    SELECT * INTO l FROM fairlane.active_job x WHERE x.seq = p_seq;
    IF FOUND THEN
        PERFORM fairlane.end_job(l, STATE.CANCELLED::smallint, 'expired', NULL, NULL, NULL, NULL, m);
    END IF;
END $$;

-- Add an ended claim to the history of a job that goes on. The last claim of all is recorded in the outcome.
CREATE FUNCTION fairlane.record_attempt(l fairlane.active_job, p_holder text, p_worker text, p_move smallint, p_state text, p_reason text,
    p_error text, m fairlane.moment) RETURNS fairlane.active_job LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO fairlane.attempt (seq, fence, attempt, session, worker, started_at, ended_at, outcome, state, reason, error, refused)
    VALUES (l.seq, l.fence, l.attempt, p_holder, p_worker, coalesce(l.started_at, m.now), m.now,
        (ARRAY['enqueued', 'promoted', 'claimed', 'completed', 'failed', 'retry', 'snoozed', 'handed_back', 'crashed',
               'taken_back', 'cancelled', 'declined'])[p_move + 1], p_state, p_reason, p_error, l.refused);
    -- The last twenty are kept.
    DELETE FROM fairlane.attempt a WHERE a.ctid = ANY (ARRAY(SELECT o.ctid FROM fairlane.attempt o WHERE o.seq = l.seq AND o.fence < (
        SELECT min(k.fence) FROM (SELECT x.fence FROM fairlane.attempt x WHERE x.seq = l.seq ORDER BY x.fence DESC LIMIT 20) k)
        FOR UPDATE SKIP LOCKED));
    l.refused := 0;
    RETURN l;
END $$;

-- Put a running job back to waiting. An ordered lane stays closed for it; in other lanes it gives up its place. `p_inbox`: the
-- inbox to wait in, if not its own.
CREATE FUNCTION fairlane.return_job(l fairlane.active_job, p_delay double precision, p_keep_arrival boolean, m fairlane.moment,
    p_inbox text DEFAULT NULL) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_state smallint := CASE WHEN p_delay > 0 THEN STATE.SCHEDULED ELSE STATE.PENDING END;
    v_lane bigint := l.lane;
    v_granted boolean := l.granted;
    v_keeps boolean := false;
BEGIN
    PERFORM fairlane.notify_room(l.queue);
    IF l.lane IS NOT NULL THEN
        SELECT n.ordered OR (p_keep_arrival AND NOT p_delay > 0) INTO v_keeps FROM fairlane.lane n WHERE n.id = l.lane;
    END IF;
    PERFORM fairlane.unload(l);
    PERFORM fairlane.count_move(l.queue, l.class, l.state, v_state, CASE WHEN l.kind IN (KIND.TURN, KIND.BROADCAST) THEN -1 ELSE 0 END);
    l.state := v_state;
    l.session := NULL;
    l.claim := NULL;
    l.started_at := NULL;
    l.flow := NULL;
    l.due := CASE WHEN p_delay > 0 THEN m.now + p_delay END;
    IF NOT v_keeps THEN
        IF NOT p_keep_arrival THEN
            l.arrival := NULL;
        END IF;
        l.lane := NULL;
        l.granted := false;
        PERFORM fairlane.save(l);
        IF v_lane IS NOT NULL THEN
            IF v_granted THEN
                UPDATE fairlane.lane SET granted = granted - 1 WHERE id = v_lane;
            END IF;
            PERFORM fairlane.hand_on(v_lane, m);
        END IF;
    END IF;
    IF NOT p_delay > 0 THEN
        l := fairlane.assign_worker(l, m);
        l.inbox := coalesce(p_inbox, l.inbox);
        IF v_keeps THEN
            l := fairlane.resume(l, m);
        ELSE
            l := fairlane.arrive(l, m);
        END IF;
    END IF;
    PERFORM fairlane.save(l);
    IF v_keeps AND v_lane IS NOT NULL THEN
        PERFORM fairlane.trim(v_lane);
        PERFORM fairlane.regrant(v_lane, m);
    END IF;
    PERFORM fairlane.notify('job:' || j.id) FROM fairlane.job j WHERE j.seq = l.seq;
END $$;

-- A retry or a snooze: the job has paid for its start. `p_crashed`: the holder saw the process of the job die. Any other end of
-- a run clears the suspicion.
CREATE FUNCTION fairlane.go_again(l fairlane.active_job, p_delay double precision, p_crashed boolean, m fairlane.moment)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    l.crashes := l.crashes + p_crashed::integer;
    l.suspect := p_crashed;
    l.returns := 0;
    l.expires_at := NULL;
    l.paid := 0;
    PERFORM fairlane.return_job(l, p_delay, false, m);
END $$;

-- A hand-back or a rescue: the job starts next in its lane and does not pay again.
CREATE FUNCTION fairlane.go_back(l fairlane.active_job, p_delay double precision, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM fairlane.return_job(fairlane.give_back(l), p_delay, true, m);
END $$;

-- A scheduled job is due: it arrives or, if it kept its place in an ordered lane, resumes it.
CREATE FUNCTION fairlane.promote_job(l fairlane.active_job, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM fairlane.count_move(l.queue, l.class, l.state, STATE.PENDING);
    l.state := STATE.PENDING;
    l.due := NULL;
    l := fairlane.admit_job(l, m);
    PERFORM fairlane.save(l);
    PERFORM fairlane.notify('job:' || j.id) FROM fairlane.job j WHERE j.seq = l.seq;
END $$;

-- Give a pending job its binding, its arrival and its place.
CREATE FUNCTION fairlane.admit_job(l fairlane.active_job, m fairlane.moment) RETURNS fairlane.active_job LANGUAGE plpgsql AS $$
BEGIN
    l := fairlane.assign_worker(l, m);
    IF l.lane IS NOT NULL AND l.granted THEN
        RETURN fairlane.resume(l, m);
    ELSIF l.lane IS NULL THEN
        RETURN fairlane.arrive(l, m);
    END IF;
    RETURN l;
END $$;

CREATE FUNCTION fairlane.tie_is_lost(p_binding bigint) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT NOT EXISTS (SELECT 1 FROM fairlane.binding b WHERE b.seq = p_binding AND b.closed_at IS NULL)
$$;

-- The process that ran a job is gone. Returns the new state of the job.
CREATE FUNCTION fairlane.crash(l fairlane.active_job, p_holder text, p_worker text, m fairlane.moment) RETURNS smallint LANGUAGE plpgsql AS $$
BEGIN
    IF l.kind = KIND.TURN THEN
        PERFORM fairlane.end_job(l, STATE.CANCELLED::smallint, 'waiter_gone', NULL, NULL, NULL, MOVE.CRASH::smallint, m);
        RETURN STATE.CANCELLED;
    END IF;
    l.returns := 0;
    RETURN fairlane.charge_run(l, p_holder, p_worker, MOVE.CRASH::smallint, m);
END $$;

-- A running job was stopped by its worker. The first three hand-backs in a row are not charged, and the third makes the job a
-- suspect; further ones count as crashes.
CREATE FUNCTION fairlane.hand_back(l fairlane.active_job, p_holder text, p_worker text, m fairlane.moment) RETURNS smallint LANGUAGE plpgsql AS $$
BEGIN
    IF l.returns >= 3 THEN
        RETURN fairlane.charge_run(l, p_holder, p_worker, MOVE.HAND_BACK::smallint, m);
    END IF;
    l.returns := l.returns + 1;
    l.suspect := l.suspect OR l.returns = 3;
    l.expires_at := NULL;
    RETURN fairlane.take_back(l, p_holder, p_worker, MOVE.HAND_BACK::smallint, 0, m);
END $$;

-- A run that is charged although the job function did not finish (MOVE.CRASH, MOVE.HAND_BACK): the job runs again while its
-- retries last.
CREATE FUNCTION fairlane.charge_run(l fairlane.active_job, p_holder text, p_worker text, p_move smallint, m fairlane.moment)
RETURNS smallint LANGUAGE plpgsql AS $$
DECLARE
    j record;
    v_delay double precision := 0;
BEGIN
    IF l.kind = KIND.CLEANUP AND fairlane.tie_is_lost(l.binding) THEN
        PERFORM fairlane.end_job(l, STATE.CANCELLED::smallint, 'worker_lost', NULL, NULL, NULL, p_move, m);
        RETURN STATE.CANCELLED;
    END IF;
    l.crashes := l.crashes + 1;
    IF l.cancel THEN
        PERFORM fairlane.end_job(l, STATE.CANCELLED::smallint, 'by_user', NULL, NULL, NULL, p_move, m);
        RETURN STATE.CANCELLED;
    END IF;
    SELECT x.retries, x.backoff INTO j FROM fairlane.job x WHERE x.seq = l.seq;
    IF l.attempt > j.retries THEN
        IF p_move = MOVE.HAND_BACK THEN
            PERFORM fairlane.end_job(l, STATE.FAILED::smallint, 'crashed', NULL, 'It was handed back too often: more than three times in a row '
                'its worker stopped before its body ended, and no attempt is left.', 'handed_back', p_move, m);
        ELSE
            PERFORM fairlane.end_job(l, STATE.FAILED::smallint, 'crashed', NULL,
                'The process that ran it died, or lost contact for longer than its lease.', 'crashed', p_move, m);
        END IF;
        RETURN STATE.FAILED;
    END IF;
    -- The first crash is retried at once, later ones back off.
    IF l.crashes > 1 THEN
        v_delay := fairlane.backoff_delay(j.backoff, l.attempt, random());
    END IF;
    l := fairlane.record_attempt(l, p_holder, p_worker, p_move, CASE WHEN v_delay > 0 THEN 'scheduled' ELSE 'pending' END,
        'crashed', NULL, m);
    l.suspect := true;
    l.expires_at := NULL;
    PERFORM fairlane.go_back(l, v_delay, m);
    RETURN CASE WHEN v_delay > 0 THEN STATE.SCHEDULED ELSE STATE.PENDING END;
END $$;

-- A claimed job that never began, or was handed back: it waits again, uncharged. Returns its new state.
CREATE FUNCTION fairlane.take_back(l fairlane.active_job, p_holder text, p_worker text, p_move smallint, p_delay double precision,
    m fairlane.moment) RETURNS smallint LANGUAGE plpgsql AS $$
BEGIN
    IF l.kind = KIND.CLEANUP AND fairlane.tie_is_lost(l.binding) THEN
        PERFORM fairlane.end_job(l, STATE.CANCELLED::smallint, 'worker_lost', NULL, NULL, NULL, p_move, m);
        RETURN STATE.CANCELLED;
    ELSIF l.cancel THEN
        PERFORM fairlane.end_job(l, STATE.CANCELLED::smallint, 'by_user', NULL, NULL, NULL, p_move, m);
        RETURN STATE.CANCELLED;
    END IF;
    l := fairlane.record_attempt(l, p_holder, p_worker, p_move, CASE WHEN p_delay > 0 THEN 'scheduled' ELSE 'pending' END,
        NULL, NULL, m);
    IF p_move = MOVE.TAKE_BACK THEN
        -- A claim that never began is not a run: an earlier decline stays valid.
        UPDATE fairlane.declined d SET fence = l.fence WHERE d.seq = l.seq AND d.fence = l.fence - 1;
    END IF;
    l.attempt := l.attempt - 1;
    PERFORM fairlane.go_back(l, p_delay, m);
    RETURN CASE WHEN p_delay > 0 THEN STATE.SCHEDULED ELSE STATE.PENDING END;
END $$;

-- The session does not know the task: the job goes back uncharged, or fails when that went on for `p_patience` seconds. Returns
-- its new state.
CREATE FUNCTION fairlane.decline(l fairlane.active_job, p_patience double precision, p_reason text, p_error text, p_group text,
    p_holder text, p_worker text, m fairlane.moment) RETURNS smallint LANGUAGE plpgsql AS $$
DECLARE
    v_since double precision;
    v_task text;
    -- No other worker can take a job that is bound to this one; and a worker that claims from a task's inbox should know the
    -- task.
    v_alone boolean := l.inbox <> '';
BEGIN
    IF l.kind = KIND.CLEANUP AND fairlane.tie_is_lost(l.binding) THEN
        PERFORM fairlane.end_job(l, STATE.CANCELLED::smallint, 'worker_lost', NULL, NULL, NULL, MOVE.DECLINE::smallint, m);
        RETURN STATE.CANCELLED;
    END IF;
    SELECT d.since INTO v_since FROM fairlane.declined d WHERE d.seq = l.seq AND d.fence = l.fence - 1;
    v_since := coalesce(v_since, m.now);
    IF m.now - v_since >= p_patience THEN
        l.attempt := l.attempt - 1;
        PERFORM fairlane.end_job(l, STATE.FAILED::smallint, p_reason, NULL, p_error, p_group, MOVE.DECLINE::smallint, m);
        RETURN STATE.FAILED;
    END IF;
    -- Of consecutive declines only the first and the last are kept: there may be many, and they are alike.
    DELETE FROM fairlane.attempt a WHERE a.seq = l.seq AND (a.fence, true) = (
        SELECT max(k.fence), count(*) = 2 AND bool_and(k.outcome = 'declined') FROM (
            SELECT x.fence, x.outcome FROM fairlane.attempt x WHERE x.seq = l.seq ORDER BY x.fence DESC LIMIT 2) k);
    l := fairlane.record_attempt(l, p_holder, p_worker, MOVE.DECLINE::smallint, CASE WHEN v_alone THEN 'scheduled' ELSE 'pending' END,
        p_reason, NULL, m);
    INSERT INTO fairlane.declined (seq, fence, since, until)
    VALUES (l.seq, l.fence, v_since, CASE WHEN NOT v_alone THEN v_since + p_patience END)
    ON CONFLICT (seq) DO UPDATE SET fence = excluded.fence, since = excluded.since, until = excluded.until;
    l.attempt := l.attempt - 1;
    IF v_alone THEN
        -- The same as `states.decline_delay`.
        PERFORM fairlane.go_back(l, least(15.0, greatest(0.25, (m.now - v_since) / 2)), m);
        RETURN STATE.SCHEDULED;
    END IF;
    SELECT j.task INTO v_task FROM fairlane.job j WHERE j.seq = l.seq;
    INSERT INTO fairlane.unknown_task (queue, task, used_at) VALUES (l.queue, v_task, m.now)
    ON CONFLICT (queue, task) DO UPDATE SET used_at = excluded.used_at;
    PERFORM fairlane.return_job(fairlane.give_back(l), 0, true, m, '~' || v_task || '/');
    RETURN STATE.PENDING;
END $$;

-- A job was declined for long enough: offer it to all workers once more; they may fail it.
CREATE FUNCTION fairlane.offer_again(p_seq bigint, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    l fairlane.active_job;
BEGIN
    UPDATE fairlane.declined d SET until = NULL WHERE d.seq = p_seq;
    SELECT * INTO l FROM fairlane.active_job x WHERE x.seq = p_seq AND x.state = STATE.PENDING AND left(x.inbox, 1) = '~';
    IF FOUND THEN
        PERFORM fairlane.reassign_worker(l, m);
    END IF;
END $$;

-- Whether no declined job of a task waits or runs, and none was declined within the last minute. A decline in a concurrent
-- transaction may not be visible yet, but has updated `used_at`.
CREATE FUNCTION fairlane.is_unused(u fairlane.unknown_task, m fairlane.moment) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT u.used_at <= m.now - 60 AND NOT EXISTS (SELECT 1 FROM fairlane.job_extra a
        JOIN fairlane.active_job l ON l.seq = a.seq WHERE a.inbox = '~' || u.task || '/' AND a.inbox <> '' AND l.queue = u.queue)
$$;
