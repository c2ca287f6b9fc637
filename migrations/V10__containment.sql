-- One failure stays one: keys that hosts acknowledge are no routes, and what has ended is deleted by an index.

-- A host's acknowledgement changes no route, so it takes no number: each one had every router read every route again.
-- Routers read the keys that were acknowledged in the last seconds instead. A router of the previous release signs with
-- the oldest active key until it reads its routes again, which every host has.
DROP TRIGGER user_machines_changed ON user_machines;
CREATE TRIGGER user_machines_changed BEFORE UPDATE OF status, public_ipv4, https_port, tls_spki_sha256,
    retired_at, deleted_at ON user_machines FOR EACH ROW EXECUTE FUNCTION user_machines_changed();

ALTER TABLE user_machines ADD COLUMN proof_kids_at timestamptz;
CREATE INDEX user_machines_proof_kids ON user_machines (proof_kids_at);

CREATE FUNCTION user_machines_acknowledged() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.proof_kids_at := clock_timestamp();
    RETURN NEW;
END $$;
CREATE TRIGGER user_machines_acknowledged BEFORE UPDATE OF proof_kids ON user_machines
    FOR EACH ROW EXECUTE FUNCTION user_machines_acknowledged();

-- By these the reconciler finds what has outlived its retention.
CREATE INDEX sessions_expired ON sessions (expires_at);
CREATE INDEX session_codes_expired ON session_codes (expires_at);
CREATE INDEX idempotency_keys_created ON idempotency_keys (created_at);
CREATE INDEX operations_ended ON operations (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX operator_audit_at ON operator_audit (at);

-- What is wrong with the fleet or the provider as a whole: one row each, shown by the fleet. Without an end of its own it
-- stands until it is cleared; a fuse that an operator has released lets work through until then.
CREATE TABLE fleet_alarms (
    alarm           text PRIMARY KEY,
    since           timestamptz NOT NULL DEFAULT clock_timestamp(),
    seen_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at      timestamptz,
    detail          jsonb NOT NULL DEFAULT '{}',
    released_until  timestamptz
);
