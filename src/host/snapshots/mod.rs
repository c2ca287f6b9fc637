//! Snapshots of the owner's database and archives of everything that is the owner's: how they are made and verified
//! ([`backup`]), loaded beside the database ([`staging`]) and put in its place ([`restore`]).

pub mod archive;
pub mod backup;
pub mod backup_progress;
pub mod check_log;
pub mod database_identity;
pub mod held_snapshot;
pub mod restore;
pub mod restore_marker;
pub mod roles;
pub mod row_counts;
pub mod side_database;
pub mod staging;
