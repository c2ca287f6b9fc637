-- The last rollback on a test slot is found among the failed updates.
CREATE INDEX rollout_machines_failed ON rollout_machines (machine_id) WHERE state = 'failed';
