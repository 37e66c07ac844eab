-- Topics that a call collects in its transaction. The caller publishes them once the transaction is committed.

-- Hints are collected in the transaction and published by the caller once it is committed.
-- A call that moves thousands of jobs collects the topics of a part of them: hints may be lost, and workers poll.
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

-- A worker may start a job: any worker of the queue, or the one whose inbox it is in.
CREATE FUNCTION fairlane.notify_ready(p_queue integer, p_inbox text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF p_inbox = '' OR left(p_inbox, 1) = '~' THEN
        PERFORM fairlane.notify('queue:' || q.name) FROM fairlane.queue q WHERE q.id = p_queue;
    ELSE
        PERFORM fairlane.notify('worker:' || p_inbox);
    END IF;
END $$;

-- A running job leaves: where its queue has a limit, another job may start now, in any inbox.
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
