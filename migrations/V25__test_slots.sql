-- Slots that are not a customer's: recoveries and rollbacks on them count as exercises.
ALTER TABLE slots ADD COLUMN is_test boolean NOT NULL DEFAULT false;
CREATE INDEX slots_test ON slots (idp_user_id, slot) WHERE is_test;
