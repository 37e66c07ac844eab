-- One record per job is the truth, in three parts: `job` is its identity, which never moves; `live` is the narrow row that
-- moves while the job is not final; `outcome` takes its place when it is. A job is in exactly one of the latter two. Everything else here is derived from those two, or changes in the same step.
-- All names have a prefix, because a user's own tables may live in the same file and commit together with jobs.

CREATE TABLE fairlane_counter (
    name  TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO fairlane_counter VALUES ('arrival', 0), ('settings', 0);

CREATE TABLE fairlane_queue (
    id       INTEGER PRIMARY KEY,
    name     TEXT NOT NULL UNIQUE,
    version  INTEGER NOT NULL DEFAULT 0,
    declared TEXT NOT NULL DEFAULT '{}',
    override TEXT
);

-- Jobs of a queue by class and state, changed in the same step as the jobs. `slotless` are those among `running` that
-- take no slot: turns, and the parents of broadcasts.
CREATE TABLE fairlane_tally (
    queue     INTEGER NOT NULL REFERENCES fairlane_queue (id),
    class     INTEGER NOT NULL CHECK (class BETWEEN 0 AND 2),
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
    class       INTEGER NOT NULL CHECK (class BETWEEN 0 AND 2),
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
    attempts    BLOB              -- claims that ended before the last one
);
CREATE INDEX fairlane_job_queue  ON fairlane_job (queue, seq);
CREATE INDEX fairlane_job_task   ON fairlane_job (task, seq);
CREATE INDEX fairlane_job_lane   ON fairlane_job (queue, lane, seq) WHERE lane IS NOT NULL;
CREATE INDEX fairlane_job_sticky ON fairlane_job (sticky, seq) WHERE sticky IS NOT NULL;
CREATE INDEX fairlane_job_parent ON fairlane_job (parent) WHERE parent IS NOT NULL;

-- Appended, never updated on the hot path: an outcome written into the identity row costs twice as much (measured).
CREATE TABLE fairlane_outcome (
    seq         INTEGER PRIMARY KEY REFERENCES fairlane_job (seq),
    queue       INTEGER NOT NULL,
    state       INTEGER NOT NULL CHECK (state BETWEEN 4 AND 6),  -- 4 completed, 5 failed, 6 cancelled
    reason      TEXT,
    result      BLOB,
    error       TEXT,
    error_group TEXT,
    session     INTEGER,          -- who held the last claim, if the job ended in one
    move        INTEGER,          -- how that claim ended (`codes.MOVES`); NULL: the job ended while it waited
    arrival     INTEGER,
    attempt     INTEGER NOT NULL,
    fence       INTEGER NOT NULL,
    started_at  REAL,
    finished_at REAL NOT NULL,
    refused     INTEGER NOT NULL DEFAULT 0,
    CHECK ((session IS NULL) = (move IS NULL))
);
CREATE INDEX fairlane_outcome_ended   ON fairlane_outcome (queue, state, finished_at);
CREATE INDEX fairlane_outcome_session ON fairlane_outcome (session, seq) WHERE session IS NOT NULL;
-- Completed jobs are nearly all there is, so they are found by walking the table.
CREATE INDEX fairlane_outcome_state   ON fairlane_outcome (state, seq) WHERE state > 4;
CREATE INDEX fairlane_outcome_error   ON fairlane_outcome (error_group, seq) WHERE error_group IS NOT NULL;

-- state: 0 arriving (inserted, not yet admitted), 1 scheduled, 2 pending, 3 running.
-- gate: 0 none, 1 unbound (its pool has no worker yet), 2 clean-up (of its binding, or its own turn to come), 3 arriving,
-- 4 the parent of a broadcast.
-- No index here depends on the state, so that starting a job touches only the indexes it must.
-- A job is claimable exactly while `flow` is set and `session` is not: pending, granted, ungated.
CREATE TABLE fairlane_live (
    seq        INTEGER PRIMARY KEY REFERENCES fairlane_job (seq),
    queue      INTEGER NOT NULL,
    class      INTEGER NOT NULL,
    state      INTEGER NOT NULL CHECK (state BETWEEN 0 AND 3),
    gate       INTEGER NOT NULL DEFAULT 0 CHECK (gate BETWEEN 0 AND 4),
    flow       INTEGER,
    inbox      TEXT NOT NULL DEFAULT '',
    lane       INTEGER,           -- the limited lane it has arrived in
    rank       INTEGER NOT NULL DEFAULT 0,  -- its class in an unordered lane, 0 in an ordered one
    granted    INTEGER NOT NULL DEFAULT 0,
    granted_at REAL,              -- since when it holds a place that not everybody could fill
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
    returns    INTEGER NOT NULL DEFAULT 0,  -- how often it was handed back in a row after it had begun
    cancel     INTEGER NOT NULL DEFAULT 0,
    refused    INTEGER NOT NULL DEFAULT 0,
    paid       INTEGER NOT NULL DEFAULT 0,
    started_at REAL,
    plain      INTEGER NOT NULL DEFAULT 1,  -- nothing but a job: no turn, binding, unique value or parent
    CHECK (flow IS NULL OR (state >= 2 AND gate = 0 AND arrival IS NOT NULL)),
    CHECK (session IS NULL OR state = 3)
);
CREATE INDEX fairlane_live_ready    ON fairlane_live (flow, arrival) WHERE flow IS NOT NULL;
CREATE INDEX fairlane_live_waiting  ON fairlane_live (lane, rank, arrival) WHERE lane IS NOT NULL AND granted = 0;
CREATE INDEX fairlane_live_kept     ON fairlane_live (lane) WHERE lane IS NOT NULL AND (due IS NOT NULL OR gate > 0);
CREATE INDEX fairlane_live_running  ON fairlane_live (session, class) WHERE session IS NOT NULL;
CREATE INDEX fairlane_live_due      ON fairlane_live (class, due) WHERE due IS NOT NULL;
CREATE INDEX fairlane_live_later    ON fairlane_live (seq) WHERE due IS NOT NULL;
CREATE INDEX fairlane_live_expiry   ON fairlane_live (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX fairlane_live_gated    ON fairlane_live (gate, inbox, arrival) WHERE gate > 0;
CREATE INDEX fairlane_live_inbox    ON fairlane_live (inbox, seq) WHERE inbox <> '';
CREATE INDEX fairlane_live_binding  ON fairlane_live (binding) WHERE binding IS NOT NULL;
CREATE INDEX fairlane_live_waiter   ON fairlane_live (waiter) WHERE waiter IS NOT NULL;
CREATE INDEX fairlane_live_holding  ON fairlane_live (granted_at) WHERE granted_at IS NOT NULL;

-- Fair order. A domain is (queue, class, inbox) with its clock; a flow is a lane in it. Only a flow with a claimable job
-- has a tag: that of its next job, whose arrival is `head`.
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

-- Lanes with a limit that have jobs; `granted` = claimable + running + kept for a retry.
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
    state INTEGER,                -- of the job once it is final
    until REAL,                   -- kept so long, even when the job is final
    PRIMARY KEY (task, value)
) WITHOUT ROWID;
CREATE INDEX fairlane_held_unique_seq ON fairlane_held_unique (seq);

CREATE TABLE fairlane_remembered (
    id          TEXT PRIMARY KEY,
    fingerprint BLOB NOT NULL,
    state       INTEGER NOT NULL,
    until       REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX fairlane_remembered_until ON fairlane_remembered (until);

-- Leases count by the machine's monotonic clock, which cannot be compared between boots.
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
    task_set        TEXT          -- of `fairlane_task_set`; NULL: it does not say which tasks it knows
);
CREATE UNIQUE INDEX fairlane_session_index ON fairlane_session (pool, idx)
    WHERE idx IS NOT NULL AND state IN ('live', 'stopping');
CREATE INDEX fairlane_session_place ON fairlane_session (pool, idx, seq) WHERE idx IS NOT NULL;
CREATE INDEX fairlane_session_state ON fairlane_session (state);

-- The tasks that workers know: each distinct set once, as a list in JSON.
CREATE TABLE fairlane_task_set (
    id      TEXT PRIMARY KEY,
    tasks   TEXT NOT NULL,
    used_at REAL NOT NULL         -- when a session with it was last registered
) WITHOUT ROWID;

-- Jobs that a session declined because it did not know their task: since when that is so, and under which fence it was last. A row
-- counts only while that is the last claim of a live job; others are left for the pruner, so that no other step looks here.
CREATE TABLE fairlane_declined (
    seq   INTEGER PRIMARY KEY,
    fence INTEGER NOT NULL,
    since REAL NOT NULL,
    until REAL                    -- then it is offered to everybody again; NULL: it was
);
CREATE INDEX fairlane_declined_until ON fairlane_declined (until) WHERE until IS NOT NULL;

-- Tasks of which declined jobs wait, or waited lately, in an inbox of their own (`session.unknown_inbox`): where those that know
-- them look.
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

-- Tokens of the HTTP service. `scopes` and `queues` are lists in JSON.
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

-- For a person who looks: every job with its state in words.
CREATE VIEW fairlane_jobs AS
SELECT j.id, j.task, q.name AS queue, j.lane,
    CASE j.class WHEN 0 THEN 'high' WHEN 1 THEN 'normal' ELSE 'low' END AS priority,
    CASE coalesce(o.state, l.state) WHEN 1 THEN 'scheduled' WHEN 3 THEN 'running' WHEN 4 THEN 'completed' WHEN 5 THEN 'failed'
        WHEN 6 THEN 'cancelled' ELSE 'pending' END AS state,
    o.reason, coalesce(l.attempt, o.attempt) AS attempt, datetime(j.enqueued_at, 'unixepoch') AS enqueued_at,
    datetime(coalesce(l.started_at, o.started_at), 'unixepoch') AS started_at,
    datetime(o.finished_at, 'unixepoch') AS finished_at, o.error
FROM fairlane_job j JOIN fairlane_queue q ON q.id = j.queue LEFT JOIN fairlane_live l ON l.seq = j.seq
LEFT JOIN fairlane_outcome o ON o.seq = j.seq;
