-- A whole snapshot of the machine that this one replaces which is newer than the one that this machine begins with: an operator
-- chose the older one.
ALTER TABLE user_machines ADD COLUMN unrestored_snapshot text;
