-- Tokens of the HTTP service.

-- Store a token unless its id is taken; `token`: what is stored. The caller checks whether that is the same token.
CREATE FUNCTION fairlane.add_token(p_id text, p_name text, p_digest bytea, p_scopes text, p_queues text, p_lane_prefix text,
    p_expires double precision, p_hint text, p_now double precision DEFAULT NULL, p_lease double precision DEFAULT NULL,
    OUT token fairlane.token)
LANGUAGE plpgsql AS $$
DECLARE
    m fairlane.moment := fairlane.moment_of(p_now, p_lease);
BEGIN
    INSERT INTO fairlane.token VALUES (p_id, p_name, p_digest, p_scopes, p_queues, p_lane_prefix, m.now, m.now + p_expires, NULL, p_hint)
    ON CONFLICT (id) DO NOTHING;
    SELECT * INTO token FROM fairlane.token t WHERE t.id = p_id;
END $$;

-- Revoke a token. `revoked`: whether this call did; NULL: there is no such token.
CREATE FUNCTION fairlane.revoke_token(p_id text, p_now double precision DEFAULT NULL, p_lease double precision DEFAULT NULL,
    OUT revoked boolean)
LANGUAGE plpgsql AS $$
DECLARE
    m fairlane.moment := fairlane.moment_of(p_now, p_lease);
BEGIN
    UPDATE fairlane.token t SET revoked_at = m.now WHERE t.id = p_id AND t.revoked_at IS NULL;
    revoked := FOUND;
    IF NOT FOUND AND NOT EXISTS (SELECT 1 FROM fairlane.token t WHERE t.id = p_id) THEN
        revoked := NULL;
    END IF;
END $$;
