-- Jobs that are stored without the locks that admission needs: in a user's own transaction together with rows of the
-- application, or by an enqueue that found the locks taken. They are arriving until the next claim or the leader admits them.
--
-- A user's transaction may stay open for long, so nothing here blocks other calls: no lock of the store, a pool or a queue is
-- taken, and no existing row is locked. Only a call that stores the same id or takes the same unique value waits for its end.

-- A job from the request, with the number of its queue, which was created before.
CREATE FUNCTION fairlane.arriving_job(r jsonb, m fairlane.moment) RETURNS fairlane.job LANGUAGE plpgsql AS $$
DECLARE
    j fairlane.job;
BEGIN
    j.enqueued_at := m.now;
    j.cost := r ->> 'cost';
    j.timeout := r ->> 'timeout';
    j.delay := r ->> 'delay';
    j.run_at := r ->> 'run_at';
    j.expires := r ->> 'expires';
    j.queue := r ->> 'number';
    j.retries := r ->> 'retries';
    j.direct := r ->> 'worker';
    j.class := r ->> 'class';
    j.kind := KIND.JOB;
    j.id := r ->> 'id';
    j.task := r ->> 'task';
    j.pool := r ->> 'pool';
    j.lane := r ->> 'lane';
    j.sticky := r ->> 'sticky';
    j.uniq := r ->> 'unique';
    j.retry_of := r ->> 'retry_of';
    j.backoff := convert_to(r ->> 'backoff', 'UTF8');
    j.payload := convert_to(r ->> 'payload', 'UTF8');
    j.headers := convert_to(r ->> 'headers', 'UTF8');
    RETURN j;
END $$;

-- Reject a job that its queue does not accept, and a connection to another database.
CREATE FUNCTION fairlane.check_arriving(j fairlane.job, p_queue text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    q fairlane.queue;
BEGIN
    SELECT * INTO q FROM fairlane.queue x WHERE x.id = j.queue;
    IF FOUND AND q.name = p_queue THEN
        PERFORM fairlane.check_lane(q, j.lane);
    -- A transaction with an older snapshot may not see a queue that was just created for it.
    ELSIF FOUND OR current_setting('transaction_isolation') = 'read committed' THEN
        PERFORM fairlane.refuse('FL008', 'leads to another database than the store''s: the jobs would be lost there', 'connection');
    END IF;
END $$;

-- The job that holds a unique value, if any: until it is final, and then for as long as it requested.
CREATE FUNCTION fairlane.holder_of(j fairlane.job, m fairlane.moment, OUT id text, OUT state smallint) LANGUAGE plpgsql AS $$
BEGIN
    SELECT u.id, coalesce(u.state, l.state, STATE.PENDING) INTO id, state
    FROM fairlane.held_unique u LEFT JOIN fairlane.active_job l ON l.seq = u.seq
    WHERE u.task = j.task AND u.value = j.uniq AND (u.state IS NULL OR u.until > m.now);
END $$;

-- Take a unique value. False if another job holds it by now. The row of that job is not locked: ending the job, which releases
-- the value, must not wait for this transaction.
CREATE FUNCTION fairlane.take_unique(j fairlane.job, p_until double precision, m fairlane.moment) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE fairlane.held_unique u SET seq = j.seq, id = j.id, until = p_until, state = NULL
    WHERE u.task = j.task AND u.value = j.uniq AND u.state IS NOT NULL AND (u.until IS NULL OR u.until <= m.now);
    IF FOUND THEN
        RETURN true;
    END IF;
    INSERT INTO fairlane.held_unique (task, value, seq, id, until) VALUES (j.task, j.uniq, j.seq, j.id, p_until)
    ON CONFLICT (task, value) DO NOTHING;
    RETURN FOUND;
END $$;

-- Store one job without its unique value, or return the existing job with its id. `seq` NULL: it existed.
CREATE FUNCTION fairlane.store_arriving(j fairlane.job, m fairlane.moment, OUT id text, OUT seq bigint, OUT state smallint)
LANGUAGE plpgsql AS $$
BEGIN
    id := j.id;
    LOOP
        state := fairlane.known(j, m);
        EXIT WHEN state IS NOT NULL;
        IF j.uniq IS NOT NULL THEN
            SELECT h.id, h.state INTO id, state FROM fairlane.holder_of(j, m) h;
            EXIT WHEN state IS NOT NULL;
            id := j.id;
        END IF;
        -- This may wait for another open transaction; the loop then checks again.
        INSERT INTO fairlane.job (enqueued_at, cost, timeout, delay, run_at, expires, queue, retries, direct, class, kind, id, task,
            pool, lane, sticky, uniq, retry_of, backoff, payload, headers)
        VALUES (j.enqueued_at, j.cost, j.timeout, j.delay, j.run_at, j.expires, j.queue, j.retries, j.direct, j.class, j.kind, j.id,
            j.task, j.pool, j.lane, j.sticky, j.uniq, j.retry_of, j.backoff, j.payload, j.headers)
        ON CONFLICT ON CONSTRAINT job_id_key DO NOTHING RETURNING job.seq INTO seq;
        CONTINUE WHEN NOT FOUND;
        j.seq := seq;
        INSERT INTO fairlane.active_job (seq, queue, class, cost, state, gate, due, expires_at, plain)
        VALUES (j.seq, j.queue, j.class, j.cost, STATE.ARRIVING, GATE.UNADMITTED, coalesce(j.run_at, m.now + coalesce(j.delay, 0)), m.now + j.expires,
            j.sticky IS NULL AND j.uniq IS NULL);
        IF j.expires IS NOT NULL THEN
            PERFORM fairlane.set_expiries(ARRAY[j.seq]);
        END IF;
        PERFORM fairlane.link_job(j);
        state := STATE.ARRIVING;
        EXIT;
    END LOOP;
END $$;

-- Take the unique value of a job that was just stored. If another job holds it by now, this one is removed again and the other
-- job is returned; otherwise nothing.
CREATE FUNCTION fairlane.hold_arriving(j fairlane.job, p_unique_for double precision, m fairlane.moment, OUT id text,
    OUT state smallint) LANGUAGE plpgsql AS $$
BEGIN
    LOOP
        SELECT h.id, h.state INTO id, state FROM fairlane.holder_of(j, m) h;
        IF state IS NOT NULL THEN
            PERFORM fairlane.forget(ARRAY[j.seq]);
            DELETE FROM fairlane.active_job x WHERE x.seq = j.seq;
            DELETE FROM fairlane.job_extra x WHERE x.seq = j.seq;
            RETURN;
        END IF;
        -- This may wait for another open transaction; the loop then checks again.
        EXIT WHEN fairlane.take_unique(j, m.now + p_unique_for, m);
    END LOOP;
END $$;

-- The call takes and returns JSON, so that every driver can make it. A rejection that can be detected without an error is part
-- of the answer and leaves the user's transaction intact; an error would abort it.
CREATE FUNCTION fairlane.insert_arriving(p_request text) RETURNS text
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    v_request jsonb := p_request;
    v_trusted boolean := fairlane.is_trusted();
    m fairlane.moment := fairlane.moment_of((v_request ->> 'now')::double precision, NULL);
    v_each jsonb;
    v_jobs fairlane.job[] := '{}';
    v_answers jsonb[] := '{}';
    i integer;
    v_created boolean := false;
    v_code text;
    v_message text;
    v_detail text;
    a record;
    j fairlane.job;
BEGIN
    BEGIN
        IF v_request ->> 'database' <> current_database() THEN
            PERFORM fairlane.refuse('FL008', format('leads to the database %s, and the store is in %s: the jobs would be lost there',
                current_database(), v_request ->> 'database'), 'connection');
        END IF;
        FOR v_each IN SELECT x FROM jsonb_array_elements(v_request -> 'jobs') x LOOP
            j := fairlane.arriving_job(v_each, m);
            IF NOT v_trusted THEN
                PERFORM fairlane.check_new(j.id, j.task, v_each ->> 'queue', j.payload, j.lane, j.class, j.cost, j.delay, j.run_at,
                    j.expires, j.retries, j.backoff, j.timeout, j.pool, j.retry_of, j.headers);
                PERFORM fairlane.check_kinds(NULL, ARRAY[j.uniq], ARRAY[(v_each ->> 'unique_for')::double precision], ARRAY[j.sticky],
                    ARRAY[j.direct], NULL, NULL);
            END IF;
            PERFORM fairlane.check_arriving(j, v_each ->> 'queue');
            PERFORM fairlane.known(j, m);
        END LOOP;
    EXCEPTION WHEN SQLSTATE 'FL002' OR SQLSTATE 'FL008' THEN
        GET STACKED DIAGNOSTICS v_code = RETURNED_SQLSTATE, v_message = MESSAGE_TEXT, v_detail = PG_EXCEPTION_DETAIL;
        RETURN jsonb_build_object('code', v_code, 'message', v_message, 'detail', v_detail);
    END;
    -- Ids in the order that all calls use, then unique values in theirs. The order of several calls in one transaction is up to
    -- the user.
    FOR v_each, i IN SELECT x, g.ord FROM jsonb_array_elements(v_request -> 'jobs') WITH ORDINALITY g(x, ord)
                     ORDER BY x ->> 'id' COLLATE "C", g.ord LOOP
        j := fairlane.arriving_job(v_each, m);
        SELECT * INTO a FROM fairlane.store_arriving(j, m);
        j.seq := a.seq;
        v_jobs[i] := j;
        v_answers[i] := jsonb_build_array(a.id, a.seq IS NOT NULL, a.state);
        v_created := v_created OR a.seq IS NOT NULL;
    END LOOP;
    FOR v_each, i IN SELECT x, g.ord FROM jsonb_array_elements(v_request -> 'jobs') WITH ORDINALITY g(x, ord)
                     WHERE x ->> 'unique' IS NOT NULL AND (v_jobs[g.ord]).seq IS NOT NULL
                     ORDER BY x ->> 'task' COLLATE "C", x ->> 'unique' COLLATE "C", g.ord LOOP
        SELECT * INTO a FROM fairlane.hold_arriving(v_jobs[i], (v_each ->> 'unique_for')::double precision, m);
        IF a.id IS NOT NULL THEN
            -- Also if the call names it a second time.
            v_answers := ARRAY(SELECT CASE WHEN x ->> 0 = v_each ->> 'id' THEN jsonb_build_array(a.id, false, a.state) ELSE x END
                FROM unnest(v_answers) WITH ORDINALITY g(x, ord) ORDER BY g.ord);
        END IF;
    END LOOP;
    IF v_created AND v_request ->> 'channel' IS NOT NULL THEN
        -- Sent with the commit. Duplicates within a transaction are sent once.
        PERFORM pg_notify(v_request ->> 'channel', v_request ->> 'hint');
    END IF;
    RETURN jsonb_build_object('answers', to_jsonb(v_answers));
END $$;

-- Admit arriving jobs. Sticky jobs and jobs for one worker are left to the admitter: they need the lock of their pool.
CREATE FUNCTION fairlane.admit_arriving(p_queues integer[], p_limit integer, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM fairlane.admit_jobs(ARRAY(
        SELECT l.seq FROM unnest(p_queues) g CROSS JOIN LATERAL (
            SELECT a.seq FROM fairlane.active_job a WHERE a.queue = g AND a.state = STATE.ARRIVING ORDER BY a.seq LIMIT p_limit FOR UPDATE SKIP LOCKED) l
        CROSS JOIN LATERAL (SELECT y.sticky, y.direct FROM fairlane.job y WHERE y.seq = l.seq OFFSET 0) j
        WHERE j.sticky IS NULL AND j.direct IS NULL ORDER BY l.seq), m);
END $$;

-- Called by a plain enqueue of jobs with due times that found the locks taken: the jobs are stored, and this waits until they
-- are admitted. No claim comes for them before they are due, and only what is admitted becomes due.
CREATE FUNCTION fairlane.admit_queues(p_queues text[], p_now double precision DEFAULT NULL, p_lease double precision DEFAULT NULL,
    OUT topics text[])
LANGUAGE plpgsql SET lock_timeout = '200ms' AS $$
DECLARE
    v_queues integer[];
BEGIN
    topics := '{}';
    v_queues := ARRAY(SELECT y.id FROM fairlane.queue y WHERE y.name = ANY (p_queues)
        AND (SELECT a.seq FROM fairlane.active_job a WHERE a.queue = y.id AND a.state = STATE.ARRIVING ORDER BY a.seq LIMIT 1) IS NOT NULL);
    IF cardinality(v_queues) > 0 THEN
        PERFORM fairlane.lock_some(NULL, v_queues);
        PERFORM fairlane.admit_arriving(v_queues, 1000, fairlane.moment_of(p_now, p_lease));
        topics := fairlane.topics();
    END IF;
END $$;
