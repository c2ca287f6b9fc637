-- The last sign-out of each user. It ends what was opened before: routers compare the number with that in an app token, and
-- close the user's streams. A row is needed for as long as an older token could be valid.
CREATE SEQUENCE sign_out_generations;
CREATE TABLE sign_outs (
    idp_user_id  text PRIMARY KEY,
    -- Greater than that of every earlier sign-out, of any user.
    generation   bigint NOT NULL,
    changed_at   timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX sign_outs_changed ON sign_outs (changed_at);

CREATE TRIGGER sign_outs_changed BEFORE INSERT OR UPDATE ON sign_outs FOR EACH ROW EXECUTE FUNCTION sessions_changed();
