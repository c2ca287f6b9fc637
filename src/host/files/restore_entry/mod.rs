//! Restores one of the owner's files or directories to an earlier version: next to the existing entry, in its place, or
//! to another path.
//!
//! The gateway writes a request file, and `svc-files-request.service` serves it (`svc-sync-agent serve-restore`). The
//! entry is restored to a staging directory and moved into place by a rename, so that a killed run can be repeated.
//! Nothing is deleted: a replaced entry is kept under another name.

mod entry_placement;
mod request;
mod run;

pub(super) use entry_placement::Directory;
pub use request::{RestoreRequest, read_current_state};
pub use run::{CAPABILITIES, FAILPOINTS, serve};
