-- What the platform reads again and again is read by an index, so that its cost does not grow with machines that have
-- ended. No index names a column that a heartbeat writes: heartbeats stay heap-only updates.

-- Boots whose registration has expired, and previews whose time is over.
CREATE INDEX user_machines_registration_expiry ON user_machines (registration_expires_at)
    WHERE status IN ('provisioning', 'recovering') AND deleted_at IS NULL AND retired_at IS NULL;
CREATE INDEX user_machines_preview_expiry ON user_machines (preview_expires_at)
    WHERE kind = 'preview' AND deleted_at IS NULL AND retired_at IS NULL;

-- Servers that were missing, of which the provider's list may show some again.
CREATE INDEX user_machines_missing_server ON user_machines (provider_server_id)
    WHERE server_missing_since IS NOT NULL;

-- The digest of every router's poll.
CREATE INDEX user_machines_routed ON user_machines (machine_id) INCLUDE (change_seq)
    WHERE deleted_at IS NULL AND retired_at IS NULL;

CREATE INDEX user_machines_replaced_by ON user_machines (replaced_by) WHERE replaced_by IS NOT NULL;
