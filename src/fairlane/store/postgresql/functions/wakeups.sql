-- Topics that a call collects in its transaction. The caller publishes them after the commit.

-- Add a topic. A call that moves thousands of jobs collects the topics of only some of them: hints may be lost, and workers
-- poll.
CREATE FUNCTION fairlane.notify(p_topic text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_topics text := current_setting('fairlane_step.topics', true);
BEGIN
    IF length(v_topics) > 50000 THEN
        RETURN;
    END IF;
    PERFORM set_config('fairlane_step.topics', concat(v_topics, p_topic, E'\n'), true);
END $$;

CREATE FUNCTION fairlane.topics() RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    v_topics text := current_setting('fairlane_step.topics', true);
BEGIN
    IF v_topics IS NULL OR v_topics = '' THEN
        RETURN '{}';
    END IF;
    PERFORM set_config('fairlane_step.topics', '', true);
    RETURN ARRAY(SELECT DISTINCT t FROM unnest(string_to_array(rtrim(v_topics, E'\n'), E'\n')) t);
END $$;

-- Drop the topics of queues that this call has collected, and keep all others.
CREATE FUNCTION fairlane.drop_queue_topics() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_topic text;
BEGIN
    FOREACH v_topic IN ARRAY fairlane.topics() LOOP
        IF NOT starts_with(v_topic, 'queue:') THEN
            PERFORM fairlane.notify(v_topic);
        END IF;
    END LOOP;
END $$;

-- Whether a queue has a job of this class that is claimable, or will be as soon as a claim admits it. Then its workers were
-- notified of that one, or are busy, and need not be notified of another. The caller holds the lock of the queue, at least in
-- shared mode, until it commits: so no claim that does not see the caller's job can have started the other one.
CREATE FUNCTION fairlane.has_waiting(p_queue integer, p_class smallint) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    RETURN EXISTS (SELECT 1 FROM fairlane.domain d
            WHERE d.inbox = '' AND d.class = p_class AND d.queue = p_queue AND fairlane.next_flow(d.id) IS NOT NULL)
        OR EXISTS (SELECT 1 FROM (SELECT a.seq, a.class, a.due FROM fairlane.active_job a
                WHERE a.queue = p_queue AND a.state = STATE.ARRIVING ORDER BY a.seq LIMIT 100) x
            CROSS JOIN LATERAL (SELECT y.sticky, y.direct FROM fairlane.job y WHERE y.seq = x.seq OFFSET 0) j
            WHERE x.class = p_class AND x.due IS NULL AND j.sticky IS NULL AND j.direct IS NULL);
END $$;

-- Notify the workers that could start a job: all that serve the queue, or the one whose inbox it is in.
CREATE FUNCTION fairlane.notify_ready(p_queue integer, p_inbox text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF p_inbox = '' OR left(p_inbox, 1) = '~' THEN
        PERFORM fairlane.notify('queue:' || q.name) FROM fairlane.queue q WHERE q.id = p_queue;
    ELSE
        PERFORM fairlane.notify('worker:' || p_inbox);
    END IF;
END $$;

-- A running job leaves: if its queue has a limit, another job may start now, in any inbox.
CREATE FUNCTION fairlane.notify_room(p_queue integer) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM fairlane.queue q WHERE q.id = p_queue AND q.slots IS NOT NULL) THEN
        PERFORM fairlane.notify_waiting(p_queue);
    END IF;
END $$;

CREATE FUNCTION fairlane.notify_waiting(p_queue integer) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM fairlane.notify_ready(p_queue, '');
    PERFORM fairlane.notify('worker:' || d.inbox) FROM fairlane.domain d WHERE d.queue = p_queue AND d.inbox <> ''
        AND fairlane.next_flow(d.id) IS NOT NULL;
END $$;

-- The jobs behind this one in its limited lane have moved up.
CREATE FUNCTION fairlane.notify_lane(l fairlane.active_job) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM fairlane.notify('place:' || q.name || '/' || j.lane)
    FROM fairlane.job j, fairlane.queue q WHERE j.seq = l.seq AND j.lane IS NOT NULL AND q.id = l.queue;
END $$;
