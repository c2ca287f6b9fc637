//! The gateway's own routes, one file per group with its handlers and their descriptions. The bridge and app routes are
//! in their own directories.

pub mod backup_progress;
pub mod dispatch;
pub mod files;
pub mod health;
pub mod internal;
pub mod limits;
pub mod log_lines;
pub mod metrics;
pub mod quiesce;
pub mod records;
pub mod side_database;
pub mod usage;
