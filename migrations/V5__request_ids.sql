-- The request that an operation was filed for; empty where the platform filed it by itself before it named its rounds.

ALTER TABLE operations ADD COLUMN request_id text NOT NULL DEFAULT '';
