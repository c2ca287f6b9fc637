ALTER TABLE user_machines
    -- The provider's actions that make and start the server, in their order, until each is known to have ended.
    ADD COLUMN create_actions bigint[] NOT NULL DEFAULT '{}';
