-- Who may do what: run by the owner of the schema, once for each role and again after an upgrade. Repeating it is
-- harmless. The names of the roles are put in when the texts are loaded (`statements.grants`).

-- name: grant_worker
-- Everything but changing the schema: workers, managers, whoever takes turns, and operators who pause or configure.
GRANT USAGE ON SCHEMA fairlane TO fairlane_worker;
GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA fairlane TO fairlane_worker;
GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA fairlane TO fairlane_worker;
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA fairlane TO fairlane_worker;
REVOKE INSERT, UPDATE, DELETE ON fairlane.migration FROM fairlane_worker;
ALTER DEFAULT PRIVILEGES IN SCHEMA fairlane GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO fairlane_worker;
ALTER DEFAULT PRIVILEGES IN SCHEMA fairlane GRANT USAGE, SELECT ON SEQUENCES TO fairlane_worker;
ALTER DEFAULT PRIVILEGES IN SCHEMA fairlane GRANT EXECUTE ON FUNCTIONS TO fairlane_worker;

-- name: grant_producer
-- Sending jobs, also in transactions of its own, and asking about, waiting for and cancelling those whose ids it knows.
GRANT USAGE ON SCHEMA fairlane TO fairlane_producer;
GRANT SELECT ON fairlane.migration, fairlane.queue, fairlane.rule TO fairlane_producer;
GRANT INSERT (name) ON fairlane.queue TO fairlane_producer;
GRANT SELECT ON fairlane.domains TO fairlane_producer;
GRANT SELECT (domain, tag) ON fairlane.line TO fairlane_producer;
GRANT EXECUTE ON FUNCTION fairlane.enqueue, fairlane.enqueue_one, fairlane.enqueue_any, fairlane.admit_queues,
    fairlane.insert_arriving, fairlane.cancel, fairlane.read_jobs(text[]), fairlane.read_standings,
    fairlane.read_seconds, fairlane.read_workers TO fairlane_producer;

-- name: grant_viewer
-- Looking: every reading verb, payloads and results included.
GRANT USAGE ON SCHEMA fairlane TO fairlane_viewer;
GRANT SELECT ON fairlane.migration, fairlane.queue, fairlane.rule, fairlane.tally, fairlane.job, fairlane.progress,
    fairlane.relation, fairlane.attempt, fairlane.outcome, fairlane.live, fairlane.aside, fairlane.domain, fairlane.clock,
    fairlane.domains, fairlane.flow, fairlane.pace, fairlane.flows, fairlane.line, fairlane.lane, fairlane.session,
    fairlane.load, fairlane.sessions, fairlane.task_set, fairlane.declined, fairlane.unknown_task, fairlane.binding,
    fairlane.leader, fairlane.schedule, fairlane.jobs TO fairlane_viewer;
GRANT EXECUTE ON FUNCTION fairlane.read_jobs(text[]), fairlane.read_standings, fairlane.read_seconds,
    fairlane.read_workers TO fairlane_viewer;
