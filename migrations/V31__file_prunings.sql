-- When a pruning of the slot's repository last ended. A pruning that never ends does not change it.
ALTER TABLE file_keys ADD COLUMN prune_ended_at timestamptz NOT NULL DEFAULT clock_timestamp();
