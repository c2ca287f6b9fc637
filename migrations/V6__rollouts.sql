-- Updates of hosts: what each said of its last one, and rollouts over many.

ALTER TABLE user_machines
    -- As the host tells it: {version, outcome, stage, error?, at}.
    ADD COLUMN last_update jsonb,
    -- Its host is at an update: what it runs now is not settled.
    ADD COLUMN updating boolean NOT NULL DEFAULT false;

CREATE TABLE rollouts (
    rollout_id     uuid PRIMARY KEY,
    image_version  text NOT NULL,
    state          text NOT NULL CHECK (state IN ('running', 'paused', 'stopped', 'aborted', 'succeeded')),
    -- Why it stopped.
    why            text,
    canary         integer NOT NULL CHECK (canary >= 0),
    batch_size     integer NOT NULL CHECK (batch_size > 0),
    max_failures   integer NOT NULL CHECK (max_failures > 0),
    request_id     text NOT NULL,
    created_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at       timestamptz
);

-- One at a time: two would ask one machine for two releases.
CREATE UNIQUE INDEX rollouts_open ON rollouts ((true)) WHERE state IN ('running', 'paused');

CREATE TABLE rollout_machines (
    rollout_id     uuid NOT NULL REFERENCES rollouts (rollout_id),
    machine_id     uuid NOT NULL REFERENCES user_machines (machine_id),
    -- The canary is batch 0.
    batch          integer NOT NULL,
    state          text NOT NULL CHECK (state IN ('waiting', 'asked', 'updated', 'failed', 'skipped')),
    error          text,
    -- What the host had said of its last update when it was asked: only another word counts.
    update_before  jsonb,
    asked_at       timestamptz,
    nudged_at      timestamptz,
    ended_at       timestamptz,
    PRIMARY KEY (rollout_id, machine_id)
);
CREATE INDEX rollout_machines_asked ON rollout_machines (machine_id) WHERE state = 'asked';
