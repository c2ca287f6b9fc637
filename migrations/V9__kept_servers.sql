-- Nothing is destroyed before its successor has proven itself: servers that are kept, operations that ask, and the
-- release that a slot is to run.

ALTER TABLE user_machines
    -- When a power off of the replaced or deleted machine was ordered; the server may be on all the same.
    ADD COLUMN power_off_ordered_at timestamptz,
    -- The first healthy heartbeat after the registration: from then on the predecessor is kept for a bounded time.
    ADD COLUMN proven_at timestamptz,
    -- When the snapshot was taken that was made after the machine's writers had been stopped.
    ADD COLUMN final_backup_at timestamptz,
    -- Set where a machine left its slot without such a snapshot: no snapshot holds what was written since. Its server
    -- is kept until an operator accepts the loss.
    ADD COLUMN unsaved_since timestamptz,
    -- When an operator ordered that the kept server goes before its time.
    ADD COLUMN discard_ordered_at timestamptz,
    -- When an operator gave up the removal of the server: it stays at the provider, and it is theirs.
    ADD COLUMN removal_abandoned_at timestamptz,
    -- What the booting host last said of its restore: {stage, bytes, totalBytes, rows, totalRows}.
    ADD COLUMN boot_progress jsonb;

-- What ran before this migration has shown that it can.
UPDATE user_machines SET proven_at = heartbeat_at WHERE registered_at IS NOT NULL AND heartbeat_at > registered_at;

ALTER TABLE operations
    -- What the operator decided: {acceptLoss, replaceFirst, now}.
    ADD COLUMN options jsonb NOT NULL DEFAULT '{}',
    -- Set while the operation waits for a decision of an operator: {code, detail}. Its `due_at` is infinity then, so that
    -- a binary that does not know this column leaves it alone as well.
    ADD COLUMN question jsonb,
    -- When a step last changed what it has found out.
    ADD COLUMN progress_at timestamptz;

-- The release that the next machine of a slot starts with.
CREATE TABLE slot_releases (
    idp_user_id    text NOT NULL,
    slot           text NOT NULL,
    image_version  text NOT NULL,
    set_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (idp_user_id, slot)
);
INSERT INTO slot_releases (idp_user_id, slot, image_version)
    SELECT idp_user_id, slot, image_version FROM user_machines
    WHERE deleted_at IS NULL AND retired_at IS NULL AND registered_at IS NOT NULL;
