//! A machine's records, written by a process that may be killed at any moment.

mod usage_after_kills;
mod sum;
