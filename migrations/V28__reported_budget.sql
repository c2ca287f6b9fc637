-- Calls that the provider reports as left are granted even if the learnt rate is too low.
CREATE OR REPLACE FUNCTION provider_reserve(
    of_account text, want integer, back integer, seen_left double precision, seen_capacity double precision,
    seen_per_second double precision, seen_age double precision,
    OUT granted integer, OUT wait_seconds double precision
) LANGUAGE plpgsql AS $$
DECLARE
    rate_window CONSTANT interval := '30 seconds';
    b provider_budget;
    moment timestamptz;
    available double precision;
BEGIN
    INSERT INTO provider_budget (account) VALUES (of_account) ON CONFLICT DO NOTHING;
    SELECT * INTO b FROM provider_budget WHERE account = of_account FOR UPDATE;
    moment := clock_timestamp();
    b.capacity := coalesce(seen_capacity, b.capacity);
    IF seen_per_second > 0 THEN
        IF b.rate_window_at IS NULL OR moment - b.rate_window_at >= 2 * rate_window THEN
            b.previous_rate := NULL;
            b.window_rate := NULL;
            b.rate_window_at := moment;
        ELSIF moment - b.rate_window_at >= rate_window THEN
            b.previous_rate := b.window_rate;
            b.window_rate := NULL;
            b.rate_window_at := moment;
        END IF;
        b.window_rate := greatest(b.window_rate, seen_per_second);
        b.per_second := greatest(b.window_rate, b.previous_rate);
    END IF;
    available := b.tokens + back + greatest(extract(epoch FROM moment - b.at), 0) * b.per_second;
    IF seen_left IS NOT NULL THEN
        seen_left := seen_left + seen_age * b.per_second;
        -- What was granted out of the first few may still be in flight.
        available := CASE WHEN b.learnt THEN least(available, seen_left) ELSE seen_left - 4 END;
        -- A rate that was learnt too low must not stop all calls: what the provider reports counts, except for what was
        -- granted to others and is not made yet.
        available := greatest(available, seen_left - greatest(b.capacity * 0.25, 64));
        b.learnt := true;
    END IF;
    -- The provider's bucket does not grow beyond its capacity while calls that were granted are still to be made: a
    -- quarter is left to those.
    available := least(available, CASE WHEN b.learnt THEN greatest(b.capacity * 0.75, 1) ELSE b.capacity END);
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
        learnt = b.learnt, at = moment, rate_window_at = b.rate_window_at, window_rate = b.window_rate,
        previous_rate = b.previous_rate WHERE account = of_account;
END $$;
