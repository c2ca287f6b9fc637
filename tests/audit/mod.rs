//! The audit of the home's files: the real watcher and hooks, real shell commands, and the resulting record.

mod campaign;
mod changes;
mod forged;
mod home;
mod kernel_limits;
mod life;
