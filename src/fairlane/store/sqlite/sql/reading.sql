-- name: job_columns
-- The order that `reading.job_of` expects.
j.seq, j.id, j.task, q.name, j.kind, j.class, j.lane, j.cost, j.payload, j.headers, j.retries, j.backoff, j.timeout, j.uniq,
j.pool, j.sticky, j.direct, j.retry_of, p.id, j.enqueued_at, j.enqueued_at + j.expires, j.progress, j.attempts,
o.state, o.reason, o.result, o.error, o.error_group, o.move, o.finished_at,
l.state, l.inbox, l.due, l.cancel, l.suspect,
coalesce(l.arrival, o.arrival), coalesce(l.attempt, o.attempt), coalesce(l.fence, o.fence),
coalesce(l.started_at, o.started_at), coalesce(l.refused, o.refused), s.id, s.pool, s.idx, s.host,
j.delay, j.run_at

-- name: job_tables
LEFT JOIN fairlane_queue q ON q.id = j.queue LEFT JOIN fairlane_active_job l ON l.seq = j.seq
LEFT JOIN fairlane_outcome o ON o.seq = j.seq LEFT JOIN fairlane_session s ON s.seq = coalesce(l.session, o.session)
LEFT JOIN fairlane_job p ON p.seq = j.parent

-- name: jobs_by_ids
SELECT /*job_columns*/ FROM json_each(?) w CROSS JOIN fairlane_job j ON j.id = w.value /*job_tables*/

-- name: jobs_by_seqs
SELECT /*job_columns*/ FROM json_each(?) w CROSS JOIN fairlane_job j ON j.seq = w.value /*job_tables*/ ORDER BY j.seq DESC

-- name: place_ready
-- Claimable jobs of a flow (?1) before an arrival (?2): its entries from the head on, counted in a covering index, minus
-- the running ones, which are few.
SELECT (SELECT count(*) FROM fairlane_active_job l WHERE l.flow = f.id AND l.arrival >= f.head AND l.arrival < ?2)
    - (SELECT count(*) FROM fairlane_active_job r INDEXED BY fairlane_active_job_running
        WHERE r.session IS NOT NULL AND r.flow = f.id AND r.arrival >= f.head AND r.arrival < ?2)
FROM fairlane_flow f WHERE f.id = ?1

-- name: place_waiting
-- Jobs of a limited lane without a place (none of them runs): of a rank, those before an arrival.
SELECT count(*) FROM fairlane_active_job WHERE lane = ? AND granted = 0 AND rank = ? AND arrival < ?

-- name: place_holding
-- Jobs of a limited lane that hold a place while gated or until their retry.
SELECT count(*) FROM fairlane_active_job
WHERE lane = ? AND (due IS NOT NULL OR gate > GATE.NONE) AND granted = 1 AND rank = ? AND arrival < ?
    AND state < STATE.RUNNING

-- name: place_gated
-- Gated jobs of a lane without a limit.
SELECT count(*) FROM fairlane_active_job l CROSS JOIN fairlane_job j ON j.seq = l.seq
WHERE l.gate > GATE.NONE AND l.queue = ? AND j.lane IS ? AND l.class = ? AND l.arrival < ?

-- name: flows_of_lane
SELECT f.id, d.class FROM fairlane_domain d CROSS JOIN fairlane_flow f ON f.domain = d.id
WHERE d.queue = ? AND f.lane = ? AND f.tag IS NOT NULL

-- name: flows_active
SELECT count(*) FROM (SELECT 1 FROM fairlane_domain d CROSS JOIN fairlane_flow f ON f.domain = d.id
    WHERE d.inbox = ? AND d.class = ? AND d.queue = ? AND f.tag IS NOT NULL LIMIT ?)

-- name: competing_lanes_ready
-- Other lanes of a domain (?1) that have claimable jobs, in fair order, each with the cost of the next job, the places of a
-- limited lane, and how many jobs wait (counted up to ?4), those without a place included.
SELECT f.lane, f.tag, j.cost, n.places,
    (SELECT count(*) FROM (SELECT 1 FROM fairlane_active_job r WHERE r.flow = f.id AND r.session IS NULL LIMIT ?4))
    + (SELECT count(*) FROM (SELECT 1 FROM fairlane_active_job w WHERE w.lane = n.id AND w.granted = 0
        AND w.rank = CASE n.ordered WHEN 1 THEN 0 ELSE l.class END LIMIT ?4))
FROM fairlane_flow f CROSS JOIN fairlane_active_job l ON l.flow = f.id AND l.arrival = f.head
CROSS JOIN fairlane_job j ON j.seq = l.seq LEFT JOIN fairlane_lane n ON n.queue = ?2 AND n.key = f.lane
WHERE f.domain = ?1 AND f.tag IS NOT NULL AND f.lane <> ?3 ORDER BY f.tag, f.head LIMIT ?5

-- name: competing_lanes_blocked
-- Limited lanes at their limit, which have no claimable job at the moment: their finish time in a domain (?1), their places,
-- and how many jobs of a class (?5) wait, counted up to ?4.
SELECT n.key, f.finish, n.places, (SELECT count(*) FROM (SELECT 1 FROM fairlane_active_job w WHERE w.lane = n.id
    AND w.granted = 0
    AND w.rank = CASE n.ordered WHEN 1 THEN 0 ELSE ?5 END LIMIT ?4))
FROM (SELECT id, key, places, ordered FROM fairlane_lane WHERE queue = ?2 AND key <> ?3 LIMIT ?7) n
LEFT JOIN fairlane_flow f ON f.domain = ?1 AND f.lane = n.key WHERE f.tag IS NULL LIMIT ?6

-- name: lanes_limited
SELECT count(*) FROM (SELECT 1 FROM fairlane_lane WHERE queue = ? LIMIT ?)

-- name: flows_before
-- Flows of the same domain whose next job starts before the next job of this flow.
SELECT count(*) FROM (SELECT 1 FROM fairlane_flow m CROSS JOIN fairlane_flow f ON f.domain = m.domain
    WHERE m.id = ? AND f.tag IS NOT NULL AND (f.tag < m.tag OR (f.tag = m.tag AND f.head < m.head)) LIMIT ?)

-- name: lane_retrying
-- Until when an ordered lane waits for a retry.
SELECT min(due) FROM fairlane_active_job WHERE lane = ? AND (due IS NOT NULL OR gate > GATE.NONE) AND due IS NOT NULL
    AND granted = 1

-- name: lane_awaits
-- The task of a job that holds a place of a lane and was declined.
SELECT j.task FROM (/*lane_holders*/) h CROSS JOIN fairlane_active_job l ON l.seq = h.seq
CROSS JOIN fairlane_declined d ON d.seq = l.seq AND d.fence = l.fence CROSS JOIN fairlane_job j ON j.seq = l.seq
WHERE l.session IS NULL ORDER BY l.arrival LIMIT 1

-- name: workers_of_queue
SELECT s.slots, s.reserved_high, s.reserved_normal, /*loads*/
FROM fairlane_session s WHERE s.state = 'live' AND s.kind = 'worker' AND s.boot = ? AND s.expires > ?
AND EXISTS (SELECT 1 FROM json_each(iif(json_valid(s.queues), s.queues, '[]')) n WHERE n.value = ?)

-- name: worker_at
SELECT s.slots, s.reserved_high, s.reserved_normal, /*loads*/ FROM fairlane_session s
WHERE s.pool = ? AND s.idx = ? AND s.idx IS NOT NULL AND s.state IN ('live', 'stopping') AND s.boot = ? AND s.expires > ?

-- name: knows_task
-- Whether a session `s` knows the task ?1, or did not report its tasks.
(s.task_set IS NULL OR EXISTS (SELECT 1 FROM fairlane_task_set t
    CROSS JOIN json_each(iif(json_valid(t.tasks), t.tasks, '[]')) n
    WHERE t.id = s.task_set AND n.value = ?1))

-- name: task_known
SELECT EXISTS (SELECT 1 FROM fairlane_session s WHERE s.state = 'live' AND s.kind = 'worker' AND s.boot = ?2
    AND s.expires > ?3
    AND EXISTS (SELECT 1 FROM json_each(iif(json_valid(s.queues), s.queues, '[]')) q WHERE q.value = ?4) AND /*knows_task*/)

-- name: task_known_at
SELECT EXISTS (SELECT 1 FROM fairlane_session s WHERE s.pool = ?4 AND s.idx = ?5 AND s.idx IS NOT NULL
    AND s.state IN ('live', 'stopping') AND s.boot = ?2 AND s.expires > ?3 AND /*knows_task*/)

-- name: line_columns
-- The order of the fields of `LineRow`.
l.seq, j.id, j.task, l.state, l.class, j.enqueued_at, l.attempt, l.started_at, l.arrival

-- name: line_running
-- Running jobs of a lane (?2, NULL for none) of a queue (?1): at most as many as there are slots. Parents of broadcasts have
-- no lane.
SELECT /*line_columns*/ FROM fairlane_active_job l INDEXED BY fairlane_active_job_running
    CROSS JOIN fairlane_job j ON j.seq = l.seq
WHERE l.session IS NOT NULL AND l.queue = ?1 AND j.lane IS ?2
UNION ALL SELECT /*line_columns*/ FROM fairlane_active_job l CROSS JOIN fairlane_job j ON j.seq = l.seq
WHERE l.gate > GATE.NONE AND l.gate = GATE.PARENT AND l.queue = ?1 AND j.lane IS ?2

-- name: line_ready
-- Claimable jobs of a flow (?1) after an arrival (?2).
SELECT /*line_columns*/ FROM fairlane_flow f CROSS JOIN fairlane_active_job l ON l.flow = f.id AND l.arrival >= f.head
    AND l.arrival > ?2
CROSS JOIN fairlane_job j ON j.seq = l.seq WHERE f.id = ?1 AND l.session IS NULL ORDER BY l.arrival LIMIT ?3

-- name: line_waiting
-- Jobs of a limited lane without a place: of a rank, those after an arrival.
SELECT /*line_columns*/ FROM fairlane_active_job l CROSS JOIN fairlane_job j ON j.seq = l.seq
WHERE l.lane = ? AND l.granted = 0 AND l.rank = ? AND l.arrival > ? ORDER BY l.arrival LIMIT ?

-- name: line_holding
-- Jobs of a limited lane that hold a place while gated or until their retry: no more than the lane has places.
SELECT /*line_columns*/ FROM fairlane_active_job l CROSS JOIN fairlane_job j ON j.seq = l.seq
WHERE l.lane = ? AND (l.due IS NOT NULL OR l.gate > GATE.NONE) AND l.granted = 1 AND l.state < STATE.RUNNING

-- name: line_gated
-- Gated jobs of a lane without a limit, among at most ?3 such jobs of the queue.
SELECT /*line_columns*/ FROM (SELECT seq FROM fairlane_active_job WHERE gate > GATE.NONE
    AND gate IN (GATE.UNBOUND, GATE.CLEANUP) AND queue = ?1 AND state = STATE.PENDING
    AND lane IS NULL LIMIT ?3) g CROSS JOIN fairlane_active_job l ON l.seq = g.seq CROSS JOIN fairlane_job j ON j.seq = l.seq
WHERE j.lane IS ?2

-- name: line_gated_count
SELECT count(*) FROM (SELECT 1 FROM fairlane_active_job WHERE gate > GATE.NONE AND gate IN (GATE.UNBOUND, GATE.CLEANUP)
    AND queue = ? AND state = STATE.PENDING
    AND lane IS NULL LIMIT ?)

-- name: failed_newest
-- The newest failed jobs.
SELECT seq FROM fairlane_outcome WHERE state = STATE.FAILED AND state > STATE.COMPLETED ORDER BY seq DESC LIMIT ?

-- name: failed_newest_of_queue
SELECT seq FROM fairlane_outcome WHERE queue = ? AND state = STATE.FAILED ORDER BY finished_at DESC LIMIT ?

-- name: failed_jobs
SELECT j.task, coalesce(o.error_group, o.reason), o.reason, o.finished_at, o.seq
FROM json_each(?) w CROSS JOIN fairlane_outcome o ON o.seq = w.value CROSS JOIN fairlane_job j ON j.seq = o.seq

-- name: failed_example
SELECT j.id, substr(o.error, -?2) FROM fairlane_outcome o CROSS JOIN fairlane_job j ON j.seq = o.seq WHERE o.seq = ?1

-- name: declined_tasks
SELECT q.name, j.task, count(*), min(d.since) FROM (
    SELECT x.seq, x.since, l.queue FROM fairlane_declined x CROSS JOIN fairlane_active_job l ON l.seq = x.seq
    AND l.fence = x.fence
    WHERE l.state <> STATE.RUNNING ORDER BY x.since LIMIT ?) d
CROSS JOIN fairlane_job j ON j.seq = d.seq CROSS JOIN fairlane_queue q ON q.id = d.queue
GROUP BY q.name, j.task ORDER BY min(d.since), q.name, j.task LIMIT ?

-- name: queues_read
SELECT id, name, version, declared, override FROM fairlane_queue ORDER BY name

-- name: oldest_in_domain
-- Of the next jobs of the first flows, the one that arrived first.
SELECT l.arrival, l.seq FROM (SELECT id, min(head) AS head FROM (
    SELECT id, head FROM fairlane_flow WHERE domain = ?1 AND tag IS NOT NULL ORDER BY tag, head LIMIT ?2)) f
CROSS JOIN fairlane_active_job l ON l.flow = f.id AND l.arrival = f.head WHERE l.session IS NULL

-- name: oldest_in_lanes
-- The first job that waits for a place of a lane.
SELECT min(a.arrival), a.seq FROM (SELECT id FROM fairlane_lane WHERE queue = ?1 LIMIT ?2) n
CROSS JOIN (SELECT CLASS.HIGH AS rank UNION ALL SELECT CLASS.NORMAL UNION ALL SELECT CLASS.LOW) r
    CROSS JOIN fairlane_active_job a ON a.seq = (
    SELECT w.seq FROM fairlane_active_job w WHERE w.lane = n.id AND w.granted = 0 AND w.rank = r.rank
    ORDER BY w.arrival LIMIT 1)
WHERE a.state = STATE.PENDING

-- name: oldest_gated
-- The first job of each queue that waits unbound or for a clean-up.
SELECT queue, min(arrival), seq FROM (SELECT queue, arrival, seq FROM fairlane_active_job
    WHERE gate > GATE.NONE AND gate < GATE.UNADMITTED AND state = STATE.PENDING AND arrival IS NOT NULL
    ORDER BY gate, inbox, arrival LIMIT ?) GROUP BY queue

-- name: oldest_of_lane
-- The first job of each flow of a lane (?2, '' for none) of a queue (?1), and the first ones that wait for a place or hold one.
SELECT l.arrival, l.seq FROM fairlane_domain d CROSS JOIN fairlane_flow f ON f.domain = d.id AND f.lane = ?2
CROSS JOIN fairlane_active_job l ON l.flow = f.id AND l.arrival = f.head WHERE d.queue = ?1 AND f.tag IS NOT NULL
    AND l.session IS NULL
UNION ALL SELECT a.arrival, a.seq FROM fairlane_lane n
CROSS JOIN (SELECT CLASS.HIGH AS rank UNION ALL SELECT CLASS.NORMAL UNION ALL SELECT CLASS.LOW) r
    CROSS JOIN fairlane_active_job a ON a.seq = (
    SELECT w.seq FROM fairlane_active_job w WHERE w.lane = n.id AND w.granted = 0 AND w.rank = r.rank
    ORDER BY w.arrival LIMIT 1)
WHERE n.queue = ?1 AND n.key = ?2 AND a.state = STATE.PENDING
UNION ALL SELECT l.arrival, l.seq FROM fairlane_lane n CROSS JOIN fairlane_active_job l ON l.lane = n.id
WHERE n.queue = ?1 AND n.key = ?2 AND (l.due IS NOT NULL OR l.gate > GATE.NONE) AND l.granted = 1 AND l.state = STATE.PENDING

-- name: oldest_gated_of_lanes
-- The first job of each lane of a queue (?1), among at most ?2 jobs outside limited lanes that wait unbound or for a clean-up.
SELECT coalesce(j.lane, ''), min(g.arrival), g.seq FROM (SELECT seq, arrival FROM fairlane_active_job
    WHERE gate > GATE.NONE AND gate IN (GATE.UNBOUND, GATE.CLEANUP)
    AND queue = ?1 AND state = STATE.PENDING AND lane IS NULL AND arrival IS NOT NULL LIMIT ?2) g
CROSS JOIN fairlane_job j ON j.seq = g.seq GROUP BY 1

-- name: domains_of_queue
SELECT id FROM fairlane_domain WHERE queue = ?

-- name: waiting_since
SELECT enqueued_at, delay, run_at, attempts FROM fairlane_job WHERE seq = ?

-- name: queue_counts_read
SELECT queue, class, scheduled, pending, running, completed, failed, cancelled FROM fairlane_queue_count

-- name: queue_jobs
-- Waiting jobs of a queue, and running ones that take a slot.
SELECT class, pending, running - slotless FROM fairlane_queue_count WHERE queue = ?

-- name: sessions_read
SELECT /*session_columns*/ FROM fairlane_session ORDER BY seq DESC

-- name: sessions_load
SELECT session, class, count(*) FROM fairlane_active_job WHERE session IS NOT NULL GROUP BY session, class

-- name: backlog_sum
SELECT coalesce(sum(pending), 0) FROM fairlane_queue_count WHERE queue = ?

-- name: backlog_range
SELECT (SELECT min(seq) FROM fairlane_active_job), (SELECT max(seq) FROM fairlane_active_job)

-- name: backlog_sample
-- The lanes ('' for none) of a sample of the waiting jobs of a queue (?3), the most frequent first: ?2 consecutive seqs from
-- each of several starts (?1).
SELECT coalesce(j.lane, ''), count(*) FROM json_each(?1) s CROSS JOIN fairlane_active_job l ON l.seq >= s.value
    AND l.seq < s.value + ?2
CROSS JOIN fairlane_job j ON j.seq = l.seq WHERE l.queue = ?3 AND l.state = STATE.PENDING GROUP BY 1 ORDER BY 2 DESC

-- name: backlog_lanes
-- Lanes of a queue (?1) with claimable jobs or a limit, up to ?2 of each.
SELECT * FROM (SELECT f.lane FROM fairlane_domain d CROSS JOIN fairlane_flow f ON f.domain = d.id
    WHERE d.queue = ?1 AND f.tag IS NOT NULL LIMIT ?2)
UNION SELECT * FROM (SELECT key FROM fairlane_lane WHERE queue = ?1 LIMIT ?2)

-- name: backlog_of_lane
-- Claimable jobs of a lane (?2, '' for none) of a queue (?1) plus those that wait for a place, each counted up to ?3.
SELECT (SELECT count(*) FROM (SELECT 1 FROM fairlane_domain d CROSS JOIN fairlane_flow f ON f.domain = d.id AND f.lane = ?2
        CROSS JOIN fairlane_active_job l ON l.flow = f.id AND l.arrival >= f.head
        WHERE d.queue = ?1 AND f.tag IS NOT NULL AND l.session IS NULL LIMIT ?3))
    + (SELECT count(*) FROM (SELECT 1 FROM fairlane_lane n CROSS JOIN fairlane_active_job l ON l.lane = n.id
    AND l.granted = 0
        WHERE n.queue = ?1 AND n.key = ?2 AND l.state = STATE.PENDING LIMIT ?3))

-- name: backlog_gated
-- Gated jobs by lane, except those already counted as waiting for a place; at most ?2 jobs are read.
SELECT coalesce(j.lane, ''), count(*) FROM (SELECT l.seq FROM fairlane_active_job l WHERE l.gate > GATE.NONE
    AND l.gate IN (GATE.UNBOUND, GATE.CLEANUP)
    AND l.queue = ?1 AND l.state = STATE.PENDING AND (l.lane IS NULL OR l.granted = 1) LIMIT ?2) g
CROSS JOIN fairlane_job j ON j.seq = g.seq GROUP BY 1

-- name: backlog_running
-- Running jobs by lane. Parents of broadcasts have no lane.
SELECT coalesce(j.lane, ''), count(*) FROM fairlane_active_job l INDEXED BY fairlane_active_job_running
    CROSS JOIN fairlane_job j ON j.seq = l.seq
WHERE l.session IS NOT NULL AND l.queue = ?1 GROUP BY 1
UNION ALL SELECT '', count(*) FROM fairlane_active_job l WHERE l.gate > GATE.NONE AND l.gate = GATE.PARENT AND l.queue = ?1

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
SELECT name, timetable, job, stored_at, declared_at, last_slot, ? FROM fairlane_schedule ORDER BY name

-- name: find_error
SELECT seq FROM fairlane_outcome WHERE error_group = ? AND seq < ? ORDER BY seq DESC

-- name: sessions_of_worker
SELECT seq FROM fairlane_session WHERE pool = ? AND idx = ?

-- name: find_session
SELECT seq FROM fairlane_outcome WHERE session = ? AND seq < ? ORDER BY seq DESC

-- name: find_session_active
SELECT seq FROM fairlane_active_job INDEXED BY fairlane_active_job_running WHERE session = ? AND seq < ? ORDER BY seq DESC

-- name: find_inbox
SELECT seq FROM fairlane_active_job WHERE inbox = ? AND inbox <> '' AND state < STATE.RUNNING AND seq < ? ORDER BY seq DESC

-- name: find_sticky
SELECT seq FROM fairlane_job WHERE sticky = ? AND seq < ? ORDER BY seq DESC

-- name: find_lane
SELECT seq FROM fairlane_job WHERE queue = ? AND lane = ? AND seq < ? ORDER BY seq DESC

-- name: find_task
SELECT seq FROM fairlane_job WHERE task = ? AND seq < ? ORDER BY seq DESC

-- name: find_queue
SELECT seq FROM fairlane_job WHERE queue = ? AND seq < ? ORDER BY seq DESC

-- name: ended_after
SELECT o.ending, j.id, j.task, q.name, j.kind, o.state, o.reason, o.error, o.finished_at FROM fairlane_outcome o
CROSS JOIN fairlane_job j ON j.seq = o.seq CROSS JOIN fairlane_queue q ON q.id = o.queue
WHERE o.ending > ? ORDER BY o.ending LIMIT ?

-- name: find_completed
SELECT seq FROM fairlane_outcome WHERE state = STATE.COMPLETED AND seq < ? ORDER BY seq DESC

-- name: find_failed
SELECT seq FROM fairlane_outcome WHERE state = STATE.FAILED AND state > STATE.COMPLETED AND seq < ? ORDER BY seq DESC

-- name: find_cancelled
SELECT seq FROM fairlane_outcome WHERE state = STATE.CANCELLED AND state > STATE.COMPLETED AND seq < ? ORDER BY seq DESC

-- name: find_pending
-- Nearly all active jobs are pending, so they are found by scanning the table.
SELECT seq FROM fairlane_active_job WHERE state IN (STATE.ARRIVING, STATE.PENDING) AND seq < ? ORDER BY seq DESC

-- name: find_scheduled
SELECT seq FROM fairlane_active_job WHERE due IS NOT NULL AND state = STATE.SCHEDULED AND seq < ? ORDER BY seq DESC

-- name: find_running
-- At most as many jobs run as there are slots, so sorting them is cheap.
SELECT seq FROM fairlane_active_job INDEXED BY fairlane_active_job_running WHERE session IS NOT NULL AND seq < ?1
UNION ALL SELECT seq FROM fairlane_active_job WHERE gate = GATE.PARENT AND gate > GATE.NONE AND seq < ?1 ORDER BY 1 DESC

-- name: find_all
SELECT seq FROM fairlane_job WHERE seq < ? ORDER BY seq DESC
