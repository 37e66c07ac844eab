-- name: read_jobs
SELECT * FROM fairlane.read_jobs($1::text[])

-- name: read_page
SELECT * FROM fairlane.read_jobs(NULL, fairlane.read_page($1, $2, $3, $4, $5, $6, $7, $8, $9))

-- name: read_standings
SELECT fairlane.read_standings($1::text[], $2, $3, $4, $5, $6, $7)

-- name: read_service
-- What it takes to tell when a queue has room again: how long its jobs take, who serves it, and for a class ($3) how many
-- lanes have claimable jobs, counted up to $4.
SELECT q.declared, q.override, fairlane.read_seconds(q.id),
    (SELECT array_agg(w) FROM fairlane.read_workers(q.name, $1::double precision) w),
    (SELECT count(*) FROM (SELECT 1 FROM fairlane.domains d JOIN fairlane.line f ON f.domain = d.id
        WHERE d.inbox = '' AND d.class = $3::integer AND d.queue = q.id AND f.tag >= d.clock LIMIT $4) x)
FROM fairlane.queue q WHERE q.name = $2::text

-- name: read_queues
SELECT * FROM fairlane.read_queues($1)

-- name: read_lanes
-- Counts the jobs of every lane, for a person.
SELECT q.declared, q.override, (SELECT json_agg(json_build_array(x.lane, x.pending, x.running)) FROM (
    SELECT j.lane, count(*) FILTER (WHERE l.state < 3) AS pending, count(*) FILTER (WHERE l.state = 3) AS running
    FROM fairlane.live l JOIN fairlane.job j ON j.seq = l.seq WHERE l.queue = q.id AND l.state >= 2
    GROUP BY j.lane ORDER BY 2 DESC, 3 DESC, j.lane COLLATE "C" NULLS FIRST LIMIT $2) x)
FROM fairlane.queue q WHERE q.name = $1::text

-- name: read_sessions
SELECT * FROM fairlane.read_sessions($1, $2)

-- name: read_bindings
SELECT * FROM fairlane.read_bindings($1, $2, $3)

-- name: read_leader
SELECT l.term, l.session, l.lease,
    l.expires - coalesce($1::double precision, extract(epoch FROM clock_timestamp())::double precision)
FROM fairlane.leader l WHERE l.session IS NOT NULL

-- name: read_schedules
SELECT s.name, s.timetable, s.job, s.stored_at, s.declared_at, s.last_slot FROM fairlane.schedule s
ORDER BY s.name COLLATE "C"
