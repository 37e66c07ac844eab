-- name: ended_beyond
-- The last job that exceeds the number to keep of a queue and state.
SELECT finished_at, seq FROM fairlane_outcome WHERE queue = ? AND state = ?
    ORDER BY finished_at DESC, seq DESC LIMIT 1 OFFSET ?

-- name: jobs_ended_before
SELECT j.seq, j.id, o.state, o.finished_at, j.retry_of, /*fingerprint_columns*/ FROM fairlane_outcome o
CROSS JOIN fairlane_job j ON j.seq = o.seq CROSS JOIN fairlane_queue q ON q.id = j.queue
WHERE o.queue = ?1 AND o.state = ?2 AND o.finished_at <= ?3
    AND (o.finished_at < ?3 OR o.seq <= ?4) ORDER BY o.finished_at LIMIT ?5

-- name: jobs_ended_by_ids
SELECT j.seq, j.id, o.state, o.finished_at, j.retry_of, /*fingerprint_columns*/
FROM (SELECT DISTINCT value FROM json_each(?)) w
CROSS JOIN fairlane_job j ON j.id = w.value CROSS JOIN fairlane_outcome o ON o.seq = j.seq
CROSS JOIN fairlane_queue q ON q.id = j.queue

-- name: outcome_delete
DELETE FROM fairlane_outcome WHERE seq = ?

-- name: job_delete
DELETE FROM fairlane_job WHERE seq = ?

-- name: prune_sessions
-- A session that ended a job which is still stored belongs to that job's history.
DELETE FROM fairlane_session WHERE seq IN (SELECT seq FROM fairlane_session
    WHERE state IN ('ended', 'dead') AND ended_at <= ?
    AND NOT EXISTS (SELECT 1 FROM fairlane_outcome o WHERE o.session = fairlane_session.seq)
    AND NOT EXISTS (SELECT 1 FROM fairlane_active_job l WHERE l.session = fairlane_session.seq) LIMIT ?)

-- name: prune_bindings
DELETE FROM fairlane_binding WHERE seq IN (SELECT seq FROM fairlane_binding WHERE closed_at <= ? LIMIT ?)

-- name: prune_reserved_ids
DELETE FROM fairlane_reserved_id WHERE id IN (SELECT id FROM fairlane_reserved_id WHERE until <= ? LIMIT ?)

-- name: prune_uniques
-- Values that are no longer held and whose job is final or pruned.
DELETE FROM fairlane_held_unique WHERE seq IN (SELECT u.seq FROM fairlane_held_unique u
    WHERE u.until <= ? AND NOT EXISTS (SELECT 1 FROM fairlane_active_job l WHERE l.seq = u.seq) LIMIT ?)

-- name: prune_declined
DELETE FROM fairlane_declined WHERE seq IN (SELECT d.seq FROM fairlane_declined d
    WHERE NOT EXISTS (SELECT 1 FROM fairlane_active_job l WHERE l.seq = d.seq) LIMIT ?)

-- name: prune_unknown_tasks
DELETE FROM fairlane_unknown_task WHERE NOT EXISTS (SELECT 1 FROM fairlane_active_job l
    WHERE l.inbox = '~' || fairlane_unknown_task.task || '/' AND l.inbox <> '' AND l.queue = fairlane_unknown_task.queue)

-- name: prune_task_sets
DELETE FROM fairlane_task_set WHERE id IN (SELECT t.id FROM fairlane_task_set t WHERE t.used_at <= ?
    AND NOT EXISTS (SELECT 1 FROM fairlane_session s WHERE s.task_set = t.id AND s.state IN ('live', 'stopping')) LIMIT ?)

-- name: active_job_count
SELECT count(*) FROM fairlane_active_job

-- name: true_queue_count
SELECT queue, class, sum(state = STATE.SCHEDULED) AS scheduled, sum(state = STATE.PENDING) AS pending,
    sum(state = STATE.RUNNING) AS running, sum(state = STATE.RUNNING AND (waiter IS NOT NULL OR session IS NULL)) AS slotless
FROM fairlane_active_job WHERE state > STATE.ARRIVING GROUP BY queue, class

-- name: queue_count_differences
WITH truth AS (/*true_queue_count*/), pairs AS (
    SELECT t.queue, t.class, t.scheduled, t.pending, t.running, t.slotless, coalesce(x.scheduled, 0) AS xs,
        coalesce(x.pending, 0) AS xp, coalesce(x.running, 0) AS xr, coalesce(x.slotless, 0) AS xl
    FROM fairlane_queue_count t LEFT JOIN truth x ON x.queue = t.queue AND x.class = t.class)
SELECT queue, class, 'scheduled', scheduled, xs FROM pairs WHERE scheduled <> xs
UNION ALL SELECT queue, class, 'pending', pending, xp FROM pairs WHERE pending <> xp
UNION ALL SELECT queue, class, 'running', running, xr FROM pairs WHERE running <> xr
UNION ALL SELECT queue, class, 'slotless', slotless, xl FROM pairs WHERE slotless <> xl

-- name: queue_count_recount
WITH truth AS (/*true_queue_count*/)
UPDATE fairlane_queue_count SET (scheduled, pending, running, slotless) = (
    SELECT coalesce(sum(x.scheduled), 0), coalesce(sum(x.pending), 0), coalesce(sum(x.running), 0),
    coalesce(sum(x.slotless), 0)
    FROM truth x WHERE x.queue = fairlane_queue_count.queue AND x.class = fairlane_queue_count.class)

-- name: lane_differences
WITH truth AS (SELECT lane, sum(granted) AS granted FROM fairlane_active_job WHERE lane IS NOT NULL GROUP BY lane)
SELECT n.id, n.key, n.granted, coalesce(x.granted, 0) FROM fairlane_lane n LEFT JOIN truth x ON x.lane = n.id
WHERE n.granted <> coalesce(x.granted, 0)

-- name: lanes_short
SELECT n.id, n.key FROM fairlane_lane n WHERE n.granted < n.places
AND EXISTS (SELECT 1 FROM fairlane_active_job l WHERE l.lane = n.id AND l.granted = 0)

-- name: lanes_dangling
SELECT l.seq, j.id FROM fairlane_active_job l JOIN fairlane_job j ON j.seq = l.seq
WHERE l.lane IS NOT NULL AND NOT EXISTS (SELECT 1 FROM fairlane_lane n WHERE n.id = l.lane)

-- name: active_job_leave_lane
UPDATE fairlane_active_job SET lane = NULL, granted = 1 WHERE seq = ?

-- name: flow_differences
SELECT f.id, f.lane, f.head, (SELECT min(l.arrival) FROM fairlane_active_job l WHERE l.flow = f.id
    AND l.session IS NULL) AS true FROM fairlane_flow f
WHERE f.head IS NOT (SELECT min(l.arrival) FROM fairlane_active_job l WHERE l.flow = f.id AND l.session IS NULL)
