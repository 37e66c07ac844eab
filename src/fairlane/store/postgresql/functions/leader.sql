-- Leadership: one session at a time holds the term, and a pass of the leader checks that its term still holds.

-- Reject a leader whose term has ended; NULL is no term and passes. `p_hold`: no other session can lead before this step is
-- over. A pass that finds nothing to do does not hold it, so that an idle pass writes nothing; and it is held last, so that the
-- leader can renew its term while a pass waits for locks.
CREATE FUNCTION fairlane.check_term(p_term bigint, p_hold boolean, m fairlane.moment) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF p_term IS NULL THEN
        RETURN;
    END IF;
    IF p_hold THEN
        PERFORM 1 FROM fairlane.leader r WHERE r.one = 1 FOR SHARE;
    END IF;
    IF NOT EXISTS (SELECT 1 FROM fairlane.leader r WHERE r.one = 1 AND r.term = p_term AND r.session IS NOT NULL AND r.expires > m.lease) THEN
        PERFORM fairlane.refuse('FL007', format('term %s has ended; stop leading and stand again', p_term));
    END IF;
END $$;

-- Stand for leadership (`p_term` NULL), or extend a term. `number` NULL: another session leads, or the term is over.
CREATE FUNCTION fairlane.lead(p_session text, p_seconds double precision, p_term bigint, p_now double precision DEFAULT NULL,
    p_lease double precision DEFAULT NULL, OUT number bigint, OUT topics text[])
LANGUAGE plpgsql AS $$
DECLARE
    m fairlane.moment := fairlane.moment_of(p_now, p_lease);
    r fairlane.leader;
    v_over boolean;
BEGIN
    topics := '{}';
    -- First without a lock: a standby asks every two seconds, and writes nothing while another session leads.
    SELECT * INTO r FROM fairlane.leader x WHERE x.one = 1;
    IF r.session <> p_session AND r.expires > m.lease THEN
        RETURN;
    END IF;
    IF r.one IS NULL THEN
        IF p_term IS NOT NULL THEN
            RETURN;
        END IF;
        INSERT INTO fairlane.leader (term, session, lease, expires) VALUES (0, NULL, 0, 0) ON CONFLICT (one) DO NOTHING;
    END IF;
    SELECT * INTO r FROM fairlane.leader x WHERE x.one = 1 FOR UPDATE;
    m := fairlane.moment_of(p_now, p_lease);
    v_over := r.session IS NULL OR r.expires <= m.lease;
    IF p_term IS NULL AND v_over THEN
        number := r.term + 1;
    ELSIF NOT v_over AND r.session = p_session AND coalesce(p_term, r.term) = r.term THEN
        number := r.term;  -- extended; or it leads already, and the reply to its call was lost
    ELSE
        RETURN;
    END IF;
    UPDATE fairlane.leader SET term = number, session = p_session, lease = p_seconds, expires = m.lease + p_seconds WHERE one = 1;
END $$;

-- Give up a term; its number stays, so that the next one is higher.
CREATE FUNCTION fairlane.resign(p_term bigint, p_now double precision DEFAULT NULL, p_lease double precision DEFAULT NULL,
    OUT topics text[]) LANGUAGE plpgsql AS $$
BEGIN
    UPDATE fairlane.leader SET session = NULL WHERE one = 1 AND term = p_term AND session IS NOT NULL;
    IF FOUND THEN
        PERFORM fairlane.notify('leader');
    END IF;
    topics := fairlane.topics();
END $$;
