-- A job is stored in three tables. `job` holds its identity, which never changes. `active_job` is the narrow row that is
-- updated until the job is final; `outcome` then replaces it. A job has a row in exactly one of those two. All other
-- tables are derived from these, or change in the same transaction.
-- All names have a prefix, because a user's own tables may be in the same file and commit together with jobs.
-- STATE.…, GATE.… and CLASS.… are replaced by the numbers of `store/codes.py` when this file is loaded.

CREATE TABLE fairlane_counter (
    name  TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO fairlane_counter VALUES ('arrival', 0), ('ending', 0), ('settings', 0);

CREATE TABLE fairlane_queue (
    id       INTEGER PRIMARY KEY,
    name     TEXT NOT NULL UNIQUE,
    version  INTEGER NOT NULL DEFAULT 0,
    declared TEXT NOT NULL DEFAULT '{}',
    override TEXT
);

-- Number of jobs of a queue by class and state, updated in the same transaction as the jobs. `slotless` counts the running
-- jobs that take no slot: turns, and the parents of broadcasts.
CREATE TABLE fairlane_queue_count (
    queue     INTEGER NOT NULL REFERENCES fairlane_queue (id),
    class     INTEGER NOT NULL CHECK (class BETWEEN CLASS.HIGH AND CLASS.LOW),
    scheduled INTEGER NOT NULL DEFAULT 0 CHECK (scheduled >= 0),
    pending   INTEGER NOT NULL DEFAULT 0 CHECK (pending >= 0),
    running   INTEGER NOT NULL DEFAULT 0 CHECK (running >= 0),
    slotless  INTEGER NOT NULL DEFAULT 0 CHECK (slotless >= 0),
    completed INTEGER NOT NULL DEFAULT 0,
    failed    INTEGER NOT NULL DEFAULT 0,
    cancelled INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (queue, class)
) WITHOUT ROWID;

CREATE TABLE fairlane_job (
    seq         INTEGER PRIMARY KEY AUTOINCREMENT,
    id          TEXT NOT NULL UNIQUE,
    task        TEXT NOT NULL,
    queue       INTEGER NOT NULL REFERENCES fairlane_queue (id),
    kind        TEXT NOT NULL CHECK (kind IN ('job', 'turn', 'broadcast', 'cleanup')),
    class       INTEGER NOT NULL CHECK (class BETWEEN CLASS.HIGH AND CLASS.LOW),
    lane        TEXT,
    cost        REAL NOT NULL,
    payload     BLOB NOT NULL,
    headers     BLOB,
    retries     INTEGER NOT NULL CHECK (retries >= 0),
    backoff     BLOB,
    timeout     REAL,
    uniq        TEXT,
    pool        TEXT NOT NULL,
    sticky      TEXT,
    direct      INTEGER,
    parent      INTEGER,
    retry_of    TEXT,
    enqueued_at REAL NOT NULL,
    delay       REAL,
    run_at      REAL,
    expires     REAL,
    progress    BLOB,
    attempts    BLOB,             -- earlier claims; the last one is in the outcome
    fingerprint BLOB              -- of the content that was enqueued, once a retry has replaced the payload
);
CREATE INDEX fairlane_job_queue  ON fairlane_job (queue, seq);
CREATE INDEX fairlane_job_task   ON fairlane_job (task, seq);
CREATE INDEX fairlane_job_lane   ON fairlane_job (queue, lane, seq) WHERE lane IS NOT NULL;
CREATE INDEX fairlane_job_sticky ON fairlane_job (sticky, seq) WHERE sticky IS NOT NULL;
CREATE INDEX fairlane_job_parent ON fairlane_job (parent) WHERE parent IS NOT NULL;

-- Appended, never updated on the hot path: writing the outcome into the identity row costs twice as much (measured).
CREATE TABLE fairlane_outcome (
    seq         INTEGER PRIMARY KEY REFERENCES fairlane_job (seq),
    queue       INTEGER NOT NULL,
    state       INTEGER NOT NULL CHECK (state BETWEEN STATE.COMPLETED AND STATE.CANCELLED),
    reason      TEXT,
    result      BLOB,
    error       TEXT,
    error_group TEXT,
    session     INTEGER,          -- the session of the last claim, if the job ended in one
    move        INTEGER,          -- how that claim ended (`codes.MOVES`); NULL: the job ended while waiting
    arrival     INTEGER,
    attempt     INTEGER NOT NULL,
    fence       INTEGER NOT NULL,
    started_at  REAL,
    finished_at REAL NOT NULL,
    refused     INTEGER NOT NULL DEFAULT 0,
    ending      INTEGER,          -- its number among the failed and cancelled jobs, in the order in which they ended
    CHECK ((session IS NULL) = (move IS NULL))
);
CREATE INDEX fairlane_outcome_ended   ON fairlane_outcome (queue, state, finished_at);
CREATE INDEX fairlane_outcome_session ON fairlane_outcome (session, seq) WHERE session IS NOT NULL;
-- Without completed jobs: nearly all jobs are, so they are found by scanning the table.
CREATE INDEX fairlane_outcome_state   ON fairlane_outcome (state, seq) WHERE state > STATE.COMPLETED;
CREATE INDEX fairlane_outcome_ending  ON fairlane_outcome (ending) WHERE ending IS NOT NULL;
CREATE INDEX fairlane_outcome_error   ON fairlane_outcome (error_group, seq) WHERE error_group IS NOT NULL;

-- state: arriving is stored, but not yet admitted.
-- gate, what keeps a job out of line: unbound (its pool has no worker yet), cleanup (its binding is being cleaned up, or it
-- is that clean-up and its binding is still in use), unadmitted (arriving), parent (of a broadcast).
-- No index depends on the state, so that starting a job updates as few indexes as possible.
-- A job is claimable exactly while `flow` is set and `session` is not: pending, granted, ungated.
CREATE TABLE fairlane_active_job (
    seq        INTEGER PRIMARY KEY REFERENCES fairlane_job (seq),
    queue      INTEGER NOT NULL,
    class      INTEGER NOT NULL,
    state      INTEGER NOT NULL CHECK (state BETWEEN STATE.ARRIVING AND STATE.RUNNING),
    gate       INTEGER NOT NULL DEFAULT GATE.NONE CHECK (gate BETWEEN GATE.NONE AND GATE.PARENT),
    flow       INTEGER,
    inbox      TEXT NOT NULL DEFAULT '',
    lane       INTEGER,           -- the limited lane it is in
    rank       INTEGER NOT NULL DEFAULT 0,  -- its class in an unordered lane, 0 in an ordered one
    granted    INTEGER NOT NULL DEFAULT 0,
    granted_at REAL,              -- since when it holds a place of its lane that not every worker could use
    arrival    INTEGER,
    due        REAL,
    expires_at REAL,              -- NULL once it has started
    session    INTEGER,
    claim      INTEGER,
    waiter     INTEGER,
    binding    INTEGER,
    fence      INTEGER NOT NULL DEFAULT 0,
    attempt    INTEGER NOT NULL DEFAULT 0,
    crashes    INTEGER NOT NULL DEFAULT 0,
    suspect    INTEGER NOT NULL DEFAULT 0,
    returns    INTEGER NOT NULL DEFAULT 0,  -- times in a row that it was handed back after it had begun
    cancel     INTEGER NOT NULL DEFAULT 0,
    refused    INTEGER NOT NULL DEFAULT 0,
    paid       INTEGER NOT NULL DEFAULT 0,
    started_at REAL,
    plain      INTEGER NOT NULL DEFAULT 1,  -- no turn, binding, unique value or parent
    CHECK (flow IS NULL OR (state >= STATE.PENDING AND gate = GATE.NONE AND arrival IS NOT NULL)),
    CHECK (session IS NULL OR state = STATE.RUNNING)
);
CREATE INDEX fairlane_active_job_ready    ON fairlane_active_job (flow, arrival) WHERE flow IS NOT NULL;
CREATE INDEX fairlane_active_job_waiting  ON fairlane_active_job (lane, rank, arrival) WHERE lane IS NOT NULL
    AND granted = 0;
CREATE INDEX fairlane_active_job_kept     ON fairlane_active_job (lane) WHERE lane IS NOT NULL
    AND (due IS NOT NULL OR gate > GATE.NONE);
CREATE INDEX fairlane_active_job_running  ON fairlane_active_job (session, class) WHERE session IS NOT NULL;
CREATE INDEX fairlane_active_job_due      ON fairlane_active_job (class, due) WHERE due IS NOT NULL;
CREATE INDEX fairlane_active_job_later    ON fairlane_active_job (seq) WHERE due IS NOT NULL;
CREATE INDEX fairlane_active_job_expiry   ON fairlane_active_job (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX fairlane_active_job_gated    ON fairlane_active_job (gate, inbox, arrival) WHERE gate > GATE.NONE;
CREATE INDEX fairlane_active_job_inbox    ON fairlane_active_job (inbox, seq) WHERE inbox <> '';
CREATE INDEX fairlane_active_job_binding  ON fairlane_active_job (binding) WHERE binding IS NOT NULL;
CREATE INDEX fairlane_active_job_waiter   ON fairlane_active_job (waiter) WHERE waiter IS NOT NULL;
CREATE INDEX fairlane_active_job_holding  ON fairlane_active_job (granted_at) WHERE granted_at IS NOT NULL;

-- Fair order. A domain is a (queue, class, inbox) with its clock; a flow is a lane in a domain. A flow has a tag only while
-- it has a claimable job: the tag of its next job, whose arrival is `head`.
CREATE TABLE fairlane_domain (
    id    INTEGER PRIMARY KEY,
    queue INTEGER NOT NULL,
    class INTEGER NOT NULL,
    inbox TEXT NOT NULL,
    clock INTEGER NOT NULL DEFAULT 0,
    UNIQUE (inbox, class, queue)
);
CREATE INDEX fairlane_domain_queue ON fairlane_domain (queue);
CREATE TABLE fairlane_flow (
    id     INTEGER PRIMARY KEY,
    domain INTEGER NOT NULL REFERENCES fairlane_domain (id),
    lane   TEXT NOT NULL,         -- '' for jobs without a lane
    finish INTEGER NOT NULL DEFAULT 0,
    tag    INTEGER,
    head   INTEGER,
    UNIQUE (domain, lane),
    CHECK ((tag IS NULL) = (head IS NULL))
);
CREATE INDEX fairlane_flow_next ON fairlane_flow (domain, tag, head) WHERE tag IS NOT NULL;

-- Lanes with a limit that have jobs. `granted` counts the places in use: claimable, running or kept for a retry.
CREATE TABLE fairlane_lane (
    id      INTEGER PRIMARY KEY,
    queue   INTEGER NOT NULL REFERENCES fairlane_queue (id),
    key     TEXT NOT NULL,
    places  INTEGER NOT NULL CHECK (places >= 0),
    ordered INTEGER NOT NULL,
    granted INTEGER NOT NULL DEFAULT 0 CHECK (granted >= 0),
    UNIQUE (queue, key)
);
CREATE INDEX fairlane_lane_room ON fairlane_lane (id) WHERE granted < places;

CREATE TABLE fairlane_held_unique (
    task  TEXT NOT NULL,
    value TEXT NOT NULL,
    seq   INTEGER NOT NULL,
    id    TEXT NOT NULL,
    state INTEGER,                -- of the job, once it is final
    until REAL,                   -- held until then, even when the job is final
    PRIMARY KEY (task, value)
) WITHOUT ROWID;
CREATE INDEX fairlane_held_unique_seq ON fairlane_held_unique (seq);

-- Ids of pruned jobs that may not be used again yet.
CREATE TABLE fairlane_reserved_id (
    id          TEXT PRIMARY KEY,
    fingerprint BLOB NOT NULL,
    state       INTEGER NOT NULL,
    until       REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX fairlane_reserved_id_until ON fairlane_reserved_id (until);

-- Leases are measured by the machine's monotonic clock, whose readings cannot be compared between boots.
CREATE TABLE fairlane_session (
    seq             INTEGER PRIMARY KEY AUTOINCREMENT,
    id              TEXT NOT NULL UNIQUE,
    kind            TEXT NOT NULL CHECK (kind IN ('worker', 'manager', 'waiter')),
    state           TEXT NOT NULL CHECK (state IN ('live', 'stopping', 'ended', 'dead')),
    host            TEXT NOT NULL,
    pid             INTEGER NOT NULL,
    pool            TEXT NOT NULL,
    idx             INTEGER,
    named           INTEGER NOT NULL,
    queues          TEXT NOT NULL,
    slots           INTEGER,
    reserved_high   INTEGER NOT NULL DEFAULT 0,
    reserved_normal INTEGER NOT NULL DEFAULT 0,
    started_at      REAL NOT NULL,
    ended_at        REAL,
    lease           REAL NOT NULL,
    boot            TEXT NOT NULL,
    expires         REAL NOT NULL,
    claim           INTEGER NOT NULL DEFAULT 0,
    task_set        TEXT          -- id in `fairlane_task_set`; NULL: the session did not report its tasks
);
CREATE UNIQUE INDEX fairlane_session_index ON fairlane_session (pool, idx)
    WHERE idx IS NOT NULL AND state IN ('live', 'stopping');
CREATE INDEX fairlane_session_place ON fairlane_session (pool, idx, seq) WHERE idx IS NOT NULL;
CREATE INDEX fairlane_session_state ON fairlane_session (state);

-- The tasks that workers know: each distinct set once, as a JSON list.
CREATE TABLE fairlane_task_set (
    id      TEXT PRIMARY KEY,
    tasks   TEXT NOT NULL,
    used_at REAL NOT NULL         -- when a session with it was last registered
) WITHOUT ROWID;

-- Jobs that a session declined because it did not know their task: since when, and the fence of the last time. A row counts
-- only while that fence is the job's last claim. Other rows are stale and left to the pruner, so that no other step has to
-- look here.
CREATE TABLE fairlane_declined (
    seq   INTEGER PRIMARY KEY,
    fence INTEGER NOT NULL,
    since REAL NOT NULL,
    until REAL                    -- when it is offered to all workers again; NULL: that has happened
);
CREATE INDEX fairlane_declined_until ON fairlane_declined (until) WHERE until IS NOT NULL;

-- Tasks whose declined jobs wait, or waited recently, in an inbox of their own (`session.unknown_inbox`). Workers that know
-- the task claim from it.
CREATE TABLE fairlane_unknown_task (
    queue INTEGER NOT NULL REFERENCES fairlane_queue (id),
    task  TEXT NOT NULL,
    PRIMARY KEY (queue, task)
) WITHOUT ROWID;

CREATE TABLE fairlane_binding (
    seq            INTEGER PRIMARY KEY AUTOINCREMENT,
    pool           TEXT NOT NULL,
    key            TEXT NOT NULL,
    idx            INTEGER NOT NULL,
    state          TEXT NOT NULL CHECK (state IN ('open', 'draining', 'released', 'lost')),
    opened_at      REAL NOT NULL,
    used_at        REAL NOT NULL,
    closed_at      REAL,
    cleanup        INTEGER,
    cleanup_failed INTEGER NOT NULL DEFAULT 0,
    CHECK ((closed_at IS NULL) = (state IN ('open', 'draining')))
);
CREATE UNIQUE INDEX fairlane_binding_open ON fairlane_binding (pool, key) WHERE closed_at IS NULL;
CREATE INDEX fairlane_binding_worker ON fairlane_binding (pool, idx) WHERE closed_at IS NULL;
CREATE INDEX fairlane_binding_used ON fairlane_binding (used_at) WHERE state = 'open';
CREATE INDEX fairlane_binding_closed ON fairlane_binding (closed_at) WHERE closed_at IS NOT NULL;
CREATE INDEX fairlane_binding_key ON fairlane_binding (key, pool, seq);

CREATE TABLE fairlane_leader (
    one     INTEGER PRIMARY KEY CHECK (one = 1),
    term    INTEGER NOT NULL,
    session TEXT,                 -- NULL: resigned
    lease   REAL NOT NULL,
    boot    TEXT NOT NULL,
    expires REAL NOT NULL
);

CREATE TABLE fairlane_schedule (
    name        TEXT PRIMARY KEY,
    timetable   TEXT NOT NULL,
    job         BLOB NOT NULL,
    stored_at   REAL NOT NULL,
    declared_at REAL NOT NULL,
    last_slot   REAL
) WITHOUT ROWID;

-- Tokens of the HTTP service. `scopes` and `queues` are JSON lists.
CREATE TABLE fairlane_token (
    id          TEXT PRIMARY KEY,
    name        TEXT NOT NULL,
    digest      BLOB NOT NULL,
    scopes      TEXT NOT NULL,
    queues      TEXT,
    lane_prefix TEXT,
    created_at  REAL NOT NULL,
    expires_at  REAL,
    revoked_at  REAL,
    hint        TEXT NOT NULL
) WITHOUT ROWID;

-- For people: every job with its state and priority in words.
CREATE VIEW fairlane_jobs AS
SELECT j.id, j.task, q.name AS queue, j.lane,
    CASE j.class WHEN CLASS.HIGH THEN 'high' WHEN CLASS.NORMAL THEN 'normal' ELSE 'low' END AS priority,
    CASE coalesce(o.state, l.state) WHEN STATE.SCHEDULED THEN 'scheduled' WHEN STATE.RUNNING THEN 'running'
        WHEN STATE.COMPLETED THEN 'completed' WHEN STATE.FAILED THEN 'failed' WHEN STATE.CANCELLED THEN 'cancelled'
        ELSE 'pending' END AS state,
    o.reason, coalesce(l.attempt, o.attempt) AS attempt, datetime(j.enqueued_at, 'unixepoch') AS enqueued_at,
    datetime(coalesce(l.started_at, o.started_at), 'unixepoch') AS started_at,
    datetime(o.finished_at, 'unixepoch') AS finished_at, o.error
FROM fairlane_job j JOIN fairlane_queue q ON q.id = j.queue LEFT JOIN fairlane_active_job l
    ON l.seq = j.seq LEFT JOIN fairlane_outcome o ON o.seq = j.seq;
