-- Failed jobs, grouped by their error.

-- Failed jobs by task and error group, the largest group first: the newest `p_most` of all queues or of one. `exact`: whether
-- those were all. `error`: the end of the error of the newest job.
CREATE FUNCTION fairlane.read_failures(p_queue text, p_task text, p_limit integer, p_most integer, p_tail integer)
RETURNS TABLE (task text, error_group text, count bigint, first_at double precision, last_at double precision, reason text,
    example_id text, error text, exact boolean)
LANGUAGE plpgsql STABLE
SET extra_float_digits = 1
AS $$
#variable_conflict use_column
DECLARE
    v_queue integer;
    v_seqs bigint[];
BEGIN
    IF p_queue IS NULL THEN
        v_seqs := ARRAY(SELECT o.seq FROM fairlane.outcome o WHERE o.state > STATE.COMPLETED AND o.state < STATE.CANCELLED::smallint
            ORDER BY o.state DESC, o.seq DESC LIMIT p_most + 1);
    ELSE
        SELECT q.id INTO v_queue FROM fairlane.queue q WHERE q.name = p_queue;
        v_seqs := ARRAY(SELECT o.seq FROM fairlane.outcome o WHERE o.queue = v_queue AND o.state = STATE.FAILED::smallint
            ORDER BY o.queue DESC, o.state DESC, o.finished_at DESC LIMIT p_most + 1);
    END IF;
    RETURN QUERY
    SELECT g.task, g.kind, g.jobs, g.first_at, g.last_at, o.reason, j.id, right(o.error, p_tail), cardinality(v_seqs) <= p_most
    FROM (
        SELECT j.task, coalesce(o.error_group, o.reason) AS kind, count(*) AS jobs, min(o.finished_at) AS first_at,
            max(o.finished_at) AS last_at, (array_agg(o.seq ORDER BY o.finished_at DESC, o.seq DESC))[1] AS seq
        FROM unnest(v_seqs[:p_most]) w (seq)
        CROSS JOIN LATERAL (SELECT x.* FROM fairlane.outcome x WHERE x.seq = w.seq OFFSET 0) o
        CROSS JOIN LATERAL (SELECT x.task FROM fairlane.job x WHERE x.seq = w.seq OFFSET 0) j
        WHERE p_task IS NULL OR j.task = p_task
        GROUP BY 1, 2 ORDER BY 3 DESC, 5 DESC, 1, 2 LIMIT p_limit) g
    JOIN fairlane.outcome o ON o.seq = g.seq JOIN fairlane.job j ON j.seq = g.seq
    ORDER BY g.jobs DESC, g.last_at DESC, g.task COLLATE "C", g.kind COLLATE "C";
END $$;
