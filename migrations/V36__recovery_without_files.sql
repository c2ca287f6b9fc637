-- Recoveries that start a machine without the owner's files, and why a server is kept.

ALTER TABLE user_machines
    -- Whether the machine restores the owner's files at its first boot.
    ADD COLUMN restore_files boolean NOT NULL DEFAULT true,
    -- Whether `unsaved_since` is set only because a later machine started without the owner's files.
    ADD COLUMN unsaved_files boolean NOT NULL DEFAULT false;
