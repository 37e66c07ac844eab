-- Grants for the roles of an application, run by the owner of the schema for each role. They can be repeated. The names of the
-- roles are inserted when the texts are loaded (`statements.grants`). A new library takes over the grants on the functions of
-- the previous one (`library.PREPARE`).

-- name: grant_worker
-- Everything except changing the schema: for workers, managers, clients that take turns, and operators that pause or configure.
GRANT USAGE ON SCHEMA fairlane TO fairlane_worker;
GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA fairlane TO fairlane_worker;
GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA fairlane TO fairlane_worker;
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA fairlane TO fairlane_worker;
REVOKE INSERT, UPDATE, DELETE ON fairlane.migration, fairlane.library FROM fairlane_worker;
ALTER DEFAULT PRIVILEGES IN SCHEMA fairlane GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO fairlane_worker;
ALTER DEFAULT PRIVILEGES IN SCHEMA fairlane GRANT USAGE, SELECT ON SEQUENCES TO fairlane_worker;
ALTER DEFAULT PRIVILEGES IN SCHEMA fairlane GRANT EXECUTE ON FUNCTIONS TO fairlane_worker;

-- name: grant_producer
-- Sending jobs, also in its own transactions, and reading, waiting for and cancelling jobs whose ids it knows.
GRANT USAGE ON SCHEMA fairlane TO fairlane_producer;
GRANT SELECT ON fairlane.migration, fairlane.queue, fairlane.rule TO fairlane_producer;
GRANT INSERT (name) ON fairlane.queue TO fairlane_producer;
GRANT SELECT ON fairlane.domains TO fairlane_producer;
GRANT SELECT (domain, tag) ON fairlane.ready_lane TO fairlane_producer;
DO $grant$
DECLARE
    v_function regprocedure;
BEGIN
    FOR v_function IN SELECT p.oid FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_class c ON c.relnamespace = p.pronamespace
        WHERE c.oid = 'fairlane.library'::regclass AND p.prosecdef LOOP
        EXECUTE 'GRANT EXECUTE ON FUNCTION ' || v_function || $role$ TO fairlane_producer$role$;
    END LOOP;
END $grant$;

-- name: grant_viewer
-- Reading only: every reading verb, payloads and results included.
GRANT USAGE ON SCHEMA fairlane TO fairlane_viewer;
GRANT SELECT ON fairlane.migration, fairlane.queue, fairlane.rule, fairlane.queue_count, fairlane.job, fairlane.progress,
    fairlane.job_link, fairlane.attempt, fairlane.outcome, fairlane.active_job, fairlane.job_extra, fairlane.domain, fairlane.clock,
    fairlane.domains, fairlane.flow, fairlane.lane_pace, fairlane.flows, fairlane.ready_lane, fairlane.lane, fairlane.session,
    fairlane.session_load, fairlane.sessions, fairlane.task_set, fairlane.declined, fairlane.unknown_task, fairlane.binding,
    fairlane.leader, fairlane.schedule, fairlane.jobs TO fairlane_viewer;
DO $grant$
DECLARE
    v_function regprocedure;
BEGIN
    FOR v_function IN SELECT p.oid FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_class c ON c.relnamespace = p.pronamespace
        WHERE c.oid = 'fairlane.library'::regclass AND p.prosecdef AND p.proname ~ '^(read|use)_' LOOP
        EXECUTE 'GRANT EXECUTE ON FUNCTION ' || v_function || $role$ TO fairlane_viewer$role$;
    END LOOP;
END $grant$;
