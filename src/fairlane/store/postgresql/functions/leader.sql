-- Leadership: one session at a time holds the term, and each pass of the leader checks that its term is current.

-- Reject a leader whose term has ended; NULL stands for no term and passes. `p_hold`: lock the term, so that no other session
-- can take over before this transaction ends. A pass that finds nothing to do does not lock it, so that an idle pass writes
-- nothing; and it is locked last, so that the leader can renew its term while a pass waits for locks.
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

-- Stand for leadership (`p_term` NULL), or extend a term. Returns the current term: also that of another session to one that
-- stands, with what remains of it. `number` NULL: the term to be extended is over.
CREATE FUNCTION fairlane.lead(p_session text, p_seconds double precision, p_term bigint, p_now double precision DEFAULT NULL,
    p_lease double precision DEFAULT NULL, OUT number bigint, OUT session text, OUT lease double precision,
    OUT remaining double precision, OUT topics text[])
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    m fairlane.moment := fairlane.moment_of(p_now, p_lease);
    r fairlane.leader;
    v_over boolean;
BEGIN
    topics := '{}';
    -- Read first without a lock: a standby that tries while another session leads writes nothing.
    SELECT * INTO r FROM fairlane.leader x WHERE x.one = 1;
    IF r.session <> p_session AND r.expires > m.lease THEN
        IF p_term IS NULL THEN
            SELECT r.term, r.session, r.lease, r.expires - m.lease INTO number, session, lease, remaining;
        END IF;
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
        number := r.term;  -- extended, or it leads already: the reply to its call was lost
    ELSE
        IF p_term IS NULL THEN
            SELECT r.term, r.session, r.lease, r.expires - m.lease INTO number, session, lease, remaining;
        END IF;
        RETURN;
    END IF;
    session := p_session;
    lease := p_seconds;
    remaining := p_seconds;
    UPDATE fairlane.leader SET term = number, session = p_session, lease = p_seconds, expires = m.lease + p_seconds WHERE one = 1;
END $$;

-- Resign from a term; its number is kept, so that the next one is higher.
CREATE FUNCTION fairlane.resign(p_term bigint, p_now double precision DEFAULT NULL, p_lease double precision DEFAULT NULL,
    OUT topics text[]) LANGUAGE plpgsql AS $$
BEGIN
    UPDATE fairlane.leader SET session = NULL WHERE one = 1 AND term = p_term AND session IS NOT NULL;
    IF FOUND THEN
        PERFORM fairlane.notify('leader');
    END IF;
    topics := fairlane.topics();
END $$;
