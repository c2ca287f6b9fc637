-- The key of each slot's file backups, sealed with a platform key. It is never deleted, so that it survives the slot's
-- machines and periods without any.
CREATE TABLE file_keys (
    idp_user_id text NOT NULL,
    slot        text NOT NULL,
    -- The fingerprint of the platform key.
    key_id      text NOT NULL,
    sealed      bytea NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- When a pruning of the slot's repository last began, and why it failed.
    pruned_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    prune_error text,
    PRIMARY KEY (idp_user_id, slot)
);
CREATE INDEX file_keys_key_id ON file_keys (key_id);
CREATE INDEX file_keys_pruned_at ON file_keys (pruned_at);
