-- How many jobs could start now: what a dispatcher in front of this store announces to workers.

-- For each queue, class and inbox with claimable jobs, their number up to the slots of all live workers: more could not start.
-- Without `p_queues`, for all queues. Jobs of paused queues and beyond the limit of a queue cannot start and are left out.
CREATE FUNCTION fairlane.read_claimable(p_queues text[], OUT slots integer, OUT queues text[], OUT classes smallint[], OUT inboxes text[],
    OUT jobs integer[])
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_slots integer;
BEGIN
    v_slots := greatest(1, least(10000, (SELECT sum(s.slots) FROM fairlane.session s WHERE s.state = 'live' AND s.slots IS NOT NULL)));
    SELECT array_agg(x.name), array_agg(x.class), array_agg(x.inbox), array_agg(x.jobs) INTO queues, classes, inboxes, jobs
    FROM (
        SELECT q.name, d.class, d.inbox, least(n.jobs, r.room)::integer AS jobs
        FROM fairlane.queue q
        CROSS JOIN LATERAL (SELECT y.id, y.class, y.inbox FROM fairlane.domain y WHERE y.queue = q.id OFFSET 0) d
        CROSS JOIN LATERAL (SELECT count(*) AS jobs FROM (
            SELECT FROM (SELECT y.flow, y.head FROM fairlane.ready_lane y WHERE y.domain = d.id AND y.tag >= fairlane.clock_of(d.id)
                ORDER BY y.tag, y.head LIMIT v_slots) f
            -- From the head of the flow on: before it there may be dead rows of jobs that have started.
            CROSS JOIN LATERAL (SELECT FROM fairlane.active_job y WHERE y.flow = f.flow AND y.flow IS NOT NULL AND y.session IS NULL
                AND y.arrival >= f.head ORDER BY y.arrival LIMIT v_slots) l
            LIMIT v_slots) g) n
        CROSS JOIN LATERAL (SELECT CASE WHEN q.slots IS NULL THEN v_slots
            ELSE q.slots - (SELECT coalesce(sum(t.running - t.slotless), 0) FROM fairlane.queue_count t WHERE t.queue = q.id) END AS room) r
        WHERE NOT q.paused AND (p_queues IS NULL OR q.name = ANY (p_queues)) AND n.jobs > 0 AND r.room > 0) x;
    slots := v_slots;
END $$;
