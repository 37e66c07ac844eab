-- What roles with few rights need. Who may call what is granted by `sql/roles.sql`.
--
-- Whoever only sends jobs must neither read the payloads of others nor be able to break the line, so the functions he
-- calls run with the rights of the schema's owner. A function like that must not find a name anywhere but in the system's
-- catalog: else whoever calls it could put a function of his own in the place of one of the system's.
--
-- That path is fixed for everything that is called from outside, not for those functions alone: a statement that two of
-- them share is planned anew each time the path changes, which costs a tenth of the work of a job (measured).

-- Jobs by their ids, for anybody who knows those. The payload is there only for who may read the table: ids are told to
-- everybody who listens, so they are no secret. An empty one is no payload that a job could have, so nobody takes it for
-- the true one.
DO $$
DECLARE
    v_all oid := 'fairlane.read_jobs(text[], bigint[])'::regprocedure;
    v_columns text;
BEGIN
    SELECT string_agg(CASE c.name WHEN 'payload' THEN quote_literal('') || '::bytea' WHEN 'headers' THEN 'NULL::bytea'
        ELSE format('r.%I', c.name) END, ', ' ORDER BY c.ord) INTO v_columns
    FROM pg_proc p, unnest(p.proargnames, p.proargmodes) WITH ORDINALITY c (name, mode, ord)
    WHERE p.oid = v_all AND c.mode = 't';
    EXECUTE format(
        'CREATE FUNCTION fairlane.read_jobs(p_ids text[]) RETURNS %s LANGUAGE plpgsql STABLE AS $body$
        BEGIN
            IF has_column_privilege(session_user, %L::regclass, %L, %L) THEN
                RETURN QUERY SELECT * FROM fairlane.read_jobs(p_ids, NULL);
            ELSE
                RETURN QUERY SELECT %s FROM fairlane.read_jobs(p_ids, NULL) r;
            END IF;
        END $body$', pg_get_function_result(v_all), 'fairlane.job', 'payload', 'SELECT', v_columns);
END $$;

DO $$
DECLARE
    v_function regprocedure;
BEGIN
    FOR v_function IN
        SELECT p.oid FROM pg_proc p WHERE p.proconfig IS NOT NULL
            AND p.pronamespace = (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'fairlane.job'::regclass)
    LOOP
        EXECUTE format('ALTER FUNCTION %s SET search_path = pg_catalog, pg_temp', v_function);
    END LOOP;
    FOR v_function IN
        SELECT p.oid FROM pg_proc p
        WHERE p.pronamespace = (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'fairlane.job'::regclass)
            AND (p.proname IN ('enqueue', 'enqueue_one', 'enqueue_any', 'admit_queues', 'insert_arriving', 'cancel',
                'read_standings', 'read_seconds', 'read_workers') OR p.proname = 'read_jobs' AND p.pronargs = 1)
    LOOP
        EXECUTE format('ALTER FUNCTION %s SECURITY DEFINER SET search_path = pg_catalog, pg_temp', v_function);
        -- A new function is everybody's to call.
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', v_function);
    END LOOP;
END $$;
