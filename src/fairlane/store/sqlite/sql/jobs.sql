-- name: record_columns
-- The order of the fields of `JobRecord`.
l.seq, l.queue, l.class, l.state, l.gate, l.flow, l.inbox, l.lane, l.rank, l.granted, l.granted_at, l.arrival, l.due,
l.expires_at, l.session, l.claim, l.waiter, l.binding, l.fence, l.attempt, l.crashes, l.suspect, l.cancel, l.refused,
l.paid, l.started_at, j.id, j.kind, j.lane, j.cost, j.pool, j.sticky, j.direct, j.retries, j.backoff, j.uniq, j.task,
j.parent, j.attempts, l.returns

-- name: record_by_seq
SELECT /*record_columns*/ FROM fairlane_active_job l JOIN fairlane_job j ON j.seq = l.seq WHERE l.seq = ?

-- name: record_by_id
SELECT /*record_columns*/ FROM fairlane_job j JOIN fairlane_active_job l ON l.seq = j.seq WHERE j.id = ?

-- name: records_by_ids
-- CROSS JOIN fixes the join order: from the list to the index, never the other way round.
SELECT /*record_columns*/ FROM json_each(?) w CROSS JOIN fairlane_job j ON j.id = w.value
CROSS JOIN fairlane_active_job l ON l.seq = j.seq

-- name: fingerprint_columns
j.task, q.name, j.kind, j.class, j.lane, j.cost, j.payload, j.retries, j.backoff, j.timeout, j.uniq, j.pool, j.sticky,
j.direct, j.retry_of, j.delay, j.run_at, j.expires, j.fingerprint

-- name: jobs_known
SELECT j.id, o.state, l.state, /*fingerprint_columns*/
FROM json_each(?) w CROSS JOIN fairlane_job j ON j.id = w.value CROSS JOIN fairlane_queue q ON q.id = j.queue
LEFT JOIN fairlane_active_job l ON l.seq = j.seq LEFT JOIN fairlane_outcome o ON o.seq = j.seq

-- name: reserved_ids
SELECT r.id, r.fingerprint, r.state FROM json_each(?) w CROSS JOIN fairlane_reserved_id r ON r.id = w.value WHERE r.until > ?

-- name: reserved_id_put
INSERT OR REPLACE INTO fairlane_reserved_id (id, fingerprint, state, until) VALUES (?, ?, ?, ?)

-- name: job_insert
INSERT INTO fairlane_job (id, task, queue, kind, class, lane, cost, payload, headers, retries, backoff, timeout, uniq, pool,
    sticky, direct, parent, retry_of, enqueued_at, delay, run_at, expires)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: active_job_insert
INSERT INTO fairlane_active_job (seq, queue, class, state, gate, flow, inbox, lane, rank, granted, granted_at, arrival,
    due, expires_at, session, waiter, binding, fence, attempt, started_at, plain)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: active_job_arrive
INSERT INTO fairlane_active_job (seq, queue, class, state, gate, due, expires_at, plain)
VALUES (?, ?, ?, STATE.ARRIVING, GATE.UNADMITTED, ?, ?, ?)

-- name: active_job_save
UPDATE fairlane_active_job SET state = ?, gate = ?, flow = ?, inbox = ?, lane = ?, rank = ?, granted = ?, granted_at = ?,
    arrival = ?, due = ?, expires_at = ?, session = ?, claim = ?, binding = ?, fence = ?, attempt = ?, crashes = ?,
    suspect = ?, cancel = ?, refused = ?, paid = ?, started_at = ?, returns = ?
WHERE seq = ?

-- name: active_job_withdraw
UPDATE fairlane_active_job SET flow = NULL, granted_at = NULL WHERE seq = ?

-- name: active_job_grant
UPDATE fairlane_active_job SET granted = 1, flow = ?, granted_at = ? WHERE seq = ?

-- name: active_job_start
-- Starts jobs of the same cost together. A job keeps its flow, so that the index of claimable jobs is updated only once,
-- when the job ends.
UPDATE fairlane_active_job SET state = STATE.RUNNING, granted_at = NULL, session = ?, claim = ?, fence = fence + 1,
    attempt = attempt + 1, started_at = ?, paid = ?
WHERE seq IN (SELECT value FROM json_each(?))

-- name: active_job_cancel
UPDATE fairlane_active_job SET cancel = 1 WHERE seq = ?

-- name: active_job_refused
UPDATE fairlane_active_job SET refused = refused + 1 WHERE seq = ? AND state = STATE.RUNNING

-- name: active_job_delete
DELETE FROM fairlane_active_job WHERE seq = ?

-- name: active_job_delete_all
DELETE FROM fairlane_active_job WHERE seq IN (SELECT value FROM json_each(?))

-- name: outcome_insert
INSERT INTO fairlane_outcome (seq, queue, state, reason, result, error, error_group, session, move, arrival, attempt, fence,
    started_at, finished_at, refused, ending)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: outcome_complete
-- The usual ending, for many jobs at once: results by seq (?1), the rest from the active rows.
INSERT INTO fairlane_outcome (seq, queue, state, result, session, move, arrival, attempt, fence, started_at, finished_at)
SELECT l.seq, l.queue, STATE.COMPLETED, CAST(w.value AS BLOB), l.session, ?2, l.arrival, l.attempt, l.fence, l.started_at, ?3
FROM json_each(?1) w CROSS JOIN fairlane_active_job l ON l.seq = CAST(w.key AS INTEGER)

-- name: outcome_refused
UPDATE fairlane_outcome SET refused = refused + 1 WHERE seq = ?

-- name: identities_missing
-- Active jobs without an identity, which only damage to the file can cause.
SELECT l.seq FROM fairlane_active_job l LEFT JOIN fairlane_job j ON j.seq = l.seq WHERE j.seq IS NULL LIMIT ?

-- name: identities_missing_of
-- The same for the running jobs of a session.
SELECT l.seq FROM fairlane_active_job l WHERE l.session = ? AND NOT EXISTS (SELECT 1 FROM fairlane_job j WHERE j.seq = l.seq)

-- name: identity_lost
-- Rebuilds what can be known from the active row. The payload is one that cannot run.
INSERT INTO fairlane_job (seq, id, uniq, task, queue, kind, class, lane, cost, payload, retries, pool, enqueued_at)
SELECT l.seq, ?2, (SELECT u.value FROM fairlane_held_unique u WHERE u.seq = l.seq),
    coalesce((SELECT u.task FROM fairlane_held_unique u WHERE u.seq = l.seq), 'lost'), l.queue,
    CASE WHEN l.waiter IS NULL THEN 'job' ELSE 'turn' END, l.class,
    coalesce((SELECT nullif(f.lane, '') FROM fairlane_flow f WHERE f.id = l.flow),
        (SELECT n.key FROM fairlane_lane n WHERE n.id = l.lane)), 1.0, ?3, 0, 'default', ?4
FROM fairlane_active_job l WHERE l.seq = ?1

-- name: id_repair
UPDATE fairlane_job SET id = ? WHERE seq = ?

-- name: seqs_by_ids
SELECT j.id, j.seq FROM json_each(?) w CROSS JOIN fairlane_job j ON j.id = w.value

-- name: held_rows
-- What `finish` needs to judge a write and, if the job is plain, to end it.
SELECT l.seq, l.session, l.fence, l.plain, l.cancel, l.queue, l.class, l.lane, l.granted, l.arrival, l.attempt, l.started_at,
    l.refused
FROM json_each(?) w CROSS JOIN fairlane_active_job l ON l.seq = w.value

-- name: job_attempts
UPDATE fairlane_job SET attempts = ? WHERE seq = ?

-- name: job_content
SELECT /*fingerprint_columns*/ FROM fairlane_job j JOIN fairlane_queue q ON q.id = j.queue WHERE j.seq = ?

-- name: job_payload
UPDATE fairlane_job SET payload = ?, fingerprint = ? WHERE seq = ?

-- name: job_progress
UPDATE fairlane_job SET progress = ? WHERE seq = ?

-- name: job_body
SELECT payload, headers, timeout FROM fairlane_job WHERE seq = ?

-- name: job_for_judgement
SELECT j.seq, o.state, l.state, l.fence, j.attempts, o.fence, o.move, s.id
FROM json_each(?) w CROSS JOIN fairlane_job j ON j.id = w.value LEFT JOIN fairlane_active_job l ON l.seq = j.seq
LEFT JOIN fairlane_outcome o ON o.seq = j.seq LEFT JOIN fairlane_session s ON s.seq = o.session

-- name: job_states
SELECT j.id, j.kind, o.state FROM json_each(?) w CROSS JOIN fairlane_job j ON j.id = w.value
LEFT JOIN fairlane_outcome o ON o.seq = j.seq

-- name: unique_get
SELECT u.id, u.state, l.state, u.until FROM fairlane_held_unique u LEFT JOIN fairlane_active_job l ON l.seq = u.seq
WHERE u.task = ? AND u.value = ?

-- name: unique_put
INSERT OR REPLACE INTO fairlane_held_unique (task, value, seq, id, until) VALUES (?, ?, ?, ?, ?)

-- name: unique_release
DELETE FROM fairlane_held_unique WHERE seq = ? AND (until IS NULL OR until <= ?)

-- name: unique_outlive
-- The job is final and the value is still held: keep the state, for when the job is pruned.
UPDATE fairlane_held_unique SET state = ? WHERE seq = ?

-- name: seqs_expired
SELECT seq FROM fairlane_active_job WHERE expires_at <= ? AND state IN (STATE.SCHEDULED, STATE.PENDING)
    ORDER BY expires_at LIMIT ?

-- name: records_due
SELECT /*record_columns*/ FROM fairlane_active_job l CROSS JOIN fairlane_job j ON j.seq = l.seq
WHERE l.class = ? AND l.due <= ? AND l.state = STATE.SCHEDULED ORDER BY l.due LIMIT ?

-- name: records_arriving
SELECT /*record_columns*/ FROM fairlane_active_job l CROSS JOIN fairlane_job j ON j.seq = l.seq 
WHERE l.gate = GATE.UNADMITTED AND l.gate > GATE.NONE AND l.inbox = '' AND l.arrival IS NULL ORDER BY l.seq LIMIT ?

-- name: next_due_times
SELECT * FROM (SELECT due FROM fairlane_active_job WHERE class = CLASS.HIGH AND due IS NOT NULL
    AND state = STATE.SCHEDULED ORDER BY due LIMIT 1)
UNION ALL
SELECT * FROM (SELECT due FROM fairlane_active_job WHERE class = CLASS.NORMAL AND due IS NOT NULL
    AND state = STATE.SCHEDULED ORDER BY due LIMIT 1)
UNION ALL
SELECT * FROM (SELECT due FROM fairlane_active_job WHERE class = CLASS.LOW AND due IS NOT NULL
    AND state = STATE.SCHEDULED ORDER BY due LIMIT 1)
UNION ALL
SELECT * FROM (SELECT expires_at FROM fairlane_active_job WHERE expires_at IS NOT NULL
    AND state IN (STATE.SCHEDULED, STATE.PENDING) ORDER BY expires_at LIMIT 1)
UNION ALL SELECT min(due) FROM fairlane_active_job WHERE gate = GATE.PARENT AND gate > GATE.NONE

-- name: arrival_get
SELECT value FROM fairlane_counter WHERE name = 'arrival'

-- name: arrival_set
UPDATE fairlane_counter SET value = ? WHERE name = 'arrival'

-- name: ending_get
SELECT value FROM fairlane_counter WHERE name = 'ending'

-- name: ending_set
UPDATE fairlane_counter SET value = ? WHERE name = 'ending'

-- name: broadcasts_joining
SELECT /*record_columns*/ FROM fairlane_active_job l CROSS JOIN fairlane_job j ON j.seq = l.seq
WHERE l.gate = GATE.PARENT AND l.gate > GATE.NONE AND l.due > ? AND j.pool = ? AND l.cancel = 0

-- name: broadcasts_closing
SELECT /*record_columns*/ FROM fairlane_active_job l CROSS JOIN fairlane_job j ON j.seq = l.seq
WHERE l.gate = GATE.PARENT AND l.gate > GATE.NONE AND l.due <= ? LIMIT ?

-- name: child_exists
-- A copy is not created again while its id is reserved.
SELECT 1 FROM fairlane_job WHERE id = ?1 UNION ALL SELECT 1 FROM fairlane_reserved_id WHERE id = ?1

-- name: children_active
SELECT 1 FROM fairlane_job j CROSS JOIN fairlane_active_job l ON l.seq = j.seq WHERE j.parent = ? LIMIT 1

-- name: children_records
SELECT /*record_columns*/ FROM fairlane_job j CROSS JOIN fairlane_active_job l ON l.seq = j.seq WHERE j.parent = ?

-- name: children_unserved
-- Copies that wait for a worker that is gone and cannot come back within its lease.
SELECT /*record_columns*/ FROM fairlane_active_job p CROSS JOIN fairlane_job j ON j.parent = p.seq
CROSS JOIN fairlane_active_job l ON l.seq = j.seq
WHERE p.gate = GATE.PARENT AND p.gate > GATE.NONE AND p.due IS NULL AND j.parent IS NOT NULL AND l.state < STATE.RUNNING
AND NOT EXISTS (
    SELECT 1 FROM fairlane_session s WHERE s.pool = j.pool AND s.idx = j.direct
    AND (s.state IN ('live', 'stopping') OR (s.state = 'ended' AND s.named = 1 AND s.boot = ? AND s.expires > ?)))

-- name: children_outcomes
SELECT j.direct, o.state FROM fairlane_job j JOIN fairlane_outcome o ON o.seq = j.seq WHERE j.parent = ? ORDER BY j.direct

-- name: declined_since
-- Since when a job is declined, if it was declined under this fence.
SELECT since FROM fairlane_declined WHERE seq = ? AND fence = ?

-- name: declined_put
INSERT INTO fairlane_declined (seq, fence, since, until) VALUES (?, ?, ?, ?)
ON CONFLICT (seq) DO UPDATE SET fence = excluded.fence, since = excluded.since, until = excluded.until

-- name: declined_over
SELECT seq FROM fairlane_declined WHERE until <= ? AND until IS NOT NULL ORDER BY until LIMIT ?

-- name: declined_offered
UPDATE fairlane_declined SET until = NULL WHERE seq = ?

-- name: unknown_task_put
INSERT INTO fairlane_unknown_task (queue, task) VALUES (?, ?) ON CONFLICT DO NOTHING

-- name: declined_go_on
-- A claim that never began does not count: an earlier decline stays valid.
UPDATE fairlane_declined SET fence = ?2 WHERE seq = ?1 AND fence = ?2 - 1
