//! Backups of the owner's files, in the restic repository format (`svc_files`).
//!
//! While the machine runs, [`service`] repeatedly saves the user's home directory: the watcher reports which
//! directories have changed, and a schedule decides when to save. On a new machine, [`restore_home`] restores the
//! latest snapshot before the database is restored and the gateway starts. The pointer (`svc_store::files_pointer`)
//! names that snapshot; a replaced machine cannot move the pointer.
//!
//! [`history`] lists and sends earlier versions of files, and [`restore_entry`] restores a single file or directory on
//! a running machine.

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
