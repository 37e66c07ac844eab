-- name: read_jobs
SELECT * FROM fairlane.read_jobs($1::text[])

-- name: read_page
SELECT * FROM fairlane.read_jobs(NULL, fairlane.read_page($1, $2, $3, $4, $5, $6, $7, $8, $9))

-- name: read_positions
SELECT fairlane.read_positions($1::text[], $2, $3, $4, $5, $6, $7)

-- name: read_service
-- For an estimate of when a queue has room again: how long its jobs take, which workers serve it, and how many lanes of a class
-- ($3) have claimable jobs, counted up to $4.
SELECT q.declared, q.override, fairlane.read_seconds(q.id),
    (SELECT array_agg(w) FROM fairlane.read_workers(q.name, $1::double precision) w),
    (SELECT count(*) FROM (SELECT 1 FROM fairlane.domains d JOIN fairlane.ready_lane f ON f.domain = d.id
        WHERE d.inbox = '' AND d.class = $3::integer AND d.queue = q.id AND f.tag >= d.clock LIMIT $4) x)
FROM fairlane.queue q WHERE q.name = $2::text

-- name: read_queues
SELECT * FROM fairlane.read_queues($1, $2, $3)

-- name: read_lanes
SELECT * FROM fairlane.read_lanes($1, $2, $3, $4, $5, $6, $7, $8)

-- name: read_lane_line
SELECT * FROM fairlane.read_lane_line($1, $2, $3, $4, $5, $6, $7)

-- name: read_failures
SELECT * FROM fairlane.read_failures($1, $2, $3, $4, $5)

-- name: read_ended
SELECT * FROM fairlane.read_ended($1, $2, $3, $4, $5, $6, $7, $8)

-- name: read_declined
SELECT * FROM fairlane.read_declined($1, $2, $3)

-- name: read_sessions
SELECT * FROM fairlane.read_sessions($1, $2)

-- name: read_task_sets
SELECT t.id, t.tasks FROM fairlane.task_set t WHERE t.id = ANY ($1::text[])

-- name: read_bindings
SELECT * FROM fairlane.read_bindings($1, $2, $3)

-- name: read_leader
SELECT l.term, l.session, l.lease,
    l.expires - coalesce($1::double precision, extract(epoch FROM clock_timestamp())::double precision)
FROM fairlane.leader l WHERE l.session IS NOT NULL

-- name: read_schedules
SELECT s.name, s.timetable, s.job, s.stored_at, s.declared_at, s.last_slot,
    coalesce($1::double precision, extract(epoch FROM clock_timestamp())::double precision)
FROM fairlane.schedule s
ORDER BY s.name COLLATE "C"

-- name: read_tokens
SELECT t.id, t.name, t.digest, t.scopes, t.queues, t.lane_prefix, t.created_at, t.expires_at, t.revoked_at, t.hint
FROM fairlane.token t ORDER BY t.created_at, t.id COLLATE "C"
