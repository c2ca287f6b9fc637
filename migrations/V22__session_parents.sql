-- A session of the code host, and the code that opens it, end with the session of the app host that they come from. NULL: they
-- come from the identity provider's cookie.
ALTER TABLE sessions ADD COLUMN opened_by bytea;
ALTER TABLE session_codes ADD COLUMN opened_by bytea;
CREATE INDEX sessions_opened_by ON sessions (opened_by) WHERE opened_by IS NOT NULL;
CREATE INDEX session_codes_opened_by ON session_codes (opened_by) WHERE opened_by IS NOT NULL;
-- A sign-out ends the user's codes.
CREATE INDEX session_codes_user ON session_codes (idp_user_id);
