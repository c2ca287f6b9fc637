//! The kernel's records: what was dispatched, what it cost, which files were changed.
//!
//! Here is their form and how they are written, counted and read; who lets a dispatch happen is the gateway's matter.
//! The records are JSON, one object a line, in the owner's `system/logs`. Their days are those of `costLimits.timeZone`.

pub mod book;
pub mod calendar;
pub mod entry;
pub mod files;
pub mod find;
pub mod jsonl;
pub mod ledger;
pub mod limits;
pub mod money;
pub mod names;
pub mod page;
pub mod seals;

pub mod tail;
pub mod writer;
