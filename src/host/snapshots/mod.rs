//! Snapshots of the owner's database and archives of all of the owner's data: [`backup`] takes and verifies them,
//! [`staging`] loads them into a scratch database, and [`restore`] replaces the live database with them.

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
