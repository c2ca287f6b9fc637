-- An operator's name can be reused when the audit log no longer contains it: after its revocation, or the end of its last
-- token, and the retention period.
DROP INDEX operators_ended;
CREATE INDEX operators_ended ON operators (coalesce(revoked_at, greatest(expires_at, previous_expires_at)));
