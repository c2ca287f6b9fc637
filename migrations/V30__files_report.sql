-- The state of the host's file backup, as last reported; NULL if its release has none.
ALTER TABLE user_machines ADD COLUMN files jsonb;
