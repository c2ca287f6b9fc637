-- Named operators of the control API. A token is stored as its SHA-256 alone. After a rotation the token before stays
-- valid until `previous_expires_at`; earlier ones are forgotten.
CREATE TABLE operators (
    name                 text PRIMARY KEY,
    scopes               text[] NOT NULL CHECK (cardinality(scopes) > 0),
    token_id             uuid NOT NULL UNIQUE,
    token_hash           bytea NOT NULL,
    expires_at           timestamptz NOT NULL,
    -- To within some minutes.
    last_used_at         timestamptz,
    previous_token_id    uuid UNIQUE,
    previous_token_hash  bytea,
    previous_expires_at  timestamptz,
    previous_used_at     timestamptz,
    created_at           timestamptz NOT NULL DEFAULT clock_timestamp(),
    created_by           text NOT NULL,
    rotated_at           timestamptz,
    revoked_at           timestamptz
);
CREATE INDEX operators_ended ON operators (least(revoked_at, expires_at));

-- Pages of the audit, with and without a filter.
CREATE INDEX operator_audit_page ON operator_audit (at, audit_id);
CREATE INDEX operator_audit_actor ON operator_audit (actor, at, audit_id);
CREATE INDEX operator_audit_action ON operator_audit (action, at, audit_id);
CREATE INDEX operator_audit_target ON operator_audit (target, at, audit_id);
DROP INDEX operator_audit_at;
