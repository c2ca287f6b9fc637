//! The kernel's records: dispatches, their cost, and file changes.
//!
//! This module defines their format and writes, counts and reads them; the gateway enforces the limits. Records are
//! JSON, one object per line, in the owner's `system/logs`. Days begin at midnight in `costLimits.timeZone`.

pub mod calendar;
pub mod entry;
pub mod files;
pub mod find_interactions;
pub mod jsonl;
pub mod ledger;
pub mod limits;
pub mod money;
pub mod page;
pub mod record_file_names;
pub mod seals;
pub mod usage_store;

pub mod tail;
pub mod writer;
