"""A PostgreSQL schema full of jobs, written past the store because that takes a second for a hundred thousand.

Most of it is alike and young. What is rare is old: the first fiftieth has its own queue, task, lane, sticky keys, error
group, worker and outcomes, so that a query which scans everything to find it is slow.
"""

from __future__ import annotations

from typing import Any

from fairlane.store.postgresql.statements import placed

OLD = 50
"""One job in this many is of the rare kind; these are the oldest."""
RUNNING = 40

FILL = """
-- Nothing here has statistics, and one bad guess would take minutes.
SET LOCAL enable_nestloop = off;
INSERT INTO fairlane.queue (name, declared) VALUES ('calm', '{{}}'),
    ('crowd', '{{"lanes":[{{"pattern":"bulk","limit":2,"ordered":false}}]}}') ON CONFLICT DO NOTHING;
INSERT INTO fairlane.session (id, kind, state, host, pid, pool, idx, named, queues, slots, started_at, lease, expires)
SELECT name, 'worker', state, 'host', 1, 'default', idx, false, '{{calm,crowd}}', 500, 0, 15, 1e12
FROM (VALUES ('former', 'ended', 7), ('worker', 'live', 1)) v (name, state, idx) ON CONFLICT DO NOTHING;
INSERT INTO fairlane.session_load (session)
SELECT seq FROM fairlane.session WHERE seq NOT IN (SELECT session FROM fairlane.session_load);
INSERT INTO fairlane.domain (queue, class, inbox) SELECT id, 1, '' FROM fairlane.queue ON CONFLICT DO NOTHING;
INSERT INTO fairlane.clock (domain, value)
SELECT id, 1000 FROM fairlane.domain WHERE id NOT IN (SELECT domain FROM fairlane.clock);
INSERT INTO fairlane.lane (queue, key, places, granted, ordered)
SELECT id, 'bulk', 2, 2, false FROM fairlane.queue WHERE name = 'crowd' ON CONFLICT DO NOTHING;

CREATE TEMPORARY TABLE plan ON COMMIT DROP AS
SELECT g AS seq, g <= {jobs} / {old} AS old, g > {ended} AS alive,
    (SELECT id FROM fairlane.queue WHERE name = CASE WHEN g <= {jobs} / {old} THEN 'calm' ELSE 'crowd' END) AS queue,
    CASE WHEN g <= {jobs} / {old} THEN 'quiet' WHEN g % 10 = 0 THEN NULL WHEN g % 2 = 0 THEN 'bulk'
        ELSE 'user:' || g % 999 END AS lane,
    -- Of those that live the oldest run, the next wait for their time, and the rest can start.
    CASE WHEN g <= {ended} + {running} THEN 3 WHEN g <= {ended} + 2 * {running} THEN 1 ELSE 2 END AS state
FROM generate_series((SELECT coalesce(max(seq), 0) + 1 FROM fairlane.job), {jobs}) g;

INSERT INTO fairlane.job (seq, enqueued_at, cost, queue, retries, class, kind, id, task, pool, lane, sticky, payload)
SELECT seq, seq, 1, queue, 3, 1, 0, 'job-' || seq, CASE WHEN old THEN 'rare' ELSE 'task' END, 'default', lane,
    CASE WHEN old THEN 'key-' || seq % 3 END, '[[],{{}}]'
FROM plan;
SELECT fairlane.link_job(j) FROM fairlane.job j JOIN plan p ON p.seq = j.seq;
INSERT INTO fairlane.outcome (seq, session, arrival, started_at, finished_at, queue, attempt, fence, state, move,
    reason, error_group)
SELECT p.seq, s.seq, p.seq, p.seq, p.seq + 1, p.queue, 1, 1, CASE WHEN p.old THEN 4 + p.seq % 3 ELSE 4 END, 0,
    CASE WHEN p.old AND p.seq % 3 = 1 THEN 'error' END, CASE WHEN p.old AND p.seq % 3 = 1 THEN 'broken' END
FROM plan p JOIN fairlane.session s ON s.id = CASE WHEN p.old THEN 'former' ELSE 'worker' END WHERE NOT p.alive;
INSERT INTO fairlane.flow (domain, lane)
SELECT DISTINCT d.id, coalesce(p.lane, '') FROM plan p JOIN fairlane.domain d ON d.queue = p.queue
WHERE p.alive AND p.state = 2 ON CONFLICT DO NOTHING;
INSERT INTO fairlane.lane_pace (flow, domain, tag, head, finish, weight)
SELECT f.id, f.domain, 1000 + min(p.seq) % 7, min(p.seq), 1000, 1.0
FROM plan p JOIN fairlane.domain d ON d.queue = p.queue
JOIN fairlane.flow f ON f.domain = d.id AND f.lane = coalesce(p.lane, '')
WHERE p.alive AND p.state = 2 AND f.id NOT IN (SELECT flow FROM fairlane.lane_pace) GROUP BY f.id;
INSERT INTO fairlane.ready_lane (domain, tag, head, flow)
SELECT domain, tag, head, flow FROM fairlane.lane_pace WHERE tag IS NOT NULL ON CONFLICT DO NOTHING;
INSERT INTO fairlane.active_job (seq, arrival, flow, session, lane, due, cost, queue, class, state, rank, granted,
    fence, attempt, started_at, inbox)
SELECT p.seq, CASE WHEN p.state > 1 THEN p.seq END, CASE WHEN p.state = 2 AND n.id IS NULL THEN f.id END,
    CASE WHEN p.state = 3 THEN s.seq END, n.id, CASE WHEN p.state = 1 THEN 1e10 END, 1, p.queue, 1, p.state, 1,
    n.id IS NULL OR p.state = 3, (p.state = 3)::integer, (p.state = 3)::integer, CASE WHEN p.state = 3 THEN p.seq END,
    CASE WHEN p.state = 1 AND p.seq % 2 = 0 THEN 'default/7' ELSE '' END
FROM plan p JOIN fairlane.session s ON s.id = 'worker'
LEFT JOIN fairlane.lane n ON n.queue = p.queue AND n.key = p.lane AND p.state > 1
LEFT JOIN fairlane.domain d ON d.queue = p.queue
LEFT JOIN fairlane.flow f ON f.domain = d.id AND f.lane = coalesce(p.lane, '')
WHERE p.alive;
-- The first two of the limited lane have its places.
UPDATE fairlane.active_job l SET granted = true, flow = f.id FROM fairlane.flow f
WHERE f.lane = 'bulk' AND l.seq = ANY (ARRAY(
    SELECT w.seq FROM fairlane.active_job w JOIN fairlane.lane n ON n.id = w.lane
    WHERE w.state = 2 ORDER BY w.seq LIMIT 2));
SELECT fairlane.save_extra(l) FROM fairlane.active_job l JOIN plan p ON p.seq = l.seq;
INSERT INTO fairlane.binding (pool, key, idx, state, opened_at, used_at, closed_at)
SELECT CASE WHEN old THEN 'rare' ELSE 'default' END, 'key-' || seq, 1, CASE WHEN old THEN 'open' ELSE 'released' END,
    seq, seq, CASE WHEN NOT old THEN seq END
FROM plan WHERE seq % 10 = 0;
DELETE FROM fairlane.queue_count;
INSERT INTO fairlane.queue_count (queue, class, scheduled, pending, running)
SELECT queue, 1, count(*) FILTER (WHERE state = 1), count(*) FILTER (WHERE state = 2), count(*) FILTER (WHERE state = 3)
FROM fairlane.active_job GROUP BY queue;
SELECT setval(pg_get_serial_sequence('fairlane.job', 'seq'), {jobs});
SELECT setval('fairlane.arrival', {jobs});
"""


async def fill(connection: Any, jobs: int) -> None:
    """Fill the schema up to this number of jobs; the added ones are newer."""
    async with connection.transaction():
        text = FILL.format(jobs=jobs, old=OLD, ended=last_ended(jobs), running=RUNNING)
        await connection.execute(placed(text, "fairlane"))


def last_ended(jobs: int) -> int:
    """The number of the last final job; all later jobs are live."""
    return jobs * 6 // 10
