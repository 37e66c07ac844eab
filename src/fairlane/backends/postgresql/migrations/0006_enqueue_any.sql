-- Jobs of every kind, one by one: turns, broadcasts, sticky and direct ones, those with a unique value or of a schedule.

CREATE FUNCTION fairlane.enqueue_any(p_ids text[], p_tasks text[], p_queues text[], p_payloads bytea[], p_lanes text[],
    p_classes smallint[], p_costs double precision[], p_delays double precision[], p_run_ats double precision[],
    p_expires double precision[], p_retries integer[], p_backoffs bytea[], p_timeouts double precision[], p_pools text[],
    p_retry_ofs text[], p_headers bytea[], p_kinds smallint[], p_uniques text[], p_unique_fors double precision[], p_stickies text[],
    p_workers integer[], p_waiters text[], p_ttls double precision[], p_crons text[], p_slots double precision[],
    p_now double precision DEFAULT NULL, p_lease double precision DEFAULT NULL,
    OUT ids text[], OUT created boolean[], OUT states smallint[], OUT topics text[])
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off SET join_collapse_limit = 1 SET from_collapse_limit = 1 SET enable_material = off SET lock_timeout = '2s' AS $$
DECLARE
    m fairlane.moment := fairlane.moment_of(p_now, p_lease);
    j fairlane.job;
    q fairlane.queue;
    v_numbers integer[] := '{}';
    v_seqs bigint[] := '{}';
    v_holder text;
    v_name text;
    i integer;
BEGIN
    ids := p_ids;
    created := array_fill(false, ARRAY[cardinality(p_ids)]);
    -- Queues first, and unique values in their order: whoever makes or takes the same ones at this moment does so too.
    FOR v_name IN SELECT DISTINCT n FROM unnest(p_queues) n ORDER BY n LOOP
        PERFORM fairlane.queue_number(v_name);
    END LOOP;
    FOR i IN SELECT g.ord FROM unnest(p_tasks, p_uniques) WITH ORDINALITY g(task, value, ord)
             ORDER BY g.value IS NOT NULL, CASE WHEN g.value IS NOT NULL THEN g.task END, g.value, g.ord LOOP
        j := NULL;
        SELECT nextval('fairlane.job_seq_seq'), NULL, m.now, coalesce(p_costs[i], 1.0), p_timeouts[i], p_delays[i], p_run_ats[i],
            p_expires[i], fairlane.queue_number(p_queues[i]), coalesce(p_retries[i], 3), p_workers[i], coalesce(p_classes[i], 1),
            coalesce(p_kinds[i], 0), p_ids[i], p_tasks[i], coalesce(p_pools[i], 'default'), p_lanes[i], p_stickies[i], p_uniques[i],
            p_retry_ofs[i], p_backoffs[i], p_payloads[i], p_headers[i] INTO j;
        CONTINUE WHEN NOT fairlane.store_identity(j, m);
        IF j.uniq IS NOT NULL THEN
            v_holder := fairlane.hold_unique(j, m.now + p_unique_fors[i], m);
            IF v_holder IS NOT NULL THEN
                DELETE FROM fairlane.job WHERE seq = j.seq;
                ids[i] := v_holder;
            END IF;
        END IF;
        IF p_crons[i] IS NOT NULL THEN
            UPDATE fairlane.schedule SET last_slot = greatest(coalesce(last_slot, 0), p_slots[i]) WHERE name = p_crons[i];
        END IF;
        IF v_holder IS NULL THEN
            created[i] := true;
            v_numbers := v_numbers || j.queue;
        END IF;
        v_seqs[i] := j.seq;
        v_holder := NULL;
    END LOOP;
    PERFORM set_config('lock_timeout', '0', true);
    PERFORM fairlane.lock_for(v_seqs, v_numbers);
    m := fairlane.moment_of(p_now, p_lease);
    FOR i IN 1 .. cardinality(p_ids) LOOP
        CONTINUE WHEN NOT created[i];
        SELECT * INTO j FROM fairlane.job x WHERE x.seq = v_seqs[i];
        SELECT * INTO q FROM fairlane.queue x WHERE x.id = j.queue;
        PERFORM fairlane.check_lane(q, j.lane);
        PERFORM fairlane.check_room(q, j.lane, j.class);
        PERFORM fairlane.store_any(j, q, p_waiters[i], coalesce(p_ttls[i], 0), m);
    END LOOP;
    states := fairlane.states_of(ids);
    topics := fairlane.topics();
END $$;

-- Write the identity of a job. False when its id is taken already, with the same content.
CREATE FUNCTION fairlane.store_identity(j fairlane.job, m fairlane.moment) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF fairlane.known(j, m) IS NOT NULL THEN
        RETURN false;
    END IF;
    INSERT INTO fairlane.job SELECT j.* ON CONFLICT (id) DO NOTHING;
    IF NOT FOUND THEN
        PERFORM fairlane.known(j, m);
        RETURN false;
    END IF;
    RETURN true;
END $$;

-- Take a unique value for a job. The id of who has it already, or NULL when this job has it now.
CREATE FUNCTION fairlane.hold_unique(j fairlane.job, p_until double precision, m fairlane.moment) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_holder text;
BEGIN
    LOOP
        -- A row of somebody who has it is only looked at: his end, which gives it up, must not wait for this step.
        SELECT h.id INTO v_holder FROM fairlane.holder_of(j, m) h;
        IF v_holder IS NOT NULL OR fairlane.take_unique(j, p_until, m) THEN
            RETURN v_holder;
        END IF;
    END LOOP;
END $$;

-- The live row of a job of any kind, and what begins with it.
CREATE FUNCTION fairlane.store_any(j fairlane.job, q fairlane.queue, p_waiter text, p_ttl double precision, m fairlane.moment)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    l fairlane.live := fairlane.new_live(j, m);
BEGIN
    IF j.kind = 1 THEN
        IF (fairlane.terms(j.queue, j.lane)).places IS NULL THEN
            PERFORM fairlane.refuse('FL008', format(
                'a turn needs a lane with a limit; set one with app.queue(%L).lane(%L, limit=1)', q.name, j.lane), 'lane');
        END IF;
        SELECT s.seq INTO l.waiter FROM fairlane.session s WHERE s.id = p_waiter AND s.state IN ('live', 'stopping') FOR SHARE;
        IF NOT FOUND THEN
            PERFORM fairlane.refuse('FL008', 'the session that waits is not live; register it first', 'waiter');
        END IF;
    END IF;
    IF j.kind = 2 THEN
        l.state := 3;
        l.gate := 4;
        l.started_at := m.now;
        l.due := CASE WHEN p_ttl > 0 THEN m.now + p_ttl END;
    END IF;
    PERFORM fairlane.tally_move(l.queue, l.class, NULL, l.state, (j.kind = 2)::integer);
    IF l.state = 2 THEN
        l := fairlane.admit_job(l, m);
    END IF;
    INSERT INTO fairlane.live SELECT l.*;
    IF j.kind = 2 THEN
        PERFORM fairlane.begin_broadcast(l.seq, p_ttl, m);
    END IF;
END $$;
