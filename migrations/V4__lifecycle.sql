-- Resizing, progress of a boot, the fleet's view, the reconciler, one rate budget, rotation of keys.

ALTER TABLE user_machines
    -- When a resize ordered the power on: only a heartbeat after it says that the host is back.
    ADD COLUMN power_ordered_at timestamptz,
    -- What a booting host said of its progress: [{stage, at}], the oldest first.
    ADD COLUMN boot_stages jsonb NOT NULL DEFAULT '[]',
    -- When the newest verified snapshot that this host told of was taken.
    ADD COLUMN backup_taken_at timestamptz,
    -- Since when the provider says that the server of this machine is not there.
    ADD COLUMN server_missing_since timestamptz;

UPDATE user_machines SET backup_taken_at = (last_backup ->> 'takenAt')::timestamptz
    WHERE last_backup ->> 'status' = 'success';

-- Labels every server, so that two platforms in one project of the provider tell theirs apart.
CREATE TABLE installation (
    only_one         boolean PRIMARY KEY DEFAULT true CHECK (only_one),
    installation_id  uuid NOT NULL DEFAULT gen_random_uuid()
);
INSERT INTO installation DEFAULT VALUES;

-- Servers that carry our label and belong to no machine that we know.
CREATE TABLE unknown_servers (
    server_id   bigint PRIMARY KEY,
    first_seen  timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- When a task that one process does for all was done last.
CREATE TABLE task_turns (
    task     text PRIMARY KEY,
    last_at  timestamptz NOT NULL
);

-- Since when every host that may still need an older proof key has acknowledged this one.
ALTER TABLE signing_keys ADD COLUMN acknowledged_at timestamptz;

-- The provider's rate limit as one bucket for all processes. It begins small: what the provider allows is learnt
-- from its first answers.
CREATE TABLE provider_budget (
    account       text PRIMARY KEY,
    tokens        double precision NOT NULL DEFAULT 4,
    capacity      double precision NOT NULL DEFAULT 4,
    per_second    double precision NOT NULL DEFAULT 1,
    learnt        boolean NOT NULL DEFAULT false,
    closed_until  timestamptz,
    at            timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- Takes up to `want` calls from the bucket, after giving `back` what was not used, and merging what the asker has seen of the provider: `seen_left` calls
-- left `seen_age` seconds ago. Many at a time only while there is plenty.
CREATE FUNCTION provider_reserve(
    of_account text, want integer, back integer, seen_left double precision, seen_capacity double precision,
    seen_per_second double precision, seen_age double precision,
    OUT granted integer, OUT wait_seconds double precision
) LANGUAGE plpgsql AS $$
DECLARE
    b provider_budget;
    moment timestamptz;
    available double precision;
BEGIN
    INSERT INTO provider_budget (account) VALUES (of_account) ON CONFLICT DO NOTHING;
    SELECT * INTO b FROM provider_budget WHERE account = of_account FOR UPDATE;
    moment := clock_timestamp();
    b.capacity := coalesce(seen_capacity, b.capacity);
    -- A reset in whole seconds makes the rate look lower than it is, never higher.
    b.per_second := CASE WHEN b.learnt THEN greatest(seen_per_second, b.per_second)
        ELSE coalesce(seen_per_second, b.per_second) END;
    available := b.tokens + back + greatest(extract(epoch FROM moment - b.at), 0) * b.per_second;
    IF seen_left IS NOT NULL THEN
        seen_left := seen_left + seen_age * b.per_second;
        -- What was given out of the first few may still be on its way.
        available := CASE WHEN b.learnt THEN least(available, seen_left) ELSE seen_left - 4 END;
        b.learnt := true;
    END IF;
    available := least(available, b.capacity);
    wait_seconds := 0;
    IF b.closed_until > moment THEN
        granted := 0;
        wait_seconds := extract(epoch FROM b.closed_until - moment);
    ELSIF available >= 1 THEN
        granted := greatest(1, least(want, floor(available / 8)::integer));
        available := available - granted;
    ELSE
        granted := 0;
        wait_seconds := (1 - available) / b.per_second;
    END IF;
    UPDATE provider_budget SET tokens = available, capacity = b.capacity, per_second = b.per_second,
        learnt = b.learnt, at = moment WHERE account = of_account;
END $$;
