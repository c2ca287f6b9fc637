-- Whose signature on a release a host believes, as its heartbeats report it: the number of the key set, and the ids of its
-- keys. Unknown for a host whose release does not report it.
ALTER TABLE user_machines
    ADD COLUMN bundle_keys_sequence bigint CHECK (bundle_keys_sequence >= 0),
    ADD COLUMN bundle_key_ids text[] CHECK (cardinality(bundle_key_ids) <= 16);
