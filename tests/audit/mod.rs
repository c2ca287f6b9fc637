//! Tests the audit of files in the home directory: the real watcher and hooks, real shell commands, and the file
//! audit's log (`audit.jsonl`).

mod changes;
mod forged_reports;
mod home;
mod interruptions;
mod kernel_limits;
mod random_scripts;
