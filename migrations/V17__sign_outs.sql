-- The last sign-out of each user. It ends what was opened before: routers compare the number with that in an app token, and
-- close the user's streams. A row is needed for as long as a token from before could be believed.
CREATE SEQUENCE sign_out_generations;
CREATE TABLE sign_outs (
    idp_user_id    text PRIMARY KEY,
    -- Larger for each sign-out of all.
    generation     bigint NOT NULL,
    signed_out_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX sign_outs_time ON sign_outs (signed_out_at);

CREATE FUNCTION signed_out() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.signed_out_at := clock_timestamp();
    PERFORM pg_notify('session_changed', '');
    RETURN NEW;
END $$;

CREATE TRIGGER signed_out BEFORE INSERT OR UPDATE ON sign_outs FOR EACH ROW EXECUTE FUNCTION signed_out();
