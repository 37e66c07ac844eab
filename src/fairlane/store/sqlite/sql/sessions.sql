-- name: session_columns
-- The order of the fields of `StoredSession`.
seq, id, kind, state, host, pid, pool, idx, named, queues, slots, reserved_high, reserved_normal, started_at, ended_at,
lease, boot, expires, claim, task_set

-- name: session_by_id
SELECT /*session_columns*/ FROM fairlane_session WHERE id = ?

-- name: task_sets
-- The distinct sets of tasks that all sessions, or one session, know.
SELECT t.id, t.tasks FROM fairlane_task_set t WHERE t.id IN (SELECT s.task_set FROM fairlane_session s
    WHERE ?1 IS NULL OR s.id = ?1)

-- name: session_by_seq
SELECT /*session_columns*/ FROM fairlane_session WHERE seq = ?

-- name: session_id
SELECT id FROM fairlane_session WHERE seq = ?

-- name: session_insert
INSERT INTO fairlane_session (id, kind, state, host, pid, pool, idx, named, queues, slots, reserved_high, reserved_normal,
    started_at, lease, boot, expires, task_set)
VALUES (?, ?, 'live', ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: task_set_used
INSERT INTO fairlane_task_set (id, tasks, used_at) VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE SET used_at = excluded.used_at

-- name: session_renew
UPDATE fairlane_session SET expires = ?, boot = ? WHERE seq = ?

-- name: session_stopping
UPDATE fairlane_session SET state = 'stopping' WHERE seq = ?

-- name: session_end
UPDATE fairlane_session SET state = ?, ended_at = ? WHERE seq = ?

-- name: session_claim
UPDATE fairlane_session SET claim = ? WHERE seq = ?

-- name: session_load
SELECT class, count(*) FROM fairlane_active_job WHERE session = ? GROUP BY class

-- name: session_turns
-- Turns take no slot.
SELECT class, count(*) FROM fairlane_active_job WHERE waiter = ? AND session IS NOT NULL GROUP BY class

-- name: session_records
SELECT /*record_columns*/ FROM fairlane_active_job l CROSS JOIN fairlane_job j ON j.seq = l.seq WHERE l.session = ?
ORDER BY l.arrival

-- name: waiter_records
SELECT /*record_columns*/ FROM fairlane_active_job l CROSS JOIN fairlane_job j ON j.seq = l.seq WHERE l.waiter = ?

-- name: records_orphaned
-- Running jobs whose session is gone. The parent of a broadcast has no session and needs none.
SELECT /*record_columns*/ FROM fairlane_active_job l CROSS JOIN fairlane_job j ON j.seq = l.seq
WHERE l.session IN (SELECT DISTINCT r.session FROM fairlane_active_job r LEFT JOIN fairlane_session s ON s.seq = r.session
    WHERE r.session IS NOT NULL AND (s.seq IS NULL OR s.state IN ('ended', 'dead')))
LIMIT ?

-- name: sessions_present
SELECT /*session_columns*/ FROM fairlane_session WHERE state IN ('live', 'stopping')

-- name: session_at_index
SELECT /*session_columns*/ FROM fairlane_session WHERE pool = ? AND idx = ? AND idx IS NOT NULL
    AND state IN ('live', 'stopping')

-- name: session_last_at_index
SELECT /*session_columns*/ FROM fairlane_session WHERE pool = ? AND idx = ? ORDER BY seq DESC LIMIT 1

-- name: indices_taken
SELECT idx FROM fairlane_session WHERE pool = ? AND idx IS NOT NULL
AND (state IN ('live', 'stopping') OR (state = 'ended' AND named = 1 AND boot = ? AND expires > ?))

-- name: pool_live
SELECT idx FROM fairlane_session
WHERE pool = ? AND state = 'live' AND idx IS NOT NULL AND boot = ? AND expires > ? ORDER BY idx

-- name: pool_bindings
-- A draining binding is about to be released and does not count.
SELECT idx, count(*) FROM fairlane_binding WHERE pool = ? AND closed_at IS NULL AND state = 'open' GROUP BY idx

-- name: inbox_room
-- A worker's slots, and its running jobs by class.
SELECT s.slots, s.reserved_high, s.reserved_normal, /*loads*/
FROM fairlane_session s WHERE s.pool = ? AND s.idx = ? AND s.idx IS NOT NULL AND s.state = 'live'

-- name: loads
(SELECT count(*) FROM fairlane_active_job l WHERE l.session = s.seq AND l.class = CLASS.HIGH AND l.waiter IS NULL),
(SELECT count(*) FROM fairlane_active_job l WHERE l.session = s.seq AND l.class = CLASS.NORMAL AND l.waiter IS NULL),
(SELECT count(*) FROM fairlane_active_job l WHERE l.session = s.seq AND l.class = CLASS.LOW AND l.waiter IS NULL)

-- name: open_binding_columns
-- The order of the fields of `OpenBinding`.
seq, pool, key, idx, state, used_at, cleanup

-- name: binding_open
SELECT /*open_binding_columns*/ FROM fairlane_binding WHERE pool = ? AND key = ? AND closed_at IS NULL

-- name: binding_get
SELECT /*open_binding_columns*/ FROM fairlane_binding WHERE seq = ?

-- name: binding_insert
INSERT INTO fairlane_binding (pool, key, idx, state, opened_at, used_at) VALUES (?, ?, ?, 'open', ?, ?)

-- name: binding_used
UPDATE fairlane_binding SET used_at = ? WHERE seq = ?

-- name: binding_reopen
UPDATE fairlane_binding SET state = 'open', cleanup = NULL, used_at = ? WHERE seq = ?

-- name: binding_drain
UPDATE fairlane_binding SET state = 'draining', cleanup = ? WHERE seq = ?

-- name: binding_cleaned
-- Jobs arrived while the clean-up ran: the binding is open again for them.
UPDATE fairlane_binding SET state = 'open', cleanup = NULL, used_at = ?, cleanup_failed = ? WHERE seq = ?

-- name: binding_close
UPDATE fairlane_binding SET state = ?, closed_at = ?, cleanup_failed = max(cleanup_failed, ?) WHERE seq = ?

-- name: binding_busy
-- Whether the key has pending, running or retrying jobs besides the clean-up.
SELECT 1 FROM fairlane_active_job WHERE binding = ? AND seq <> ? LIMIT 1

-- name: binding_gated
SELECT /*record_columns*/ FROM fairlane_active_job l CROSS JOIN fairlane_job j ON j.seq = l.seq
WHERE l.binding = ? AND l.gate = GATE.CLEANUP ORDER BY l.arrival

-- name: binding_records
SELECT /*record_columns*/ FROM fairlane_active_job l CROSS JOIN fairlane_job j ON j.seq = l.seq WHERE l.binding = ?
    ORDER BY l.arrival

-- name: bindings_of_worker
SELECT /*open_binding_columns*/ FROM fairlane_binding WHERE pool = ? AND idx = ? AND closed_at IS NULL ORDER BY seq

-- name: bindings_idle
SELECT /*open_binding_columns*/ FROM fairlane_binding WHERE state = 'open' AND used_at <= ? ORDER BY used_at LIMIT ?

-- name: bindings_unserved
-- Workers with bindings that are gone and whose lease is over.
SELECT DISTINCT b.pool, b.idx FROM fairlane_binding b WHERE b.closed_at IS NULL AND NOT EXISTS (
    SELECT 1 FROM fairlane_session s WHERE s.pool = b.pool AND s.idx = b.idx
    AND (s.state IN ('live', 'stopping') OR (s.state = 'ended' AND s.named = 1 AND s.boot = ? AND s.expires > ?)))

-- name: pools_unbound
SELECT DISTINCT inbox FROM fairlane_active_job WHERE gate = GATE.UNBOUND AND gate > GATE.NONE

-- name: records_unbound
SELECT /*record_columns*/ FROM fairlane_active_job l CROSS JOIN fairlane_job j ON j.seq = l.seq
WHERE l.gate = GATE.UNBOUND AND l.gate > GATE.NONE AND l.inbox = ? ORDER BY l.arrival LIMIT ?

-- name: leader
SELECT term, session, lease, boot, expires FROM fairlane_leader WHERE one = 1

-- name: leader_put
INSERT OR REPLACE INTO fairlane_leader (one, term, session, lease, boot, expires) VALUES (1, ?, ?, ?, ?, ?)

-- name: leader_resign
UPDATE fairlane_leader SET session = NULL WHERE one = 1 AND term = ? AND session IS NOT NULL

-- name: schedule_put
INSERT INTO fairlane_schedule (name, timetable, job, stored_at, declared_at) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (name) DO UPDATE SET job = excluded.job, declared_at = excluded.declared_at,
    stored_at = CASE timetable WHEN excluded.timetable THEN stored_at ELSE excluded.stored_at END,
    timetable = excluded.timetable

-- name: schedule_fired
UPDATE fairlane_schedule SET last_slot = max(coalesce(last_slot, 0), ?) WHERE name = ?

-- name: token_columns
id, name, digest, scopes, queues, lane_prefix, created_at, expires_at, revoked_at, hint

-- name: token_add
INSERT INTO fairlane_token (/*token_columns*/) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: token_by_id
SELECT /*token_columns*/ FROM fairlane_token WHERE id = ?

-- name: token_revoke
UPDATE fairlane_token SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL

-- name: tokens_read
SELECT /*token_columns*/ FROM fairlane_token ORDER BY created_at, id
