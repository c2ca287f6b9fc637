-- Tokens of hosts rotate. `upgrade_token_hash` is of the generation that the host last sent a heartbeat with; the one
-- before it is accepted until its end.
ALTER TABLE user_machines
    ADD COLUMN upgrade_token_generation integer NOT NULL DEFAULT 1 CHECK (upgrade_token_generation > 0),
    ADD COLUMN upgrade_token_rotated_at timestamptz NOT NULL DEFAULT now(),
    -- An operator wants a later generation than this one.
    ADD COLUMN upgrade_token_requested_at timestamptz,
    ADD COLUMN previous_token_hash bytea,
    ADD COLUMN previous_token_until timestamptz;

UPDATE user_machines SET upgrade_token_rotated_at = created_at;
