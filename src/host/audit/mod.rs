//! The audit of the home's files: agents' hooks report tool calls ([`hook`]) to the watcher ([`watcher`]), which writes who
//! changed which file; [`protocol`] is what the two say to each other.

pub mod hook;
pub mod protocol;
pub mod watcher;
