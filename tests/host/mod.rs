//! Tests a machine's backup, restore, update, registration and heartbeat, with the real binary, a real PostgreSQL 16,
//! the kit's S3 server over HTTP, and real TLS.

mod apply;
mod backup;
mod bundle;
mod checks;
mod credentials;
mod export;
mod export_users;
mod faults;
mod gate;
mod hostile_archives;
mod identity;
mod large;
pub mod machine;
mod meta;
mod outage;
mod platform;
mod register;
mod roles;
mod round_trip;
mod side;
mod side_constraints;
mod side_dependents;
mod side_sequences;
mod sync;
mod tight_disk;
mod token_rollback;
mod token_rotation;
mod update;
mod update_fixture;
mod update_keys;
mod update_resume;
mod update_snapshot;
