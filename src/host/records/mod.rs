//! The records in the owner's `system/logs`: dispatches, their cost, file changes, and events on the machine.
//!
//! This module defines the lines of the log files, and writes, counts and reads them. It also reads the logs of storage
//! and backups, which other modules write. All log files except `activity.log` have one JSON object per line. Days
//! begin at midnight in `costLimits.timeZone`.

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
