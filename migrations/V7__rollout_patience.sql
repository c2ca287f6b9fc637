-- How long a rollout waits for a host that it asked: what is counted besides the asking.

ALTER TABLE rollout_machines
    -- When its rollout last went on after a pause: the count begins anew.
    ADD COLUMN resumed_at timestamptz,
    -- The last heartbeat since it was asked that said that it is at an update.
    ADD COLUMN updating_at timestamptz;
