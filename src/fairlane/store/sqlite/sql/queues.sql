-- name: settings_epoch
SELECT value FROM fairlane_counter WHERE name = 'settings'

-- name: settings_changed
UPDATE fairlane_counter SET value = value + 1 WHERE name = 'settings'

-- name: queue_by_name
SELECT id, name, version, declared, override FROM fairlane_queue WHERE name = ?

-- name: queue_by_id
SELECT id, name, version, declared, override FROM fairlane_queue WHERE id = ?

-- name: queue_insert
INSERT INTO fairlane_queue (name) VALUES (?)

-- name: queue_ids
SELECT id FROM fairlane_queue

-- name: queue_configure
UPDATE fairlane_queue SET version = ?, declared = ?, override = ? WHERE id = ?

-- name: queue_count_insert
INSERT INTO fairlane_queue_count (queue, class) VALUES (?, ?)

-- name: queue_count_add
UPDATE fairlane_queue_count SET scheduled = scheduled + ?, pending = pending + ?, running = running + ?,
    slotless = slotless + ?, completed = completed + ?, failed = failed + ?, cancelled = cancelled + ?
WHERE queue = ? AND class = ?

-- name: queue_load
SELECT sum(scheduled + pending) FROM fairlane_queue_count WHERE queue = ?

-- name: queue_running
SELECT class, running - slotless FROM fairlane_queue_count WHERE queue = ?

-- name: service_times
-- Run times of the last completed jobs, for a median.
SELECT finished_at - started_at FROM fairlane_outcome
WHERE queue = ? AND state = STATE.COMPLETED AND started_at IS NOT NULL ORDER BY finished_at DESC LIMIT 101

-- name: lane_by_id
SELECT id, queue, key, places, ordered, granted FROM fairlane_lane WHERE id = ?

-- name: lane_by_key
SELECT id, queue, key, places, ordered, granted FROM fairlane_lane WHERE queue = ? AND key = ?

-- name: lane_insert
INSERT INTO fairlane_lane (queue, key, places, ordered) VALUES (?, ?, ?, ?)

-- name: lane_save
UPDATE fairlane_lane SET granted = ? WHERE id = ?

-- name: lane_resize
UPDATE fairlane_lane SET places = ?, ordered = ? WHERE id = ?

-- name: lane_rerank
-- Waiting jobs only: a running job gets its rank when it is put back.
UPDATE fairlane_active_job SET rank = CASE ?2 WHEN 1 THEN 0 ELSE class END
WHERE seq IN (SELECT seq FROM fairlane_active_job WHERE lane = ?1 AND granted = 0 UNION ALL SELECT seq
    FROM (/*lane_holders*/))

-- name: lane_holders
-- Jobs that hold a place of a lane (?1) and have not started: claimable, gated, or kept for a retry. Written so that a
-- grant, which is on the hot path, has to update no more than one index.
SELECT l.seq, l.rank, l.arrival FROM fairlane_lane n CROSS JOIN fairlane_domain d ON d.queue = n.queue
CROSS JOIN fairlane_flow f ON f.domain = d.id AND f.lane = n.key CROSS JOIN fairlane_active_job l ON l.flow = f.id
WHERE n.id = ?1 AND l.lane = ?1 AND l.session IS NULL
UNION ALL SELECT l.seq, l.rank, l.arrival FROM fairlane_active_job l
WHERE l.lane = ?1 AND (l.due IS NOT NULL OR l.gate > GATE.NONE) AND l.granted = 1

-- name: lane_delete
DELETE FROM fairlane_lane WHERE id = ?

-- name: lane_forget
-- The jobs without a place are expired turns; `promote` cancels them.
UPDATE fairlane_active_job SET lane = NULL, granted = 1, granted_at = NULL WHERE seq IN (
    SELECT seq FROM fairlane_active_job WHERE lane = ?1 AND granted = 0 UNION ALL SELECT seq FROM (/*lane_holders*/))

-- name: lane_forget_running
UPDATE fairlane_active_job SET lane = NULL WHERE session IS NOT NULL AND lane = ?

-- name: lane_next
-- The next job in line for a place. An expired job gets none; `promote` cancels it.
SELECT lane, seq, class, state, gate, inbox, arrival, waiter FROM fairlane_active_job
WHERE lane = ? AND granted = 0 AND (expires_at IS NULL OR expires_at > ?) ORDER BY rank, arrival LIMIT 1

-- name: lane_any
-- The next job of a lane whose limit was removed.
SELECT lane, seq, class, state, gate, inbox, arrival, waiter FROM fairlane_active_job
WHERE lane = ? AND granted = 0 AND (waiter IS NULL OR expires_at IS NULL OR expires_at > ?) ORDER BY rank, arrival LIMIT 1

-- name: lanes_with_next
-- Several lanes at once, each with the next job in line for a place and the flow that job will join, if it exists.
SELECT n.id, n.queue, n.places, n.granted, l.seq, l.state, l.gate, l.inbox, l.arrival, l.waiter, f.id, f.finish, f.tag,
    f.head, d.clock
FROM json_each(?1) w CROSS JOIN fairlane_lane n ON n.id = w.value
LEFT JOIN fairlane_active_job l ON l.seq = (SELECT x.seq FROM fairlane_active_job x WHERE x.lane = n.id AND x.granted = 0
    AND (x.expires_at IS NULL OR x.expires_at > ?2) ORDER BY x.rank, x.arrival LIMIT 1)
LEFT JOIN fairlane_domain d ON d.inbox = l.inbox AND d.class = l.class AND d.queue = n.queue
LEFT JOIN fairlane_flow f ON f.domain = d.id AND f.lane = n.key

-- name: lane_weakest
-- The last jobs, in order, that hold a place and have not started: at most ?2.
SELECT /*record_columns*/ FROM (SELECT seq FROM (/*lane_holders*/) ORDER BY rank DESC, arrival DESC LIMIT ?2) h
CROSS JOIN fairlane_active_job l ON l.seq = h.seq CROSS JOIN fairlane_job j ON j.seq = l.seq

-- name: lane_others
-- Jobs that wait for a place of a lane, in order.
SELECT lane, seq, class, state, gate, inbox, arrival, waiter FROM fairlane_active_job
WHERE lane = ? AND granted = 0 AND (expires_at IS NULL OR expires_at > ?) ORDER BY rank, arrival LIMIT 10000

-- name: lane_kept
SELECT /*record_columns*/ FROM fairlane_active_job l CROSS JOIN fairlane_job j ON j.seq = l.seq
WHERE l.lane = ? AND (l.due IS NOT NULL OR l.gate > GATE.NONE) AND l.due IS NOT NULL

-- name: lane_occupied
SELECT 1 FROM fairlane_active_job WHERE lane = ? AND granted = 0 LIMIT 1

-- name: lane_load
-- Waiting jobs of a lane: those without a place, the claimable ones, and the gated ones.
SELECT (SELECT count(*) FROM (SELECT 1 FROM fairlane_lane n CROSS JOIN fairlane_active_job l ON l.lane = n.id
        WHERE n.queue = ?1 AND n.key = ?2 AND l.granted = 0 LIMIT ?3))
    + (SELECT count(*) FROM (SELECT 1 FROM fairlane_domain d CROSS JOIN fairlane_flow f ON f.domain = d.id AND f.lane = ?2
        CROSS JOIN fairlane_active_job l ON l.flow = f.id WHERE d.queue = ?1 AND l.session IS NULL LIMIT ?3))
    + (SELECT count(*) FROM (SELECT 1 FROM fairlane_active_job l CROSS JOIN fairlane_job j ON j.seq = l.seq
        WHERE l.gate > GATE.NONE AND l.granted = 1 AND l.queue = ?1 AND j.lane = ?2 LIMIT ?3))

-- name: lanes_with_room
SELECT id FROM fairlane_lane WHERE granted < places
AND EXISTS (SELECT 1 FROM fairlane_active_job l WHERE l.lane = fairlane_lane.id AND l.granted = 0) LIMIT ?

-- name: lanes_of_queue
SELECT id FROM fairlane_lane WHERE queue = ?

-- name: unlimited_lanes_of_queue
SELECT DISTINCT j.lane FROM fairlane_active_job l JOIN fairlane_job j ON j.seq = l.seq
WHERE l.queue = ? AND l.lane IS NULL AND l.state >= STATE.PENDING AND j.lane IS NOT NULL

-- name: unlimited_records_of_lane
SELECT /*record_columns*/ FROM fairlane_job j CROSS JOIN fairlane_active_job l ON l.seq = j.seq
WHERE j.queue = ? AND j.lane = ? AND l.lane IS NULL AND l.state >= STATE.PENDING
ORDER BY l.state DESC, l.arrival

-- name: grants_idle
-- Places of unordered lanes that are held by a job that does not start, while another job waits for one.
SELECT l.seq FROM fairlane_active_job l CROSS JOIN fairlane_lane n ON n.id = l.lane
WHERE l.granted_at <= ? AND n.ordered = 0 AND EXISTS (SELECT 1 FROM fairlane_active_job x WHERE x.lane = n.id
    AND x.granted = 0)
ORDER BY l.granted_at LIMIT ? OFFSET ?

-- name: grants_idle_count
SELECT count(*) FROM fairlane_active_job l CROSS JOIN fairlane_lane n ON n.id = l.lane
WHERE l.granted_at <= ? AND n.ordered = 0 AND EXISTS (SELECT 1 FROM fairlane_active_job x WHERE x.lane = n.id
    AND x.granted = 0)

-- name: inboxes_waiting
-- Workers that have claimable jobs of a queue in their inbox.
SELECT DISTINCT d.inbox FROM fairlane_domain d WHERE d.queue = ? AND d.inbox <> ''
AND EXISTS (SELECT 1 FROM fairlane_flow f WHERE f.domain = d.id AND f.tag IS NOT NULL)

-- name: domain_get
SELECT id, clock FROM fairlane_domain WHERE inbox = ? AND class = ? AND queue = ?

-- name: domain_clock
SELECT clock FROM fairlane_domain WHERE id = ?

-- name: domains_of_inbox
SELECT d.id, d.queue, d.clock FROM fairlane_domain d WHERE d.inbox = ? AND d.class = ?
AND EXISTS (SELECT 1 FROM fairlane_flow f WHERE f.domain = d.id AND f.tag IS NOT NULL)

-- name: domains_of_known
-- The same for declined jobs, in queues that a session (?1) serves and of tasks that it knows.
SELECT d.id, d.queue, d.clock FROM fairlane_unknown_task u CROSS JOIN fairlane_session s ON s.seq = ?1
CROSS JOIN fairlane_domain d ON d.inbox = '~' || u.task || '/' AND d.class = ?2 AND d.queue = u.queue
WHERE EXISTS (SELECT 1 FROM fairlane_flow f WHERE f.domain = d.id AND f.tag IS NOT NULL)
AND (SELECT q.name FROM fairlane_queue q WHERE q.id = u.queue) IN (SELECT n.value
    FROM json_each(iif(json_valid(s.queues), s.queues, '[]')) n)
AND (s.task_set IS NULL OR u.task IN (SELECT n.value FROM fairlane_task_set t
    CROSS JOIN json_each(iif(json_valid(t.tasks), t.tasks, '[]')) n WHERE t.id = s.task_set))

-- name: domain_insert
INSERT INTO fairlane_domain (inbox, class, queue) VALUES (?, ?, ?)

-- name: domain_save
UPDATE fairlane_domain SET clock = ? WHERE id = ?

-- name: domains_idle
-- Domains of classes without any job: even jobs that wait for a place of their lane have an order to keep.
SELECT d.id, max(f.finish) FROM fairlane_domain d JOIN fairlane_flow f ON f.domain = d.id
JOIN fairlane_queue_count t ON t.queue = d.queue AND t.class = d.class AND t.pending + t.running = 0
GROUP BY d.id HAVING max(f.finish) > d.clock

-- name: flow_get
SELECT id, finish, tag, head FROM fairlane_flow WHERE domain = ? AND lane = ?

-- name: flow_by_id
SELECT f.id, f.finish, f.tag, f.head, d.queue, d.class, d.inbox
FROM fairlane_flow f JOIN fairlane_domain d ON d.id = f.domain WHERE f.id = ?

-- name: flow_insert
INSERT INTO fairlane_flow (domain, lane) VALUES (?, ?)

-- name: flow_save
UPDATE fairlane_flow SET finish = ?, tag = ?, head = ? WHERE id = ?

-- name: flow_head
SELECT min(arrival) FROM fairlane_active_job WHERE flow = ? AND session IS NULL

-- name: flows_next
-- The first flows in fair order, each with its next job and the arrival of the one after it.
SELECT f.tag, f.id, f.lane, (SELECT n.arrival FROM fairlane_active_job n
    WHERE n.flow = f.id AND n.arrival > f.head AND n.session IS NULL ORDER BY n.arrival LIMIT 1),
    /*claim_columns*/
FROM fairlane_flow f CROSS JOIN fairlane_active_job l ON l.flow = f.id AND l.arrival = f.head
LEFT JOIN fairlane_job j ON j.seq = l.seq
WHERE f.domain = ? AND f.tag IS NOT NULL ORDER BY f.tag, f.head LIMIT ?

-- name: claim_columns
l.seq, l.arrival, l.class, l.expires_at, l.fence, l.attempt, l.suspect, j.cost, j.id, j.task, j.lane, j.payload, j.retries,
j.backoff, j.timeout, j.kind, j.sticky, j.headers, l.lane IS NOT NULL, l.started_at, j.enqueued_at, j.delay, j.run_at

-- name: flow_jobs
-- Includes jobs whose identity is missing: they are started so that they can be failed, and do not block others.
SELECT /*claim_columns*/ FROM fairlane_active_job l LEFT JOIN fairlane_job j ON j.seq = l.seq
WHERE l.flow = ? AND l.arrival >= ? AND l.session IS NULL ORDER BY l.arrival LIMIT ?

-- name: claimed_again
SELECT q.name, l.class, /*claim_columns*/ FROM fairlane_active_job l LEFT JOIN fairlane_job j ON j.seq = l.seq
CROSS JOIN fairlane_queue q ON q.id = l.queue WHERE l.session = ? AND l.claim = ? ORDER BY l.class, l.arrival

-- name: flow_started
UPDATE fairlane_flow SET finish = ?, tag = ?, head = ? WHERE id = ?

-- name: flows_tidy
DELETE FROM fairlane_flow WHERE id IN (SELECT f.id FROM fairlane_domain d JOIN fairlane_flow f ON f.domain = d.id
    WHERE f.tag IS NULL AND f.finish <= d.clock LIMIT ?)
