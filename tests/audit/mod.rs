//! The audit of the home's files: the real watcher and hooks, real shell commands, and the resulting record.

mod random_scripts;
mod changes;
mod forged_reports;
mod home;
mod kernel_limits;
mod interruptions;
