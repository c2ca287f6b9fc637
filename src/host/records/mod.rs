//! Records in the owner's `system/logs`: dispatches and their cost, file changes, and machine events.
//!
//! Defines the log entries, and writes, counts and reads them. Also reads the storage and backup logs written by other
//! modules. All log files except `activity.log` are JSON Lines. Days start at midnight in `costLimits.timeZone`.

pub mod backup;
pub mod calendar;
pub mod entry;
pub mod files;
pub mod find_interactions;
pub mod jsonl;
pub mod ledger;
pub mod limits;
pub mod log_file_names;
pub mod money;
pub mod page;
pub mod seals;
pub mod tail;
pub mod usage_store;
pub mod writer;
