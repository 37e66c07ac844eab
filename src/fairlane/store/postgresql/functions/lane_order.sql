-- The jobs of one lane in the order in which they start.

-- At least the next `p_count` jobs of a lane (NULL: jobs without one) after a position (`p_rank`, `p_after`), unsorted: running
-- ones (if `p_running`), claimable ones, and in a limited lane those without a place and those that hold one while gated or
-- until their retry. Unless the lane is ordered, jobs of classes below `p_rank` were on earlier pages. Of the gated jobs
-- outside limited lanes, at most `p_whole` are read; `exact`: whether those were all. No row for a queue that does not exist.
CREATE FUNCTION fairlane.read_lane_line(p_queue text, p_lane text, p_running boolean, p_rank integer, p_after bigint,
    p_count integer, p_whole integer)
RETURNS TABLE (declared text, override text, jobs json, exact boolean)
LANGUAGE plpgsql STABLE
SET extra_float_digits = 1
AS $$
DECLARE
    q fairlane.queue;
    n fairlane.lane;
    v_ordered boolean;
    v_after bigint[];              -- by class: the arrival to continue after; NULL: skip the class
    v_seqs bigint[] := '{}';
    v_gated bigint[] := '{}';
BEGIN
    SELECT * INTO q FROM fairlane.queue x WHERE x.name = p_queue;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT * INTO n FROM fairlane.lane x WHERE x.queue = q.id AND x.key = p_lane;
    v_ordered := coalesce(n.ordered, false);
    v_after := ARRAY(SELECT CASE WHEN r.rank > p_rank THEN -1 WHEN r.rank = p_rank THEN p_after END
        FROM (SELECT CASE WHEN v_ordered THEN 0 ELSE c END AS rank, c FROM generate_series(CLASS.HIGH, CLASS.LOW) c) r ORDER BY r.c);
    IF p_running THEN
        v_seqs := ARRAY(SELECT x.seq FROM fairlane.active_job x CROSS JOIN LATERAL (SELECT i.lane FROM fairlane.job i WHERE i.seq = x.seq OFFSET 0) j
                WHERE x.session IS NOT NULL AND x.queue = q.id AND j.lane IS NOT DISTINCT FROM p_lane
            UNION ALL SELECT a.seq FROM fairlane.job_extra a CROSS JOIN LATERAL (SELECT i.queue, i.lane FROM fairlane.job i WHERE i.seq = a.seq OFFSET 0) j
                WHERE a.gate = GATE.PARENT AND j.queue = q.id AND j.lane IS NOT DISTINCT FROM p_lane);
    END IF;
    v_seqs := v_seqs || ARRAY(SELECT r.seq FROM fairlane.domain d
        CROSS JOIN LATERAL (SELECT x.id, x.head FROM fairlane.flows x
            WHERE x.domain = d.id AND x.lane = coalesce(p_lane, '') AND x.tag IS NOT NULL OFFSET 0) f
        CROSS JOIN LATERAL (SELECT x.seq FROM fairlane.active_job x WHERE x.flow = f.id AND x.flow IS NOT NULL AND x.session IS NULL
            AND x.arrival >= f.head AND x.arrival > v_after[d.class + 1] ORDER BY x.flow, x.arrival LIMIT p_count) r
        WHERE d.queue = q.id);
    IF n.id IS NULL THEN
        v_gated := ARRAY(SELECT a.seq FROM fairlane.job_extra a
            CROSS JOIN LATERAL (SELECT x.queue, x.state, x.lane FROM fairlane.active_job x WHERE x.seq = a.seq OFFSET 0) x
            WHERE a.gate IN (GATE.UNBOUND, GATE.CLEANUP) AND x.queue = q.id AND x.state = STATE.PENDING AND x.lane IS NULL LIMIT p_whole);
        v_seqs := v_seqs || ARRAY(SELECT j.seq FROM unnest(v_gated) g (seq) JOIN fairlane.job j ON j.seq = g.seq
            WHERE j.lane IS NOT DISTINCT FROM p_lane);
    ELSE
        v_seqs := v_seqs || ARRAY(SELECT w.seq FROM generate_series(CLASS.HIGH, CASE WHEN v_ordered THEN CLASS.HIGH ELSE CLASS.LOW END) r (rank)
                CROSS JOIN LATERAL (SELECT x.seq FROM fairlane.active_job x WHERE x.lane = n.id AND x.lane IS NOT NULL AND x.session IS NULL
                    AND NOT x.granted AND x.rank = r.rank::smallint AND x.arrival > v_after[r.rank + 1]
                    ORDER BY x.lane, x.granted, x.rank, x.arrival LIMIT p_count) w
            UNION ALL SELECT x.seq FROM fairlane.active_job x WHERE x.lane = n.id AND x.lane IS NOT NULL AND x.session IS NULL AND x.granted
                AND (x.due IS NOT NULL OR x.gate > GATE.NONE) AND x.state < STATE.RUNNING);
    END IF;
    RETURN QUERY SELECT q.declared, q.override, (SELECT json_agg(json_build_array(
            l.seq, j.id, j.task, l.state, l.class, j.enqueued_at, l.attempt, l.started_at, l.arrival))
        FROM unnest(v_seqs) w (seq) JOIN fairlane.active_job l ON l.seq = w.seq JOIN fairlane.job j ON j.seq = w.seq),
        cardinality(v_gated) < p_whole;
END $$;
