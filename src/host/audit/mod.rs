//! Auditing of the files in the home directory: agents' hooks ([`hook`]) report tool calls to the watcher
//! ([`watcher`]), which records who changed which file; [`protocol`] is the protocol between them. The watcher also
//! reports changed paths to the file backup ([`file_changes`]).

pub mod file_changes;
pub mod hook;
pub mod protocol;
pub mod watcher;
