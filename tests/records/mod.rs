//! A machine's log files, written by a process that may be killed at any moment.

mod sum;
mod usage_after_kills;
