-- Until when a process may be pruning the slot's repository; NULL if none is. A past time shows that the process was killed,
-- so the slot is due again.
ALTER TABLE file_keys ADD COLUMN prune_claimed_until timestamptz;
