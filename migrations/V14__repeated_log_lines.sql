-- A step that fails again and again in the same way is one line with a count: a deletion that was retried for a month had
-- 43,200 lines.
ALTER TABLE operation_log
    -- How often the line was repeated after the first time, and when last.
    ADD COLUMN repeats integer NOT NULL DEFAULT 0,
    ADD COLUMN repeated_at timestamptz;

-- The age of a step is counted from the first line that says that it was begun.
CREATE INDEX operation_log_begun ON operation_log (operation_id, step, at) WHERE outcome = 'begun';
