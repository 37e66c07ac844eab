-- The feed of jobs that ended as failed or cancelled.

-- Jobs that ended at `p_since` or later, by a transaction with the number `p_oldest` or a higher one; among those that ended at
-- `p_since` only those behind `p_seq`. Oldest end first, and one more than `p_limit`. Without `p_since`, none. If `p_newest` is
-- above every number that this server has assigned, the caller's numbers are from another server: then all jobs.
--
-- The first row has no job. It has the time, and the snapshot: every transaction with a number below `oldest` has ended, and none
-- from `newest` on. If `p_every` seconds have passed since `p_examined_at`, it also has the lowest number of an open transaction
-- that writes, and the highest number that was given to any. The latter is not `newest` - 1: the transactions that began last may all
-- be open, and then a snapshot does not show them. Locks are read before the snapshot and the snapshot before the jobs, each by a
-- statement of its own. So a transaction that ends meanwhile counts as open or its jobs are returned, or both.
--
-- A row and a lock have the number of a transaction in 32 bits, which are extended: those of a row to the highest number that has
-- ended. A row that is older than four billion transactions may appear newer that way, never older, so at worst it is returned
-- once more. The number may be that of a subtransaction, which is higher than that of its transaction.
CREATE FUNCTION fairlane.read_ended(p_since double precision, p_seq bigint, p_oldest bigint, p_newest bigint,
    p_examined_at double precision, p_every double precision, p_limit integer, p_now double precision)
RETURNS TABLE (seq bigint, id text, task text, queue text, kind text, state smallint, reason text, error text,
    finished_at double precision, now double precision, oldest bigint, newest bigint, first_open bigint, last_given bigint)
LANGUAGE plpgsql
SET extra_float_digits = 1
AS $$
#variable_conflict use_column
DECLARE
    v_now double precision := coalesce(p_now, extract(epoch FROM clock_timestamp())::double precision);
    v_examines boolean := coalesce(p_every <= abs(v_now - p_examined_at), p_every = 0, false);
    v_open bigint[];
    v_oldest bigint;
    v_newest bigint;
BEGIN
    IF v_examines THEN
        v_open := ARRAY(SELECT l.transactionid::text::bigint FROM pg_locks l
            WHERE l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock' AND l.granted);
    END IF;
    SELECT pg_snapshot_xmin(s.shot)::text::bigint, pg_snapshot_xmax(s.shot)::text::bigint INTO v_oldest, v_newest
    FROM (SELECT pg_current_snapshot() AS shot) s;
    RETURN QUERY SELECT NULL::bigint, NULL::text, NULL::text, NULL::text, NULL::text, NULL::smallint, NULL::text, NULL::text,
        NULL::double precision, v_now, v_oldest, v_newest, min(x.open), CASE WHEN v_examines THEN greatest(v_newest - 1, max(x.open)) END
    FROM (SELECT v_newest + ((o.short - v_newest + 2147483648) & 4294967295) - 2147483648 AS open FROM unnest(v_open) o (short)) x;
    IF p_since IS NULL THEN
        RETURN;
    ELSIF p_newest > v_newest THEN
        p_since := 0;
        p_seq := -1;
        p_oldest := 0;
    END IF;
    RETURN QUERY
    SELECT w.seq, j.id, j.task, w.name,
        CASE j.kind WHEN KIND.JOB THEN 'job' WHEN KIND.TURN THEN 'turn' WHEN KIND.BROADCAST THEN 'broadcast' ELSE 'cleanup' END,
        w.state, w.reason, w.error, w.finished_at, NULL::double precision, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint
    FROM (
        SELECT o.*, q.name FROM fairlane.queue q CROSS JOIN (VALUES (STATE.FAILED::smallint), (STATE.CANCELLED::smallint)) s (state)
        CROSS JOIN LATERAL (SELECT x.seq, x.state, x.reason, x.error, x.finished_at FROM fairlane.outcome x
            WHERE x.queue = q.id AND x.state = s.state AND x.finished_at >= p_since AND (x.finished_at > p_since OR x.seq > p_seq)
                AND v_newest - ((v_newest - x.xmin::text::bigint) & 4294967295) >= p_oldest
            ORDER BY x.queue, x.state, x.finished_at, x.seq LIMIT p_limit + 1) o
        ORDER BY o.finished_at, o.seq LIMIT p_limit + 1) w
    CROSS JOIN LATERAL (SELECT i.id, i.task, i.kind FROM fairlane.job i WHERE i.seq = w.seq OFFSET 0) j
    ORDER BY w.finished_at, w.seq;
END $$;
