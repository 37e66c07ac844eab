-- Checks of what producers send.

-- A role that may write the tables is trusted, because the client has checked its input. A producer is not: its input is
-- checked here, and the time is the server's.
CREATE FUNCTION fairlane.is_trusted() RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN has_table_privilege(CASE WHEN current_setting('role') = 'none' THEN session_user ELSE current_setting('role')::name END,
        'fairlane.active_job'::regclass, 'INSERT');
END $$;

CREATE FUNCTION fairlane.check_clock() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF NOT fairlane.is_trusted() THEN
        PERFORM fairlane.refuse('FL008', 'this role may not name the time: the server''s clock counts', 'now');
    END IF;
END $$;

-- Names, keys and durations as in `model/names.py`. NULL is not a valid name or key.
CREATE FUNCTION fairlane.check_name(p_field text, p_value text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF p_value IS NULL OR p_value COLLATE "C" !~ '^[A-Za-z0-9_.:-]{1,128}$' THEN
        PERFORM fairlane.refuse('FL008', 'must be 1 to 128 characters out of letters, digits and "_", ".", ":", "-"', p_field);
    END IF;
END $$;

CREATE FUNCTION fairlane.check_key(p_field text, p_value text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF p_value IS NULL OR octet_length(p_value) NOT BETWEEN 1 AND 200 OR p_value ~ '[[:cntrl:]]' THEN
        PERFORM fairlane.refuse('FL008', 'must be printable text of 1 to 200 bytes', p_field);
    END IF;
END $$;

-- NaN and infinity are greater than every bound.
CREATE FUNCTION fairlane.check_number(p_field text, p_value double precision, p_least double precision, p_most double precision)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF p_value NOT BETWEEN p_least AND p_most THEN
        PERFORM fairlane.refuse('FL008', format('%s is outside %s to %s', p_value, p_least, p_most), p_field);
    END IF;
END $$;

CREATE FUNCTION fairlane.check_size(p_field text, p_value bytea, p_most integer) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF octet_length(p_value) > p_most THEN
        PERFORM fairlane.refuse('FL008', format('%s bytes are more than the %s allowed', octet_length(p_value), p_most), p_field);
    END IF;
END $$;

-- Check one new job as the client does. Whether the payload is JSON is not checked: a job with another payload fails when it
-- runs.
CREATE FUNCTION fairlane.check_new(p_id text, p_task text, p_queue text, p_payload bytea, p_lane text, p_class smallint,
    p_cost double precision, p_delay double precision, p_run_at double precision, p_expires double precision, p_retries integer,
    p_backoff bytea, p_timeout double precision, p_pool text, p_retry_of text, p_headers bytea) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM fairlane.check_key('id', p_id);
    PERFORM fairlane.check_name('task', p_task);
    PERFORM fairlane.check_name('queue', p_queue);
    IF p_payload IS NULL OR octet_length(p_payload) = 0 THEN
        PERFORM fairlane.refuse('FL008', 'is missing', 'payload');
    END IF;
    PERFORM fairlane.check_size('payload', p_payload, 262144);
    IF p_lane IS NOT NULL THEN
        PERFORM fairlane.check_key('lane', p_lane);
    END IF;
    IF p_class IS NULL OR p_cost IS NULL OR p_retries IS NULL THEN
        PERFORM fairlane.refuse('FL008', 'must not be NULL', CASE WHEN p_class IS NULL THEN 'class' WHEN p_cost IS NULL THEN 'cost'
            ELSE 'retries' END);
    END IF;
    PERFORM fairlane.check_number('class', p_class, CLASS.HIGH, CLASS.LOW);
    PERFORM fairlane.check_number('cost', p_cost, 0.01, 100);
    PERFORM fairlane.check_number('delay', p_delay, 0, 315360000);
    PERFORM fairlane.check_number('run_at', p_run_at, 0, 1e11);
    PERFORM fairlane.check_number('expires', p_expires, 0, 315360000);
    PERFORM fairlane.check_number('retries', p_retries, 0, 1000);
    PERFORM fairlane.check_number('timeout', p_timeout, 0.001, 315360000);
    IF p_backoff IS NOT NULL AND fairlane.backoff_problem(p_backoff) IS NOT NULL THEN
        PERFORM fairlane.refuse('FL008', fairlane.backoff_problem(p_backoff), 'backoff');
    END IF;
    PERFORM fairlane.check_name('pool', p_pool);
    IF p_retry_of IS NOT NULL THEN
        PERFORM fairlane.check_key('retry_of', p_retry_of);
    END IF;
    PERFORM fairlane.check_size('headers', p_headers, 16384);
END $$;

CREATE FUNCTION fairlane.check_all_new(p_ids text[], p_tasks text[], p_queues text[], p_payloads bytea[], p_lanes text[],
    p_classes smallint[], p_costs double precision[], p_delays double precision[], p_run_ats double precision[],
    p_expires double precision[], p_retries integer[], p_backoffs bytea[], p_timeouts double precision[], p_pools text[],
    p_retry_ofs text[], p_headers bytea[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    -- The numbers of a call are consecutive, and sequences advance by a thousand.
    IF p_ids IS NULL OR cardinality(p_ids) > 1000 OR array_ndims(p_ids) > 1 OR array_lower(p_ids, 1) <> 1 THEN
        PERFORM fairlane.refuse('FL008', 'send a list of at most 1000 in one call', 'jobs');
    END IF;
    FOR i IN 1 .. cardinality(p_ids) LOOP
        PERFORM fairlane.check_new(p_ids[i], coalesce(p_tasks[i], p_tasks[1]), coalesce(p_queues[i], p_queues[1]), p_payloads[i],
            p_lanes[i], coalesce(p_classes[i], CLASS.NORMAL::smallint), coalesce(p_costs[i], 1.0), p_delays[i], p_run_ats[i], p_expires[i],
            coalesce(p_retries[i], 3), p_backoffs[i], p_timeouts[i], coalesce(p_pools[i], 'default'), p_retry_ofs[i], p_headers[i]);
    END LOOP;
END $$;

-- Check the optional attributes of jobs: kind, unique value, sticky key, worker. Turns belong to sessions, clean-ups to
-- bindings and slots to schedules: a producer may not send any of them.
CREATE FUNCTION fairlane.check_kinds(p_kinds smallint[], p_uniques text[], p_unique_fors double precision[], p_stickies text[],
    p_workers integer[], p_ttls double precision[], p_crons text[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    r record;
BEGIN
    FOR r IN SELECT * FROM unnest(p_kinds, p_uniques, p_unique_fors, p_stickies, p_workers, p_ttls, p_crons)
        g(kind, uniq, unique_for, sticky, worker, ttl, cron) LOOP
        IF r.kind NOT IN (KIND.JOB, KIND.BROADCAST) THEN
            PERFORM fairlane.refuse('FL008', 'this role sends jobs and broadcasts; turns and clean-ups need the rights of a worker',
                'kind');
        ELSIF r.cron IS NOT NULL THEN
            PERFORM fairlane.refuse('FL008', 'this role may not fire schedules', 'cron');
        END IF;
        IF r.uniq IS NOT NULL THEN
            PERFORM fairlane.check_key('unique', r.uniq);
        END IF;
        IF r.sticky IS NOT NULL THEN
            PERFORM fairlane.check_key('sticky', r.sticky);
        END IF;
        PERFORM fairlane.check_number('unique_for', r.unique_for, 0, 315360000);
        PERFORM fairlane.check_number('worker', r.worker, 0, 2147483647);
        PERFORM fairlane.check_number('ttl', r.ttl, 0, 315360000);
    END LOOP;
END $$;
