ALTER TABLE user_machines
    -- The provider's action that makes and starts the server, until it is known to have ended.
    ADD COLUMN create_action_id bigint;
