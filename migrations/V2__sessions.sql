-- Sessions of browsers on the two public hosts. Only hashes of the cookies are kept.

CREATE TABLE sessions (
    token_hash   bytea PRIMARY KEY,
    host         text NOT NULL CHECK (host IN ('app', 'code')),
    idp_user_id  text NOT NULL,
    -- The slot that the user chose; NULL for the default.
    slot         text,
    created_at   timestamptz NOT NULL DEFAULT now(),
    expires_at   timestamptz NOT NULL,
    revoked_at   timestamptz
);
CREATE INDEX sessions_user ON sessions (idp_user_id);

-- One-time codes that hand a session from APP_HOST to CODE_HOST.
CREATE TABLE session_codes (
    code_hash    bytea PRIMARY KEY,
    idp_user_id  text NOT NULL,
    slot         text,
    return_to    text NOT NULL,
    expires_at   timestamptz NOT NULL,
    used_at      timestamptz
);
