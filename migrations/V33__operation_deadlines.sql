-- An operation's deadlines do not count the time in which the provider's account blocks it.
ALTER TABLE operations
    -- When the first of the step's consecutive failures occurred; NULL if the last attempt did not fail, or failed because of
    -- the provider's account.
    ADD COLUMN failing_since timestamptz,
    -- When the provider's account last stopped blocking the operation.
    ADD COLUMN account_unblocked_at timestamptz;
