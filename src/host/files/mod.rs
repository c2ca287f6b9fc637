//! Backups of the owner's files, in the restic repository format (`svc_files`).
//!
//! While the machine runs, [`service`] keeps saving the user's home directory: the watcher reports changed directories,
//! and a schedule decides when to save. On a new machine, [`restore_home`] restores the latest snapshot before the
//! database restore and gateway startup. The pointer (`svc_store::files_pointer`) identifies that snapshot; a replaced
//! machine can't move it.
//!
//! [`history`] lists and serves earlier file versions, and [`restore_entry`] restores a single file or directory on a
//! running machine.

pub mod access;
mod changes;
pub mod checks;
pub mod client;
pub mod command;
mod drill;
pub mod history;
pub mod home_path;
mod home_placement;
mod open_saver;
mod owner;
pub mod restore_entry;
pub mod restore_home;
mod restore_home_error;
pub mod restore_outcome;
mod rules;
mod save_error;
mod save_passes;
mod save_records;
mod save_request;
mod schedule;
pub mod service;
mod staging;
pub mod status;
pub mod verify;
