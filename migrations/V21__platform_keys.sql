-- PLATFORM_KEY changes while two keys are in force. Keys are known by a fingerprint, which is no secret.
CREATE TABLE platform_keys (
    key_id           text PRIMARY KEY,
    -- The re-signing of the slots' fences with this key: the last slot that was done, and the end.
    fences_user      text,
    fences_slot      text,
    fences_signed_at timestamptz,
    -- Since when no stored thing needs another key.
    sole_since       timestamptz
);

-- Which keys each process has in force. Rows of processes that ended are deleted.
CREATE TABLE platform_processes (
    process_id   uuid PRIMARY KEY,
    key_id       text NOT NULL,
    other_key_id text,
    -- Since when it has renewed its row without a gap.
    steady_since timestamptz NOT NULL DEFAULT clock_timestamp(),
    seen_at      timestamptz NOT NULL DEFAULT clock_timestamp()
);
