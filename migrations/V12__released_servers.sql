-- An operator releases the unknown servers of that moment. Each is deleted when its own grace ends; one that appears later
-- is held back until it is released, too.
ALTER TABLE unknown_servers ADD COLUMN released_at timestamptz;
