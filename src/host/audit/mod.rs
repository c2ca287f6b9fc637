//! Audits file changes in the home directory. Agent hooks ([`hook`]) report tool calls to the watcher ([`watcher`])
//! over [`protocol`], and the watcher records who changed which file. It also reports changed paths to the file backup
//! ([`file_changes`]).

pub mod file_changes;
pub mod hook;
pub mod protocol;
pub mod watcher;
