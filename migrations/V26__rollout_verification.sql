-- Whether the release of a rollout is verified on the machines that got it first, and the result.
ALTER TABLE rollouts
    ADD COLUMN verify boolean NOT NULL DEFAULT false,
    ADD COLUMN verification jsonb,
    -- A process verifies it until then.
    ADD COLUMN verifying_until timestamptz;
