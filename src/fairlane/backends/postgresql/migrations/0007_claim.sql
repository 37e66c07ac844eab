-- The claim: one decision over slots, reservations, queue limits, lanes, bindings and pauses, in fair order. Only
-- claimable jobs are looked at, through the flows whose tag is lowest and not below the clock, so the cost depends on
-- what is claimed: not on the backlog, the number of lanes, how many of them are blocked, or how many dead rows there are.

-- The flow of a domain whose next job comes first; NULL when nothing in it is claimable.
CREATE FUNCTION fairlane.next_flow(p_domain bigint, p_clock bigint) RETURNS bigint LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT x.flow FROM fairlane.line x WHERE x.domain = p_domain AND x.tag >= p_clock ORDER BY x.tag, x.head LIMIT 1);
END $$;

-- Start jobs of the only flow there is, in their order, when they all cost the same and none has expired: nearly always.
-- NULL when it is not so; then nothing was done.
CREATE FUNCTION fairlane.take_alike(p_domain bigint, p_clock bigint, p_flow bigint, p_tag bigint, p_head bigint, p_most integer,
    p_session bigint, p_claim bigint, m fairlane.moment) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    v_seqs bigint[];
    v_arrivals bigint[];
    v_odd boolean;
    v_next bigint;
    k integer;
BEGIN
    SELECT array_agg(x.seq), array_agg(x.arrival), bool_or(x.odd) INTO v_seqs, v_arrivals, v_odd FROM (
        SELECT r.seq, r.arrival, (r.cost <> 1.0 OR r.expires_at <= m.now) IS TRUE AS odd FROM fairlane.live r
        WHERE r.flow = p_flow AND r.flow IS NOT NULL AND r.session IS NULL AND r.arrival >= p_head
        ORDER BY r.arrival LIMIT p_most + 1) x;
    IF v_seqs IS NULL OR v_odd THEN
        RETURN NULL;
    END IF;
    k := least(cardinality(v_seqs), p_most);
    v_next := v_arrivals[k + 1];
    v_seqs := v_seqs[1 : k];
    UPDATE fairlane.live u SET state = 3, granted_at = NULL, session = p_session, claim = p_claim, fence = u.fence + 1,
        attempt = u.attempt + 1, started_at = m.now, paid = 1000
    WHERE u.seq = ANY (v_seqs);
    UPDATE fairlane.flow SET finish = p_tag + 1000 * k, head = v_next, tag = CASE WHEN v_next IS NOT NULL THEN p_tag + 1000 * k END
    WHERE id = p_flow;
    DELETE FROM fairlane.line x WHERE x.domain = p_domain AND x.tag = p_tag AND x.head = p_head;
    IF v_next IS NOT NULL THEN
        INSERT INTO fairlane.line VALUES (p_domain, p_tag + 1000 * k, v_next, p_flow);
    END IF;
    IF p_tag + 1000 * (k - 1) > p_clock THEN
        UPDATE fairlane.domain SET clock = p_tag + 1000 * (k - 1) WHERE id = p_domain;
    END IF;
    RETURN v_seqs;
END $$;

-- Start up to `p_most` jobs of one domain, in fair order; returns them in that order. What has expired is cancelled.
CREATE FUNCTION fairlane.take(p_domain bigint, p_most integer, p_session bigint, p_claim bigint, m fairlane.moment)
RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    v_taken bigint[] := '{}';
    v_left integer := p_most;
    v_expired integer := 0;
    v_clock bigint;
    v_flows bigint[];
    v_tags bigint[];
    v_heads bigint[];
    v_places tid[];
    v_weights double precision[];
    v_chunk integer;
    v_cut bigint;
    v_seqs bigint[];
    v_pays integer[];
    v_pay integer;
    v_gone bigint[];
    v_seq bigint;
    v_top bigint;
BEGIN
    SELECT d.clock INTO v_clock FROM fairlane.domain d WHERE d.id = p_domain;
    WHILE v_left > 0 LOOP
        SELECT array_agg(x.flow), array_agg(x.tag), array_agg(x.head), array_agg(x.place),
            array_agg((SELECT f.weight FROM fairlane.flow f WHERE f.id = x.flow))
        INTO v_flows, v_tags, v_heads, v_places, v_weights
        FROM (SELECT n.flow, n.tag, n.head, n.ctid AS place FROM fairlane.line n
              WHERE n.domain = p_domain AND n.tag >= v_clock ORDER BY n.tag, n.head LIMIT v_left) x;
        EXIT WHEN v_flows IS NULL;
        IF cardinality(v_flows) = 1 THEN
            IF v_weights[1] = 1.0 THEN
                v_seqs := fairlane.take_alike(p_domain, v_clock, v_flows[1], v_tags[1], v_heads[1], v_left, p_session, p_claim, m);
                IF v_seqs IS NOT NULL THEN
                    RETURN v_taken || v_seqs;
                END IF;
            END IF;
            v_chunk := v_left + 1;
        ELSE
            v_chunk := greatest(2, v_left / cardinality(v_flows) + 2);
        END IF;
        -- Each flow's next jobs with the tag each would start with: that of the flow plus what those before it pay. The
        -- lowest tags start. Where a flow was not read far enough, only what surely comes before the rest of it (`cut`).
        WITH jobs AS MATERIALIZED (
            SELECT f.flow, f.tag, l.seq, l.arrival, l.expired, l.pay,
                f.tag + sum(l.pay) OVER w - l.pay AS start, f.tag + sum(l.pay) OVER w AS finish,
                lead(l.arrival) OVER w AS follower, row_number() OVER w AS nth
            FROM unnest(v_flows, v_tags, v_heads, v_weights) f(flow, tag, head, weight)
            CROSS JOIN LATERAL (
                SELECT r.seq, r.arrival, r.expires_at <= m.now IS TRUE AS expired,
                    CASE WHEN r.expires_at <= m.now THEN 0
                         WHEN r.cost = 1.0 AND f.weight = 1.0 THEN 1000
                         ELSE greatest(1, round(1000 * r.cost / f.weight)) END::bigint AS pay
                FROM fairlane.live r WHERE r.flow = f.flow AND r.flow IS NOT NULL AND r.session IS NULL AND r.arrival >= f.head
                ORDER BY r.arrival LIMIT v_chunk) l
            WINDOW w AS (PARTITION BY f.flow ORDER BY l.arrival)
        ), first AS MATERIALIZED (
            SELECT * FROM jobs j ORDER BY j.start, j.arrival LIMIT v_left
        ), bound AS MATERIALIZED (
            SELECT min(f.finish) AS cut FROM first f WHERE f.nth = v_chunk AND cardinality(v_flows) > 1
        ), chosen AS MATERIALIZED (
            SELECT f.* FROM first f, bound b WHERE b.cut IS NULL OR f.start < b.cut OR f.finish <= b.cut
        ), ends AS MATERIALIZED (
            -- Where each flow stands afterwards.
            SELECT DISTINCT ON (c.flow) c.flow, c.finish, CASE WHEN c.nth < v_chunk THEN c.follower ELSE (
                SELECT n.arrival FROM fairlane.live n WHERE n.flow = c.flow AND n.flow IS NOT NULL AND n.session IS NULL
                AND n.arrival > c.arrival ORDER BY n.arrival LIMIT 1) END AS head
            FROM chosen c ORDER BY c.flow, c.nth DESC
        )
        SELECT a.seqs, a.pays, a.gone, a.top, e.flows, e.finishes, e.heads, e.places
        INTO v_seqs, v_pays, v_gone, v_top, v_flows, v_tags, v_heads, v_places
        FROM (SELECT array_agg(c.seq ORDER BY c.start, c.arrival) FILTER (WHERE NOT c.expired) AS seqs,
                  array_agg(c.pay ORDER BY c.start, c.arrival) FILTER (WHERE NOT c.expired) AS pays,
                  array_agg(c.seq) FILTER (WHERE c.expired) AS gone, max(c.start) FILTER (WHERE NOT c.expired) AS top
              FROM chosen c) a,
            (SELECT array_agg(x.flow) AS flows, array_agg(x.finish) AS finishes, array_agg(x.head) AS heads,
                 array_agg(v_places[array_position(v_flows, x.flow)]) AS places FROM ends x) e;
        IF v_seqs IS NULL AND v_gone IS NULL THEN
            -- The head that the flow names is not there: repaired by a recount, never waited for.
            EXIT;
        END IF;
        -- A table that is written is found by its keys alone, never through a join: no plan can turn that into a walk.
        UPDATE fairlane.flow u SET (finish, head, tag) = (
            SELECT greatest(u.finish, v_tags[p.at]), v_heads[p.at], CASE WHEN v_heads[p.at] IS NOT NULL THEN v_tags[p.at] END
            FROM (SELECT array_position(v_flows, u.id) AS at) p)
        WHERE u.id = ANY (v_flows);
        -- Nobody else moves rows of this line, so they are still where they were read.
        DELETE FROM fairlane.line x WHERE x.ctid = ANY (v_places);
        INSERT INTO fairlane.line (domain, tag, head, flow)
        SELECT p_domain, g.tag, g.head, g.flow FROM unnest(v_flows, v_tags, v_heads) g(flow, tag, head) WHERE g.head IS NOT NULL;
        IF v_seqs IS NOT NULL THEN
            -- A job keeps its flow while it runs: the index of claimable jobs leaves out what has a session.
            FOREACH v_pay IN ARRAY ARRAY(SELECT DISTINCT p FROM unnest(v_pays) p) LOOP
                UPDATE fairlane.live u SET state = 3, granted_at = NULL, session = p_session, claim = p_claim, fence = u.fence + 1,
                    attempt = u.attempt + 1, started_at = m.now, paid = v_pay
                WHERE u.seq = ANY (CASE WHEN v_pay = ALL (v_pays) THEN v_seqs
                    ELSE ARRAY(SELECT g.seq FROM unnest(v_seqs, v_pays) g(seq, pay) WHERE g.pay = v_pay) END);
            END LOOP;
            v_taken := v_taken || v_seqs;
            v_left := v_left - cardinality(v_seqs);
            IF v_top > v_clock THEN
                v_clock := v_top;
                UPDATE fairlane.domain SET clock = v_clock WHERE id = p_domain;
            END IF;
        END IF;
        IF v_gone IS NOT NULL THEN
            -- The end of a bound job can open the gate of another, in another queue. These locks are out of order, but seldom
            -- needed, and a call that collides is repeated.
            IF EXISTS (SELECT 1 FROM fairlane.live l WHERE l.seq = ANY (v_gone) AND NOT l.plain) THEN
                PERFORM fairlane.lock_for(v_gone);
            END IF;
            FOREACH v_seq IN ARRAY v_gone LOOP
                PERFORM fairlane.expire(v_seq, m);
            END LOOP;
            v_expired := v_expired + cardinality(v_gone);
            -- Look again, but not without end.
            EXIT WHEN v_expired >= 100;
        END IF;
    END LOOP;
    RETURN v_taken;
END $$;

-- Admit what was stored without the locks of its queue. Sticky jobs and those for one worker are left to the granter: they
-- need the lock of their pool.
CREATE FUNCTION fairlane.admit_arriving(p_queues integer[], p_limit integer, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM fairlane.let_in(ARRAY(
        SELECT l.seq FROM unnest(p_queues) g CROSS JOIN LATERAL (
            SELECT a.seq FROM fairlane.live a WHERE a.queue = g AND a.state = 0 ORDER BY a.seq LIMIT p_limit FOR UPDATE SKIP LOCKED) l
        CROSS JOIN LATERAL (SELECT y.sticky, y.direct FROM fairlane.job y WHERE y.seq = l.seq OFFSET 0) j
        WHERE j.sticky IS NULL AND j.direct IS NULL ORDER BY l.seq), m);
END $$;

-- What a plain enqueue does when it found the locks taken: the jobs are stored, and now it waits for them to be admitted,
-- by itself or by whoever had the locks.
CREATE FUNCTION fairlane.admit_queues(p_queues text[], p_now double precision DEFAULT NULL, p_lease double precision DEFAULT NULL,
    OUT topics text[])
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off SET join_collapse_limit = 1 SET from_collapse_limit = 1
SET enable_material = off SET lock_timeout = '200ms' AS $$
DECLARE
    v_queues integer[];
BEGIN
    topics := '{}';
    v_queues := ARRAY(SELECT y.id FROM fairlane.queue y WHERE y.name = ANY (p_queues)
        AND (SELECT a.seq FROM fairlane.live a WHERE a.queue = y.id AND a.state = 0 ORDER BY a.seq LIMIT 1) IS NOT NULL);
    IF cardinality(v_queues) > 0 THEN
        PERFORM fairlane.lock_some(NULL, v_queues);
        PERFORM fairlane.admit_arriving(v_queues, 1000, fairlane.moment_of(p_now, p_lease));
        topics := fairlane.topics();
    END IF;
END $$;

-- Start jobs for a session, ask by ask. An ask without a queue is for the session's own inbox.
CREATE FUNCTION fairlane.claim_jobs(p_session text, p_number bigint, p_total integer, p_queues text[], p_classes smallint[],
    p_mosts integer[], p_belows integer[], p_now double precision, p_lease double precision) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    s fairlane.session;
    q fairlane.queue;
    d record;
    m fairlane.moment;
    v_space integer := fairlane.space();
    v_inbox text;
    v_locked integer[];
    v_arriving boolean;
    v_sources integer[];
    v_taken bigint[] := '{}';
    v_some bigint[];
    v_left integer := p_total;
    v_most integer;
    v_share integer;
    v_running integer[];
    v_domains bigint[];
    v_limit integer;
    i integer;
    k integer;
    c integer;
BEGIN
    SELECT * INTO s FROM fairlane.session x WHERE x.id = p_session;
    IF s.state IS DISTINCT FROM 'live' OR p_number < s.claim THEN
        PERFORM fairlane.check_claim(s, p_number);
    END IF;
    IF p_number = s.claim THEN
        RETURN ARRAY(SELECT l.seq FROM fairlane.live l WHERE l.session = s.seq AND l.session IS NOT NULL AND l.claim = p_number
                     ORDER BY l.class, l.arrival);
    END IF;
    IF s.state <> 'live' OR s.slots IS NULL OR s.idx IS NULL OR p_total <= 0 THEN
        RETURN v_taken;
    END IF;
    v_inbox := s.pool || '/' || s.idx;
    -- Only queues in which there is something to start are locked: an idle worker disturbs nobody.
    -- `sources`: the classes, twice their number, and one more for the inbox.
    SELECT array_agg(DISTINCT x.queue), bool_or(x.source IS NULL), array_agg(x.source) INTO v_locked, v_arriving, v_sources FROM (
        SELECT y.id AS queue, NULL::integer AS source FROM fairlane.queue y WHERE y.name = ANY (p_queues) AND NOT y.paused
        AND (SELECT a.seq FROM fairlane.live a WHERE a.queue = y.id AND a.state = 0 ORDER BY a.seq LIMIT 1) IS NOT NULL
        UNION ALL
        SELECT y.id, 2 * z.class FROM fairlane.queue y CROSS JOIN LATERAL (SELECT w.class FROM fairlane.domain w
            WHERE w.inbox = '' AND w.class = ANY ('{0,1,2}') AND w.queue = y.id AND fairlane.next_flow(w.id, w.clock) IS NOT NULL
            OFFSET 0) z
        WHERE y.name = ANY (p_queues) AND NOT y.paused
        UNION ALL
        SELECT z.queue, 2 * z.class + 1 FROM fairlane.domain z WHERE z.inbox = v_inbox AND array_position(p_queues, NULL) IS NOT NULL
        AND fairlane.next_flow(z.id, z.clock) IS NOT NULL) x;
    IF v_locked IS NULL THEN
        RETURN v_taken;
    END IF;
    IF cardinality(v_locked) = 1 THEN
        PERFORM pg_advisory_xact_lock_shared(v_space, 0), pg_advisory_xact_lock(v_space, v_locked[1]);
    ELSE
        PERFORM fairlane.lock_some(NULL, v_locked);
    END IF;
    SELECT * INTO s FROM fairlane.session x WHERE x.id = p_session FOR UPDATE;
    IF s.state IS DISTINCT FROM 'live' OR p_number <= s.claim THEN
        PERFORM fairlane.check_claim(s, p_number);
        RETURN v_taken;
    END IF;
    m.now := coalesce(p_now, extract(epoch FROM clock_timestamp()));
    m.lease := coalesce(p_lease, m.now);
    IF v_arriving THEN
        PERFORM fairlane.admit_arriving(v_locked, 1000, m);
        v_sources := NULL;  -- perhaps there are others now
    END IF;
    v_running := ARRAY[s.running_high, s.running_normal, s.running_low];
    FOR i IN 1 .. cardinality(p_mosts) LOOP
        EXIT WHEN v_left <= 0;
        c := p_classes[i];
        CONTINUE WHEN v_sources IS NOT NULL AND 2 * c + (p_queues[i] IS NULL)::integer <> ALL (v_sources);
        v_most := least(p_mosts[i], v_left,
            fairlane.room(s.slots, s.reserved_high, s.reserved_normal, v_running[1], v_running[2], v_running[3], c));
        IF p_belows[i] IS NOT NULL THEN
            v_most := least(v_most, p_belows[i] - v_running[c + 1]);
        END IF;
        CONTINUE WHEN v_most <= 0;
        IF p_queues[i] IS NULL THEN
            -- The inbox holds jobs of any queue: the queues take turns, in equal shares and then for the rest.
            SELECT array_agg(x.id ORDER BY x.id) INTO v_domains FROM fairlane.domain x WHERE x.inbox = v_inbox AND x.class = c
            AND x.queue = ANY (v_locked)
            AND fairlane.next_flow(x.id, x.clock) IS NOT NULL;
        ELSE
            SELECT array_agg(x.id) INTO v_domains FROM fairlane.domain x WHERE x.inbox = '' AND x.class = c
            AND x.queue = (SELECT y.id FROM fairlane.queue y WHERE y.name = p_queues[i]) AND x.queue = ANY (v_locked);
        END IF;
        CONTINUE WHEN v_domains IS NULL;
        k := cardinality(v_domains);
        IF k > 1 THEN
            v_domains := v_domains[p_number % k + 1 :] || v_domains[: p_number % k];
        END IF;
        v_share := (v_most + k - 1) / k;
        FOREACH v_limit IN ARRAY CASE WHEN k > 1 THEN ARRAY[v_share, v_most] ELSE ARRAY[v_most] END LOOP
            FOR d IN SELECT g.id, (SELECT x.queue FROM fairlane.domain x WHERE x.id = g.id) AS queue
                     FROM unnest(v_domains) WITH ORDINALITY g(id, ord) ORDER BY g.ord LOOP
                EXIT WHEN v_most <= 0;
                SELECT * INTO q FROM fairlane.queue x WHERE x.id = d.queue;
                CONTINUE WHEN q.paused;
                v_some := fairlane.take(d.id,
                    CASE WHEN q.slots IS NULL THEN least(v_limit, v_most) ELSE least(v_limit, v_most, fairlane.queue_room(q, c)) END,
                    s.seq, p_number, m);
                k := cardinality(v_some);
                CONTINUE WHEN k = 0;
                v_taken := v_taken || v_some;
                v_most := v_most - k;
                v_left := v_left - k;
                v_running[c + 1] := v_running[c + 1] + k;
                INSERT INTO fairlane.tally (queue, class, pending, running) VALUES (d.queue, c, -k, k);
            END LOOP;
        END LOOP;
    END LOOP;
    IF cardinality(v_taken) > 0 THEN
        -- Only then: an idle worker asks once a second, and nothing is lost when an empty answer is not repeated.
        UPDATE fairlane.session SET claim = p_number, running_high = v_running[1], running_normal = v_running[2],
            running_low = v_running[3] WHERE seq = s.seq;
    END IF;
    RETURN v_taken;
END $$;

CREATE FUNCTION fairlane.check_claim(s fairlane.session, p_number bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF s.seq IS NULL OR s.state NOT IN ('live', 'stopping') THEN
        PERFORM fairlane.refuse('FL006', 'this session is unknown, ended or declared dead; register a new one');
    ELSIF p_number < s.claim THEN
        PERFORM fairlane.refuse('FL005', format('claim %s is older than the last one, %s', p_number, s.claim));
    END IF;
END $$;

-- How many more jobs of a class a queue may run. What others finish at this moment still counts: never too many.
CREATE FUNCTION fairlane.queue_room(q fairlane.queue, p_class integer) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    r bigint[];
BEGIN
    SELECT ARRAY[coalesce(sum(t.running - t.slotless) FILTER (WHERE t.class = 0), 0),
        coalesce(sum(t.running - t.slotless) FILTER (WHERE t.class = 1), 0),
        coalesce(sum(t.running - t.slotless) FILTER (WHERE t.class = 2), 0)] INTO r FROM fairlane.tally t WHERE t.queue = q.id;
    RETURN fairlane.room(q.slots, q.reserved_high, q.reserved_normal, r[1], r[2], r[3], p_class);
END $$;
