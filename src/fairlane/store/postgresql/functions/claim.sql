-- The claim: one decision over slots, reservations, queue limits, lanes, bindings and pauses, in fair order. Only claimable
-- jobs are read, through the flows with the lowest tags from the clock on, so the cost depends on what is claimed, not on the
-- backlog, the number of lanes, how many of them are blocked, or the number of dead rows.

-- The flow of a domain whose next job comes first; NULL when nothing in it is claimable.
CREATE FUNCTION fairlane.next_flow(p_domain bigint) RETURNS bigint LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT x.flow FROM fairlane.ready_lane x WHERE x.domain = p_domain AND x.tag >= (
        SELECT c.value FROM fairlane.clock c WHERE c.domain >= p_domain AND c.domain <= p_domain ORDER BY c.domain DESC LIMIT 1)
        ORDER BY x.tag, x.head LIMIT 1);
END $$;

-- How many of these jobs fit into an answer after those in `p_before`: the first that would exceed `p_bytes` ends the claim,
-- unless it is the only one. Sizes are read only if they can matter: a job has at most 256 KiB of payload and 16 KiB of
-- headers.
CREATE FUNCTION fairlane.fitting(p_before bigint[], p_seqs bigint[], p_bytes bigint) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_before integer := cardinality(p_before);
    v_count integer := cardinality(p_seqs);
    v_fit integer;
BEGIN
    IF p_bytes IS NULL OR 278528::bigint * (v_before + v_count) <= p_bytes OR (
        SELECT sum(octet_length(y.payload) + coalesce(octet_length(y.headers), 0)) FROM fairlane.job y
        WHERE y.seq = ANY (p_before || p_seqs)) <= p_bytes THEN
        RETURN v_count;
    END IF;
    SELECT greatest(0, count(*) - v_before) INTO v_fit FROM (
        SELECT g.ord, sum(coalesce(j.size, 0)) OVER (ORDER BY g.ord) AS total FROM unnest(p_before || p_seqs) WITH ORDINALITY g(seq, ord)
        LEFT JOIN LATERAL (SELECT octet_length(y.payload) + coalesce(octet_length(y.headers), 0) AS size FROM fairlane.job y
            WHERE y.seq = g.seq OFFSET 0) j ON true) x
    WHERE x.total <= p_bytes OR x.ord = 1;
    IF v_fit < v_count THEN
        -- Read by `claim_jobs`; valid until the end of the transaction.
        PERFORM set_config('fairlane_step.full', '1', true);
    END IF;
    RETURN v_fit;
END $$;

-- Start jobs of the only flow of a domain, in order, if all have the default cost and none has expired, which is the usual
-- case. Returns NULL, without changes, if that does not hold.
CREATE FUNCTION fairlane.take_alike(p_domain bigint, p_clock bigint, p_clock_at tid, p_flow bigint, p_pace tid, p_tag bigint, p_head bigint,
    p_most integer, p_before bigint[], p_bytes bigint, p_session bigint, p_claim bigint, m fairlane.moment) RETURNS bigint[]
LANGUAGE plpgsql AS $$
DECLARE
    v_seqs bigint[];
    v_arrivals bigint[];
    v_odd boolean;
    v_next bigint;
    k integer;
BEGIN
    SELECT array_agg(x.seq), array_agg(x.arrival), bool_or(x.odd) INTO v_seqs, v_arrivals, v_odd FROM (
        SELECT r.seq, r.arrival, (r.cost <> 1.0 OR r.expires_at <= m.now) IS TRUE AS odd FROM fairlane.active_job r
        WHERE r.flow = p_flow AND r.flow IS NOT NULL AND r.session IS NULL AND r.arrival >= p_head
        ORDER BY r.arrival LIMIT p_most + 1) x;
    IF v_seqs IS NULL OR v_odd THEN
        RETURN NULL;
    END IF;
    k := least(cardinality(v_seqs), p_most);
    k := fairlane.fitting(p_before, v_seqs[1 : k], p_bytes);
    IF k = 0 THEN
        RETURN '{}';
    END IF;
    v_next := v_arrivals[k + 1];
    v_seqs := v_seqs[1 : k];
    UPDATE fairlane.active_job u SET state = STATE.RUNNING, granted_at = NULL, session = p_session, claim = p_claim, fence = u.fence + 1,
        attempt = u.attempt + 1, started_at = m.now, paid = 1000
    WHERE u.seq = ANY (v_seqs);
    UPDATE fairlane.lane_pace SET finish = p_tag + 1000 * k, head = v_next, tag = CASE WHEN v_next IS NOT NULL THEN p_tag + 1000 * k END
    WHERE ctid = p_pace;
    DELETE FROM fairlane.ready_lane x WHERE x.domain = p_domain AND x.tag = p_tag AND x.head = p_head;
    IF v_next IS NOT NULL THEN
        INSERT INTO fairlane.ready_lane VALUES (p_domain, p_tag + 1000 * k, v_next, p_flow);
    END IF;
    IF p_tag + 1000 * (k - 1) > p_clock THEN
        UPDATE fairlane.clock SET value = p_tag + 1000 * (k - 1) WHERE ctid = p_clock_at;
    END IF;
    RETURN v_seqs;
END $$;

-- Start the next job of each of these flows, if all have the default cost, none has expired and all fit into the answer.
-- Returns NULL, without changes, if that does not hold. The caller has checked that the flows have the default weight, and that
-- no flow's second job comes before another flow's first.
CREATE FUNCTION fairlane.take_heads(p_domain bigint, p_clock bigint, p_clock_at tid, p_flows bigint[], p_paces tid[], p_tags bigint[], p_heads bigint[],
    p_ready_at tid[], p_before bigint[], p_bytes bigint, p_session bigint, p_claim bigint, m fairlane.moment) RETURNS bigint[]
LANGUAGE plpgsql AS $$
DECLARE
    v_seqs bigint[];
    v_flows bigint[];  -- sorted; `v_tags` and `v_next` are in the same order
    v_tags bigint[];
    v_next bigint[];
    v_odd boolean;
BEGIN
    -- Every aggregate has an explicit order: one without takes its rows in the order of another that has one.
    SELECT array_agg(x.seq ORDER BY f.ord), array_agg(f.flow ORDER BY f.flow), array_agg(f.tag ORDER BY f.flow),
        array_agg(x.next ORDER BY f.flow), bool_or(x.odd) INTO v_seqs, v_flows, v_tags, v_next, v_odd
    FROM unnest(p_flows, p_tags, p_heads) WITH ORDINALITY f(flow, tag, head, ord)
    CROSS JOIN LATERAL (
        SELECT (array_agg(y.seq))[1] AS seq, (array_agg(y.arrival))[2] AS next,
            ((array_agg(y.cost))[1] <> 1.0 OR (array_agg(y.arrival))[1] <> f.head OR bool_or(y.expires_at <= m.now)) IS NOT FALSE AS odd
        FROM (SELECT r.seq, r.arrival, r.cost, coalesce(r.expires_at, m.now + 1) AS expires_at FROM fairlane.active_job r
              WHERE r.flow = f.flow AND r.flow IS NOT NULL AND r.session IS NULL AND r.arrival >= f.head
              ORDER BY r.arrival LIMIT 2) y) x;
    IF v_odd OR fairlane.fitting(p_before, v_seqs, p_bytes) < cardinality(v_seqs) THEN
        RETURN NULL;
    END IF;
    UPDATE fairlane.active_job u SET state = STATE.RUNNING, granted_at = NULL, session = p_session, claim = p_claim, fence = u.fence + 1,
        attempt = u.attempt + 1, started_at = m.now, paid = 1000
    WHERE u.seq = ANY (v_seqs);
    -- No other call moves rows of this queue, so they are still where they were read.
    UPDATE fairlane.lane_pace u SET (finish, head, tag) = (
        SELECT v_tags[p.at] + 1000, v_next[p.at], CASE WHEN v_next[p.at] IS NOT NULL THEN v_tags[p.at] + 1000 END
        FROM (SELECT width_bucket(u.flow, v_flows) AS at OFFSET 0) p)
    WHERE u.ctid = ANY (p_paces);
    DELETE FROM fairlane.ready_lane x WHERE x.ctid = ANY (p_ready_at);
    INSERT INTO fairlane.ready_lane (domain, tag, head, flow)
    SELECT p_domain, g.tag + 1000, g.head, g.flow FROM unnest(v_flows, v_tags, v_next) g(flow, tag, head) WHERE g.head IS NOT NULL;
    IF p_tags[cardinality(p_tags)] > p_clock THEN
        UPDATE fairlane.clock SET value = p_tags[cardinality(p_tags)] WHERE ctid = p_clock_at;
    END IF;
    RETURN v_seqs;
END $$;

-- Start up to `p_most` jobs of one domain in fair order; returns them in that order. Expired jobs are cancelled.
CREATE FUNCTION fairlane.take(p_domain bigint, p_most integer, p_before bigint[], p_bytes bigint, p_session bigint, p_claim bigint,
    m fairlane.moment) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    v_taken bigint[] := '{}';
    v_left integer := p_most;
    v_expired integer := 0;
    v_clock bigint;
    v_clock_at tid;
    v_flows bigint[];
    v_tags bigint[];
    v_heads bigint[];
    v_ready_at tid[];
    v_paces tid[];
    v_weights double precision[];
    v_chunk integer;
    v_seqs bigint[];
    v_pays integer[];
    v_pay integer;
    v_gone bigint[];
    v_seq bigint;
    v_top bigint;
    v_fit integer;
BEGIN
    SELECT x.value, x.ctid INTO v_clock, v_clock_at FROM fairlane.clock x WHERE x.domain >= p_domain AND x.domain <= p_domain
    ORDER BY x.domain DESC LIMIT 1;
    WHILE v_left > 0 LOOP
        SELECT array_agg(x.flow), array_agg(x.tag), array_agg(x.head), array_agg(x.tid), array_agg(p.pace), array_agg(p.weight)
        INTO v_flows, v_tags, v_heads, v_ready_at, v_paces, v_weights
        FROM (SELECT n.flow, n.tag, n.head, n.ctid AS tid FROM fairlane.ready_lane n
              WHERE n.domain = p_domain AND n.tag >= v_clock ORDER BY n.tag, n.head LIMIT v_left) x
        CROSS JOIN LATERAL (SELECT y.ctid AS pace, y.weight FROM fairlane.lane_pace y WHERE y.flow >= x.flow AND y.flow <= x.flow
            ORDER BY y.flow DESC LIMIT 1) p;
        EXIT WHEN v_flows IS NULL;
        v_seqs := NULL;
        v_chunk := cardinality(v_flows);
        IF 1.0 = ALL (v_weights) THEN
            IF v_chunk = 1 THEN
                v_seqs := fairlane.take_alike(p_domain, v_clock, v_clock_at, v_flows[1], v_paces[1], v_tags[1], v_heads[1], v_left,
                    p_before || v_taken, p_bytes, p_session, p_claim, m);
            ELSIF v_chunk = v_left AND v_tags[v_chunk] < v_tags[1] + 1000 THEN
                v_seqs := fairlane.take_heads(p_domain, v_clock, v_clock_at, v_flows, v_paces, v_tags, v_heads, v_ready_at,
                    p_before || v_taken, p_bytes, p_session, p_claim, m);
            END IF;
            IF v_seqs IS NOT NULL THEN
                RETURN v_taken || v_seqs;
            END IF;
        END IF;
        v_chunk := CASE WHEN v_chunk = 1 THEN v_left + 1 ELSE v_left / v_chunk + 2 END;
        -- The next jobs of each flow, each with the tag it would start with: the flow's tag plus the charges of the jobs before
        -- it. The jobs with the lowest tags start. Of a flow that was not read to its end, only jobs that certainly come before
        -- the unread ones start (`cut`).
        WITH jobs AS MATERIALIZED (
            SELECT f.flow, f.tag, l.seq, l.arrival, l.expired, l.pay,
                f.tag + sum(l.pay) OVER w - l.pay AS start, f.tag + sum(l.pay) OVER w AS finish,
                lead(l.arrival) OVER w AS follower, row_number() OVER w AS nth
            FROM unnest(v_flows, v_tags, v_heads, v_weights) f(flow, tag, head, weight)
            CROSS JOIN LATERAL (
                SELECT r.seq, r.arrival, r.expires_at <= m.now IS TRUE AS expired,
                    CASE WHEN r.expires_at <= m.now THEN 0
                         WHEN r.cost = 1.0 AND f.weight = 1.0 THEN 1000
                         -- An invalid cost counts as 1: it must not block all claims.
                         ELSE greatest(1, round(1000 * CASE WHEN r.cost BETWEEN 0.01 AND 100 THEN r.cost ELSE 1 END / f.weight))
                         END::bigint AS pay
                FROM fairlane.active_job r WHERE r.flow = f.flow AND r.flow IS NOT NULL AND r.session IS NULL AND r.arrival >= f.head
                ORDER BY r.arrival LIMIT v_chunk) l
            WINDOW w AS (PARTITION BY f.flow ORDER BY l.arrival)
        ), first AS MATERIALIZED (
            SELECT * FROM jobs j ORDER BY j.start, j.arrival LIMIT v_left
        ), bound AS MATERIALIZED (
            SELECT min(f.finish) AS cut FROM first f WHERE f.nth = v_chunk AND cardinality(v_flows) > 1
        ), chosen AS MATERIALIZED (
            SELECT f.* FROM first f, bound b WHERE b.cut IS NULL OR f.start < b.cut OR f.finish <= b.cut
        ), ends AS MATERIALIZED (
            -- The state of each flow afterwards, sorted by flow for the binary search below (`width_bucket`).
            SELECT DISTINCT ON (c.flow) c.flow, c.finish, CASE WHEN c.nth < v_chunk THEN c.follower ELSE (
                SELECT n.arrival FROM fairlane.active_job n WHERE n.flow = c.flow AND n.flow IS NOT NULL AND n.session IS NULL
                AND n.arrival > c.arrival ORDER BY n.arrival LIMIT 1) END AS head
            FROM chosen c ORDER BY c.flow, c.nth DESC
        )
        SELECT a.seqs, a.pays, a.gone, a.top, e.flows, e.finishes, e.heads, e.ready_at, e.paces
        INTO v_seqs, v_pays, v_gone, v_top, v_flows, v_tags, v_heads, v_ready_at, v_paces
        FROM (SELECT array_agg(c.seq ORDER BY c.start, c.arrival) FILTER (WHERE NOT c.expired) AS seqs,
                  array_agg(c.pay ORDER BY c.start, c.arrival) FILTER (WHERE NOT c.expired) AS pays,
                  array_agg(c.seq) FILTER (WHERE c.expired) AS gone, max(c.start) FILTER (WHERE NOT c.expired) AS top
              FROM chosen c) a,
            (SELECT array_agg(x.flow ORDER BY x.flow) AS flows, array_agg(x.finish ORDER BY x.flow) AS finishes,
                 array_agg(x.head ORDER BY x.flow) AS heads, array_agg(v_ready_at[array_position(v_flows, x.flow)]) AS ready_at,
                 array_agg(v_paces[array_position(v_flows, x.flow)]) AS paces FROM ends x) e;
        IF v_seqs IS NULL AND v_gone IS NULL THEN
            -- The flow's head does not exist. A recount repairs that; a claim does not wait for it.
            EXIT;
        END IF;
        IF v_seqs IS NOT NULL THEN
            v_fit := fairlane.fitting(p_before || v_taken, v_seqs, p_bytes);
            IF v_fit < cardinality(v_seqs) THEN
                -- Nothing has started yet: select again, only the jobs that fit.
                EXIT WHEN v_fit = 0;
                v_left := v_fit;
                CONTINUE;
            END IF;
        END IF;
        -- Ending a bound job can open the gate of another job, in another queue. These locks are out of order, so they are
        -- taken only if they are free. If not, this domain is skipped until the next claim or the promoter ends the job.
        IF v_gone IS NOT NULL AND EXISTS (SELECT 1 FROM fairlane.active_job l WHERE l.seq = ANY (v_gone) AND l.binding IS NOT NULL)
            AND NOT fairlane.try_lock_for(v_gone) THEN
            EXIT;
        END IF;
        -- No other call moves rows of this queue, so they are still where they were read.
        UPDATE fairlane.lane_pace u SET (finish, head, tag) = (
            SELECT greatest(u.finish, v_tags[p.at]), v_heads[p.at], CASE WHEN v_heads[p.at] IS NOT NULL THEN v_tags[p.at] END
            FROM (SELECT width_bucket(u.flow, v_flows) AS at OFFSET 0) p)
        WHERE u.ctid = ANY (v_paces);
        DELETE FROM fairlane.ready_lane x WHERE x.ctid = ANY (v_ready_at);
        INSERT INTO fairlane.ready_lane (domain, tag, head, flow)
        SELECT p_domain, g.tag, g.head, g.flow FROM unnest(v_flows, v_tags, v_heads) g(flow, tag, head) WHERE g.head IS NOT NULL;
        IF v_seqs IS NOT NULL THEN
            -- A job keeps its flow while it runs; the index of claimable jobs excludes rows with a session.
            FOREACH v_pay IN ARRAY ARRAY(SELECT DISTINCT p FROM unnest(v_pays) p) LOOP
                UPDATE fairlane.active_job u SET state = STATE.RUNNING, granted_at = NULL, session = p_session, claim = p_claim, fence = u.fence + 1,
                    attempt = u.attempt + 1, started_at = m.now, paid = v_pay
                WHERE u.seq = ANY (CASE WHEN v_pay = ALL (v_pays) THEN v_seqs
                    ELSE ARRAY(SELECT g.seq FROM unnest(v_seqs, v_pays) g(seq, pay) WHERE g.pay = v_pay) END);
            END LOOP;
            v_taken := v_taken || v_seqs;
            v_left := v_left - cardinality(v_seqs);
            IF v_top > v_clock THEN
                v_clock := v_top;
                UPDATE fairlane.clock SET value = v_clock WHERE ctid = v_clock_at RETURNING ctid INTO v_clock_at;
            END IF;
        END IF;
        IF v_gone IS NOT NULL THEN
            FOREACH v_seq IN ARRAY v_gone LOOP
                PERFORM fairlane.expire(v_seq, m);
            END LOOP;
            v_expired := v_expired + cardinality(v_gone);
            -- Continue with the next jobs, up to this many expired ones.
            EXIT WHEN v_expired >= 100;
        END IF;
    END LOOP;
    RETURN v_taken;
END $$;

-- The domains with claimable jobs that a worker may start: those of the named queues, of its inbox, and of declined jobs of
-- tasks it knows in queues that it serves, which count as queues of its inbox. Each has its queue (and its name, if it was
-- asked for by name), its class, and whether the queue has a limit. A NULL domain stands for a queue with arriving jobs. Paused
-- queues are left out.
CREATE FUNCTION fairlane.sources(s fairlane.session, p_names text[], p_inbox text, OUT domains bigint[], OUT queues integer[], OUT names text[],
    OUT classes integer[], OUT slotted boolean[]) LANGUAGE plpgsql STABLE AS $$
BEGIN
    SELECT array_agg(x.domain), array_agg(x.queue), array_agg(x.name), array_agg(x.class), array_agg(x.slotted)
    INTO domains, queues, names, classes, slotted FROM (
        SELECT z.domain, y.id AS queue, y.name, z.class, y.slots IS NOT NULL AS slotted
        FROM fairlane.queue y CROSS JOIN LATERAL (
            SELECT w.id AS domain, w.class FROM fairlane.domain w
            WHERE w.inbox = '' AND w.class = ANY ('{0,1,2}') AND w.queue = y.id AND fairlane.next_flow(w.id) IS NOT NULL
            UNION ALL
            SELECT NULL, NULL WHERE (SELECT a.seq FROM fairlane.active_job a WHERE a.queue = y.id AND a.state = STATE.ARRIVING ORDER BY a.seq LIMIT 1)
                IS NOT NULL) z
        WHERE y.name = ANY (p_names) AND NOT y.paused
        UNION ALL
        SELECT z.id, z.queue, NULL, z.class, y.slots IS NOT NULL
        FROM fairlane.domain z CROSS JOIN LATERAL (SELECT q.slots, q.paused FROM fairlane.queue q WHERE q.id = z.queue OFFSET 0) y
        WHERE z.inbox = p_inbox AND NOT y.paused AND fairlane.next_flow(z.id) IS NOT NULL
        UNION ALL
        SELECT z.id, z.queue, NULL, z.class, y.slots IS NOT NULL
        FROM fairlane.unknown_task u
        CROSS JOIN LATERAL (SELECT q.name, q.slots, q.paused FROM fairlane.queue q WHERE q.id = u.queue OFFSET 0) y
        CROSS JOIN LATERAL (SELECT w.id, w.queue, w.class FROM fairlane.domain w WHERE w.inbox = '~' || u.task || '/'
            AND w.class = ANY ('{0,1,2}') AND w.queue = u.queue OFFSET 0) z
        WHERE p_inbox IS NOT NULL AND y.name = ANY (s.queues) AND NOT y.paused AND fairlane.next_flow(z.id) IS NOT NULL
            AND (s.task_set IS NULL OR EXISTS (SELECT 1 FROM fairlane.task_set t WHERE t.id = s.task_set AND u.task = ANY (t.tasks)))) x;
END $$;

-- The queues that a call must lock for its claim: those with jobs that its session could start.
CREATE FUNCTION fairlane.source_queues(s fairlane.session, p_names text[]) RETURNS integer[] LANGUAGE plpgsql AS $$
BEGIN
    IF s.state = 'live' AND s.slots IS NOT NULL AND s.idx IS NOT NULL THEN
        RETURN (fairlane.sources(s, p_names, CASE WHEN array_position(p_names, NULL) IS NOT NULL THEN s.pool || '/' || s.idx END)).queues;
    END IF;
    RETURN NULL;
END $$;

-- Start jobs for a session, ask by ask. An ask without a queue is for the session's inbox. `p_freed`: how many jobs of each
-- class the session has ended in the same call; `counted`: whether its load was reduced by them here. `p_locked`: the queues
-- that the call has already locked, those of `source_queues` included; no other is locked then. NULL: none is locked yet. The
-- caller holds the store's lock in shared mode.
CREATE FUNCTION fairlane.claim_jobs(s fairlane.session, p_freed integer[], p_locked integer[], p_number bigint, p_total integer, p_queues text[],
    p_classes smallint[], p_mosts integer[], p_belows integer[], p_bytes bigint, p_now double precision, p_lease double precision,
    OUT taken bigint[], OUT counted boolean) LANGUAGE plpgsql AS $$
DECLARE
    h record;
    r record;
    m fairlane.moment;
    v_inbox text;
    v_locked integer[];
    v_domains bigint[];
    v_queues integer[];
    v_names text[];
    v_kinds integer[];
    v_slotted boolean[];
    v_at integer[];
    v_some bigint[];
    v_left integer := p_total;
    v_most integer;
    v_room integer;
    v_running integer[];
    v_limit integer;
    v_topics text;
    i integer;
    k integer;
    n integer;
    c integer;
BEGIN
    taken := '{}';
    counted := false;
    IF s.state = 'live' AND s.slots IS NOT NULL AND s.idx IS NOT NULL AND p_total > 0 THEN
        IF array_position(p_queues, NULL) IS NOT NULL THEN
            v_inbox := s.pool || '/' || s.idx;
        END IF;
        r := fairlane.sources(s, p_queues, v_inbox);
        v_domains := r.domains;
        v_queues := r.queues;
    END IF;
    -- Only queues with jobs to start are locked: an idle worker blocks no other call and writes nothing.
    IF v_queues IS NULL THEN
        SELECT x.claim INTO h FROM fairlane.session_load x WHERE x.session >= s.seq AND x.session <= s.seq ORDER BY x.session DESC LIMIT 1;
    ELSE
        v_locked := coalesce(p_locked, v_queues);
        IF p_locked IS NOT NULL THEN
            NULL;
        ELSIF cardinality(v_queues) = 1 THEN
            PERFORM pg_advisory_xact_lock(fairlane.space(), v_queues[1]);
        ELSE
            v_locked := ARRAY(SELECT DISTINCT g FROM unnest(v_queues) g);
            PERFORM fairlane.lock_some(NULL, v_locked);
        END IF;
        SELECT x.claim, x.running_high, x.running_normal, x.running_low, x.ctid AS tid INTO h FROM fairlane.session_load x
        WHERE x.session >= s.seq AND x.session <= s.seq ORDER BY x.session DESC LIMIT 1 FOR UPDATE;
    END IF;
    IF s.state IS NULL OR s.state NOT IN ('live', 'stopping') OR p_number < h.claim THEN
        PERFORM fairlane.check_claim(s, h.claim, p_number);
    ELSIF p_number = h.claim THEN
        taken := ARRAY(SELECT l.seq FROM fairlane.active_job l WHERE l.session = s.seq AND l.session IS NOT NULL AND l.claim = p_number
                       ORDER BY l.class, l.arrival);
        RETURN;
    ELSIF v_queues IS NULL THEN
        RETURN;
    END IF;
    m.now := coalesce(p_now, extract(epoch FROM clock_timestamp()));
    m.lease := coalesce(p_lease, m.now);
    IF array_position(v_domains, NULL) IS NOT NULL THEN
        PERFORM fairlane.admit_arriving(v_locked, 1000, m);
        -- Admission may have added domains. Those of queues that are not locked are left to the next claim.
        r := fairlane.sources(s, p_queues, v_inbox);
        v_domains := r.domains;
        v_queues := r.queues;
    END IF;
    v_names := r.names;
    v_kinds := r.classes;
    v_slotted := r.slotted;
    v_running := ARRAY[h.running_high - p_freed[1], h.running_normal - p_freed[2], h.running_low - p_freed[3]];
    FOR i IN 1 .. cardinality(p_mosts) LOOP
        EXIT WHEN v_left <= 0 OR current_setting('fairlane_step.full', true) = '1';
        c := p_classes[i];
        v_at := '{}';
        FOR k IN 1 .. coalesce(cardinality(v_domains), 0) LOOP
            IF v_kinds[k] = c AND v_names[k] IS NOT DISTINCT FROM p_queues[i] AND v_queues[k] = ANY (v_locked) THEN
                v_at := v_at || k;
            END IF;
        END LOOP;
        n := cardinality(v_at);
        CONTINUE WHEN n = 0;
        v_most := least(p_mosts[i], v_left,
            fairlane.room(s.slots, s.reserved_high, s.reserved_normal, v_running[1], v_running[2], v_running[3], c));
        IF p_belows[i] IS NOT NULL THEN
            v_most := least(v_most, p_belows[i] - v_running[c + 1]);
        END IF;
        CONTINUE WHEN v_most <= 0;
        IF n > 1 THEN
            -- The inbox holds jobs of any queue. The queues alternate: first equal shares, then whatever is left.
            v_at := ARRAY(SELECT g FROM unnest(v_at) g ORDER BY v_domains[g]);
            v_at := v_at[p_number % n + 1 :] || v_at[: p_number % n];
        END IF;
        FOREACH v_limit IN ARRAY CASE WHEN n > 1 THEN ARRAY[(v_most + n - 1) / n, v_most] ELSE ARRAY[v_most] END LOOP
            FOREACH k IN ARRAY v_at LOOP
                EXIT WHEN v_most <= 0 OR current_setting('fairlane_step.full', true) = '1';
                v_room := least(v_limit, v_most);
                IF v_slotted[k] THEN
                    v_room := least(v_room, fairlane.queue_room(v_queues[k], c));
                END IF;
                v_topics := current_setting('fairlane_step.topics', true);
                v_some := fairlane.take(v_domains[k], v_room, taken, p_bytes, s.seq, p_number, m);
                n := cardinality(v_some);
                IF current_setting('fairlane_step.topics', true) IS DISTINCT FROM v_topics THEN
                    -- A job was cancelled because it had expired. The next of its lane may be claimable now, in a domain that
                    -- had no jobs before.
                    r := fairlane.sources(s, p_queues, v_inbox);
                    SELECT v_domains || array_agg(g.domain), v_queues || array_agg(g.queue), v_names || array_agg(g.name),
                        v_kinds || array_agg(g.class), v_slotted || array_agg(g.slotted)
                    INTO v_domains, v_queues, v_names, v_kinds, v_slotted
                    FROM unnest(r.domains, r.queues, r.names, r.classes, r.slotted) g(domain, queue, name, class, slotted)
                    WHERE g.domain IS NOT NULL AND array_position(v_domains, g.domain) IS NULL;
                END IF;
                IF n < v_room THEN
                    v_kinds[k] := -1;  -- this domain has no more jobs
                END IF;
                CONTINUE WHEN n = 0;
                taken := taken || v_some;
                v_most := v_most - n;
                v_left := v_left - n;
                v_running[c + 1] := v_running[c + 1] + n;
                INSERT INTO fairlane.queue_count (queue, class, pending, running) VALUES (v_queues[k], c, -n, n);
            END LOOP;
        END LOOP;
    END LOOP;
    IF cardinality(taken) > 0 THEN
        -- Not for an empty answer: an idle worker claims every second, and an empty answer need not be repeatable.
        UPDATE fairlane.session_load SET claim = p_number, running_high = v_running[1], running_normal = v_running[2],
            running_low = v_running[3] WHERE ctid = h.tid;
        counted := true;
    END IF;
END $$;
