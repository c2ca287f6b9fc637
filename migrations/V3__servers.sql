-- What is known of a machine's server at the provider beyond its id.

ALTER TABLE user_machines
    -- When a create was sent whose outcome is not known otherwise: until the provider has had time to show it, the
    -- server may exist.
    ADD COLUMN create_ordered_at timestamptz,
    -- When the provider confirmed that there is no server any more.
    ADD COLUMN server_deleted_at timestamptz,
    ADD COLUMN preview_expires_at timestamptz;

CREATE INDEX user_machines_leftover ON user_machines (machine_id)
    WHERE server_deleted_at IS NULL AND (deleted_at IS NOT NULL OR retired_at IS NOT NULL);
