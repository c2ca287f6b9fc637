-- Sessions of browsers on the two public hosts. Only hashes of the cookies are kept.

CREATE TABLE sessions (
    token_hash   bytea PRIMARY KEY,
    host         text NOT NULL CHECK (host IN ('app', 'code')),
    idp_user_id  text NOT NULL,
    -- The slot that the user chose; NULL for the default.
    slot         text,
    created_at   timestamptz NOT NULL DEFAULT now(),
    expires_at   timestamptz NOT NULL,
    revoked_at   timestamptz,
    -- Routers look for what changed in the last seconds, so that what they keep in memory stays true.
    changed_at   timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX sessions_user ON sessions (idp_user_id);
CREATE INDEX sessions_changed ON sessions (changed_at);

CREATE FUNCTION sessions_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.changed_at := clock_timestamp();
    PERFORM pg_notify('session_changed', '');
    RETURN NEW;
END $$;

CREATE TRIGGER sessions_changed BEFORE UPDATE ON sessions FOR EACH ROW EXECUTE FUNCTION sessions_changed();

-- One-time codes that hand a session from APP_HOST to CODE_HOST. The hash is over the code and the browser's own
-- nonce, so that a code works in the browser that asked for it and in no other.
CREATE TABLE session_codes (
    code_hash    bytea PRIMARY KEY,
    idp_user_id  text NOT NULL,
    slot         text,
    return_to    text NOT NULL,
    expires_at   timestamptz NOT NULL,
    used_at      timestamptz
);
