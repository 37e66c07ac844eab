-- Advisory locks on the store, on pools and on queues.
--
-- The order of locks. Every function that writes takes what it needs from this list from top to bottom, each step sorted, and
-- waits for nothing above a step once it holds something of that step. So no two calls can wait for each other:
--
--   1. names: new queues, then job ids, then unique values, then rows of `schedule`. An insert waits for a call that is storing the
--      same name, 2 s at most, and holds no lock of steps 2 to 7 meanwhile. Only children of a broadcast get their ids later,
--      because those depend on the present workers; that wait ends after 0.1 s, with an error.
--   2. the store: an advisory lock, shared by most calls, exclusive for a few. While a call holds it exclusively, no other call
--      holds anything of steps 3 to 5.
--   3. running jobs: rows of `active_job` that have a session, by `seq`; then their rows of `progress`.
--   4. pools: advisory, by number. A pool's lock guards its bindings.
--   5. queues: advisory, by number. A queue's lock guards its domains, flows and lanes, its waiting and arriving jobs, parents of
--      broadcasts, and the rows of `job_extra`. Those rows are never waited for. Calls that only store arriving jobs, or only
--      look, hold it in shared mode (`lock_beside`).
--   6. the row of `leader`, shared by the leader's passes. Renewing a term takes this step alone.
--   7. the row of `session`, then that of `session_load`. Renewing a lease takes this step alone.
--
-- Whatever is needed out of order is taken only if it is free: `pg_try_…`, SKIP LOCKED or NOWAIT. Rows of `queue_count`,
-- `outcome`, `attempt` and `job_link` are mostly only inserted; a call that updates, adds up or removes them skips what is
-- locked, or is the only one that does (`prune`). Locks end with their transaction, or with a block that is rolled back.

-- Two schemas in one database must not wait for each other: the oid of a type distinguishes them.
CREATE FUNCTION fairlane.space() RETURNS integer LANGUAGE sql STABLE AS $$
    SELECT pg_catalog.pg_typeof(NULL::fairlane.queue)::oid::integer
$$;

CREATE FUNCTION fairlane.lock_alone() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(fairlane.space(), 0);
END $$;

CREATE FUNCTION fairlane.lock_some(p_pools text[], p_queues integer[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_space integer := fairlane.space();
    v_key integer;
BEGIN
    PERFORM pg_advisory_xact_lock_shared(v_space, 0);
    IF cardinality(p_queues) = 1 AND coalesce(cardinality(p_pools), 0) = 0 THEN
        PERFORM pg_advisory_xact_lock(v_space, p_queues[1]);
        RETURN;
    END IF;
    -- Pools are negative numbers, queues positive ones. Two pools with the same number wait for each other, which is harmless.
    FOR v_key IN SELECT DISTINCT -1 - (hashtext(p) & 1073741823) FROM unnest(p_pools) p ORDER BY 1 LOOP
        PERFORM pg_advisory_xact_lock(v_space, v_key);
    END LOOP;
    FOR v_key IN SELECT DISTINCT q FROM unnest(p_queues) q ORDER BY 1 LOOP
        PERFORM pg_advisory_xact_lock(v_space, v_key);
    END LOOP;
END $$;

-- The same in shared mode, for calls that change nothing that the locks guard: they wait for the call that has the locks, and
-- then go on together, without one commit after the other. Until they commit, no claim can begin. False if the locks were not
-- free in time.
CREATE FUNCTION fairlane.lock_beside(p_queues integer[]) RETURNS boolean LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
SET lock_timeout = '200ms' AS $$
DECLARE
    v_space integer := fairlane.space();
    v_key integer;
BEGIN
    PERFORM pg_advisory_xact_lock_shared(v_space, 0);
    FOR v_key IN SELECT DISTINCT q FROM unnest(p_queues) q ORDER BY 1 LOOP
        PERFORM pg_advisory_xact_lock_shared(v_space, v_key);
    END LOOP;
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END $$;

-- The same without waiting: true if all locks were free.
CREATE FUNCTION fairlane.try_lock(p_queues integer[], p_pools text[] DEFAULT NULL) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_space integer := fairlane.space();
    v_key integer;
BEGIN
    IF NOT pg_try_advisory_xact_lock_shared(v_space, 0) THEN
        RETURN false;
    ELSIF cardinality(p_queues) = 1 AND p_pools IS NULL THEN
        RETURN pg_try_advisory_xact_lock(v_space, p_queues[1]);
    END IF;
    FOR v_key IN SELECT -1 - (hashtext(p) & 1073741823) FROM unnest(p_pools) p UNION SELECT q FROM unnest(p_queues) q ORDER BY 1 LOOP
        IF NOT pg_try_advisory_xact_lock(v_space, v_key) THEN
            RETURN false;
        END IF;
    END LOOP;
    RETURN true;
END $$;
