//! The audit of the home's files: the real watcher and hooks, real shell commands between them, and what the record says.

mod campaign;
mod changes;
mod forged;
mod home;
mod life;
mod shortage;
