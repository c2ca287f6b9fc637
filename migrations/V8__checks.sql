-- What a host says of its last looks at snapshots: by kind (verify, drill).

ALTER TABLE user_machines
    ADD COLUMN checks jsonb;
