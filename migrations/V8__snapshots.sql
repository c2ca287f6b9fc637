-- Snapshots: what a host says of its last looks at them, and the one that a machine was asked to begin with.

ALTER TABLE user_machines
    -- By kind: verify, drill.
    ADD COLUMN checks jsonb,
    -- The key of a snapshot; null for the one that the pointer names.
    ADD COLUMN restore_snapshot text;
