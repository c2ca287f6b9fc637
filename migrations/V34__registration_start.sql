-- When the server was recorded, which starts the registration period. NULL if an earlier release recorded it. Not in one
-- migration with `operations`: an earlier release that still runs locks machines before their operations.
ALTER TABLE user_machines ADD COLUMN registration_started_at timestamptz;
