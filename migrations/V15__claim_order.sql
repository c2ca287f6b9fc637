-- Operations at a step that has not started are claimed before those that poll.
CREATE INDEX operations_claimable ON operations ((coalesce(facts ->> 'begun' = step, false)), due_at)
    WHERE state = 'running' AND question IS NULL;
