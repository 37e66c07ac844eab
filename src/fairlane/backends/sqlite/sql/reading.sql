-- name: job_columns
-- The order of `views.job_of`.
j.seq, j.id, j.task, q.name, j.kind, j.class, j.lane, j.cost, j.payload, j.headers, j.retries, j.backoff, j.timeout, j.uniq,
j.pool, j.sticky, j.direct, j.retry_of, p.id, j.enqueued_at, j.enqueued_at + j.expires, j.progress, j.attempts,
o.state, o.reason, o.result, o.error, o.error_group, o.move, o.finished_at,
l.state, l.inbox, l.due, l.cancel, l.suspect,
coalesce(l.arrival, o.arrival), coalesce(l.attempt, o.attempt), coalesce(l.fence, o.fence),
coalesce(l.started_at, o.started_at), coalesce(l.refused, o.refused), s.id, s.pool, s.idx, s.host

-- name: job_tables
LEFT JOIN fairlane_queue q ON q.id = j.queue LEFT JOIN fairlane_live l ON l.seq = j.seq
LEFT JOIN fairlane_outcome o ON o.seq = j.seq LEFT JOIN fairlane_session s ON s.seq = coalesce(l.session, o.session)
LEFT JOIN fairlane_job p ON p.seq = j.parent

-- name: jobs_by_ids
SELECT /*job_columns*/ FROM json_each(?) w CROSS JOIN fairlane_job j ON j.id = w.value /*job_tables*/

-- name: jobs_by_seqs
SELECT /*job_columns*/ FROM json_each(?) w CROSS JOIN fairlane_job j ON j.seq = w.value /*job_tables*/ ORDER BY j.seq DESC

-- name: place_ready
-- Claimable jobs of one flow that come before an arrival, or as many as are counted exactly.
SELECT count(*) FROM (SELECT 1 FROM fairlane_live WHERE flow = ? AND arrival < ? AND session IS NULL LIMIT ?)

-- name: place_waiting
-- Jobs of a limited lane without a place: by rank, those before an arrival.
SELECT count(*) FROM (SELECT 1 FROM fairlane_live WHERE lane = ? AND granted = 0 AND rank = ? AND arrival < ? AND state < 3 LIMIT ?)

-- name: place_holding
-- Jobs of a limited lane that hold a place behind a gate, or until their retry.
SELECT count(*) FROM (SELECT 1 FROM fairlane_live
    WHERE lane = ? AND (due IS NOT NULL OR gate > 0) AND granted = 1 AND rank = ? AND arrival < ? AND state < 3 LIMIT ?)

-- name: place_gated
-- Jobs of a lane without a limit that wait behind a gate.
SELECT count(*) FROM (SELECT 1 FROM fairlane_live l CROSS JOIN fairlane_job j ON j.seq = l.seq
    WHERE l.gate > 0 AND l.queue = ? AND j.lane IS ? AND l.class = ? AND l.arrival < ? LIMIT ?)

-- name: flows_of_lane
SELECT f.id, d.class FROM fairlane_domain d CROSS JOIN fairlane_flow f ON f.domain = d.id
WHERE d.queue = ? AND f.lane = ? AND f.tag IS NOT NULL

-- name: flows_active
SELECT count(*) FROM (SELECT 1 FROM fairlane_domain d CROSS JOIN fairlane_flow f ON f.domain = d.id
    WHERE d.inbox = ? AND d.class = ? AND d.queue = ? AND f.tag IS NOT NULL LIMIT ?)

-- name: rivals_ready
-- Other lanes of a domain (?1) that have claimable jobs, in fair order, each with the cost of the next one, how many there
-- are (counted up to ?4), and for a limited lane its places; those that wait for one count too.
SELECT f.lane, f.tag, j.cost, n.places,
    (SELECT count(*) FROM (SELECT 1 FROM fairlane_live r WHERE r.flow = f.id AND r.session IS NULL LIMIT ?4))
    + (SELECT count(*) FROM (SELECT 1 FROM fairlane_live w WHERE w.lane = n.id AND w.granted = 0
        AND w.rank = CASE n.ordered WHEN 1 THEN 0 ELSE l.class END LIMIT ?4))
FROM fairlane_flow f CROSS JOIN fairlane_live l ON l.flow = f.id AND l.arrival = f.head
CROSS JOIN fairlane_job j ON j.seq = l.seq LEFT JOIN fairlane_lane n ON n.queue = ?2 AND n.key = f.lane
WHERE f.domain = ?1 AND f.tag IS NOT NULL AND f.lane <> ?3 ORDER BY f.tag, f.head LIMIT ?5

-- name: rivals_blocked
-- Limited lanes whose places are all taken, so that nothing of them is claimable just now: their finish time in a domain
-- (?1), their places, and how many of a class (?5) wait, counted up to ?4.
SELECT n.key, f.finish, n.places, (SELECT count(*) FROM (SELECT 1 FROM fairlane_live w WHERE w.lane = n.id AND w.granted = 0
    AND w.rank = CASE n.ordered WHEN 1 THEN 0 ELSE ?5 END LIMIT ?4))
FROM (SELECT id, key, places, ordered FROM fairlane_lane WHERE queue = ?2 AND key <> ?3 LIMIT ?7) n
LEFT JOIN fairlane_flow f ON f.domain = ?1 AND f.lane = n.key WHERE f.tag IS NULL LIMIT ?6

-- name: lanes_limited
SELECT count(*) FROM (SELECT 1 FROM fairlane_lane WHERE queue = ? LIMIT ?)

-- name: flows_before
-- Flows of the same domain whose next job starts before that of this one.
SELECT count(*) FROM (SELECT 1 FROM fairlane_flow m CROSS JOIN fairlane_flow f ON f.domain = m.domain
    WHERE m.id = ? AND f.tag IS NOT NULL AND (f.tag < m.tag OR (f.tag = m.tag AND f.head < m.head)) LIMIT ?)

-- name: lane_retrying
-- An ordered lane that is closed for a retry: until when.
SELECT min(due) FROM fairlane_live WHERE lane = ? AND (due IS NOT NULL OR gate > 0) AND due IS NOT NULL AND granted = 1

-- name: workers_of_queue
SELECT s.slots, s.reserved_high, s.reserved_normal, /*loads*/
FROM fairlane_session s WHERE s.state = 'live' AND s.kind = 'worker' AND s.boot = ? AND s.expires > ?
AND EXISTS (SELECT 1 FROM json_each(s.queues) n WHERE n.value = ?)

-- name: worker_at
SELECT s.slots, s.reserved_high, s.reserved_normal, /*loads*/ FROM fairlane_session s
WHERE s.pool = ? AND s.idx = ? AND s.idx IS NOT NULL AND s.state IN ('live', 'stopping') AND s.boot = ? AND s.expires > ?

-- name: queues_read
SELECT id, name, version, declared, override FROM fairlane_queue ORDER BY name

-- name: tallies_read
SELECT queue, class, scheduled, pending, running, completed, failed, cancelled FROM fairlane_tally

-- name: queue_jobs
-- Jobs of a queue that wait, and those that run and take a slot.
SELECT class, pending, running - slotless FROM fairlane_tally WHERE queue = ?

-- name: sessions_read
SELECT /*session_columns*/ FROM fairlane_session ORDER BY seq DESC

-- name: sessions_load
SELECT session, class, count(*) FROM fairlane_live WHERE session IS NOT NULL GROUP BY session, class

-- name: lanes_read
SELECT j.lane, sum(l.state < 3), sum(l.state = 3) FROM fairlane_live l JOIN fairlane_job j ON j.seq = l.seq
WHERE l.queue = ? AND l.state >= 2 GROUP BY j.lane ORDER BY 2 DESC, 3 DESC, 1 LIMIT ?

-- name: binding_columns
b.pool, b.key, b.idx, b.state, b.opened_at, b.used_at, b.closed_at, j.id, b.cleanup_failed

-- name: bindings_of_key
SELECT /*binding_columns*/ FROM fairlane_binding b LEFT JOIN fairlane_job j ON j.seq = b.cleanup
WHERE b.key = ?1 AND (?2 IS NULL OR b.pool = ?2) ORDER BY b.closed_at IS NOT NULL, b.seq DESC LIMIT ?3

-- name: bindings_open
SELECT /*binding_columns*/ FROM fairlane_binding b LEFT JOIN fairlane_job j ON j.seq = b.cleanup
WHERE b.closed_at IS NULL AND (?1 IS NULL OR b.pool = ?1) ORDER BY b.seq DESC LIMIT ?2

-- name: bindings_closed
SELECT /*binding_columns*/ FROM fairlane_binding b LEFT JOIN fairlane_job j ON j.seq = b.cleanup
WHERE b.closed_at IS NOT NULL AND (?1 IS NULL OR b.pool = ?1) ORDER BY b.closed_at DESC, b.seq DESC LIMIT ?2

-- name: schedules_read
SELECT name, timetable, job, stored_at, declared_at, last_slot FROM fairlane_schedule ORDER BY name

-- name: find_error
SELECT seq FROM fairlane_outcome WHERE error_group = ? AND seq < ? ORDER BY seq DESC

-- name: sessions_of_worker
SELECT seq FROM fairlane_session WHERE pool = ? AND idx = ?

-- name: find_session
SELECT seq FROM fairlane_outcome WHERE session = ? AND seq < ? ORDER BY seq DESC

-- name: find_session_live
SELECT seq FROM fairlane_live INDEXED BY fairlane_live_running WHERE session = ? AND seq < ? ORDER BY seq DESC

-- name: find_inbox
SELECT seq FROM fairlane_live WHERE inbox = ? AND inbox <> '' AND state < 3 AND seq < ? ORDER BY seq DESC

-- name: find_sticky
SELECT seq FROM fairlane_job WHERE sticky = ? AND seq < ? ORDER BY seq DESC

-- name: find_lane
SELECT seq FROM fairlane_job WHERE queue = ? AND lane = ? AND seq < ? ORDER BY seq DESC

-- name: find_task
SELECT seq FROM fairlane_job WHERE task = ? AND seq < ? ORDER BY seq DESC

-- name: find_queue
SELECT seq FROM fairlane_job WHERE queue = ? AND seq < ? ORDER BY seq DESC

-- name: find_completed
SELECT seq FROM fairlane_outcome WHERE state = 4 AND seq < ? ORDER BY seq DESC

-- name: find_failed
SELECT seq FROM fairlane_outcome WHERE state = 5 AND state > 4 AND seq < ? ORDER BY seq DESC

-- name: find_cancelled
SELECT seq FROM fairlane_outcome WHERE state = 6 AND state > 4 AND seq < ? ORDER BY seq DESC

-- name: find_pending
-- Nearly all live jobs are pending, so they are found by walking the table.
SELECT seq FROM fairlane_live WHERE state IN (0, 2) AND seq < ? ORDER BY seq DESC

-- name: find_scheduled
SELECT seq FROM fairlane_live WHERE due IS NOT NULL AND state = 1 AND seq < ? ORDER BY seq DESC

-- name: find_running
-- What runs is at most what the fleet has slots for, so sorting it is cheap.
SELECT seq FROM fairlane_live INDEXED BY fairlane_live_running WHERE session IS NOT NULL AND seq < ?1
UNION ALL SELECT seq FROM fairlane_live WHERE gate = 4 AND gate > 0 AND seq < ?1 ORDER BY 1 DESC

-- name: find_all
SELECT seq FROM fairlane_job WHERE seq < ? ORDER BY seq DESC
