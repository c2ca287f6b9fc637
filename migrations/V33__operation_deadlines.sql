-- An operation's deadlines do not count the time in which the provider's account blocks it.
ALTER TABLE operations
    -- When the first of the step's consecutive failures occurred; NULL if the last attempt did not fail, or failed because of
    -- the provider's account.
    ADD COLUMN failing_since timestamptz,
    -- When the provider's account last stopped blocking the operation.
    ADD COLUMN account_unblocked_at timestamptz;

-- When the server was recorded, which starts the registration period. NULL if an earlier release recorded it.
ALTER TABLE user_machines ADD COLUMN registration_started_at timestamptz;

-- An operator's name can be reused when the audit log no longer contains it: after its revocation, or the end of its last
-- token, and the retention period.
DROP INDEX operators_ended;
CREATE INDEX operators_ended ON operators (coalesce(revoked_at, greatest(expires_at, previous_expires_at)));
