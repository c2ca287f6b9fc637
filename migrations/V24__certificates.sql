-- The certificate that a host presents, as its heartbeats report it. Unknown for a host whose release does not report it.
ALTER TABLE user_machines ADD COLUMN certificate jsonb;
