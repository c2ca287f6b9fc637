//! Restores an earlier version of one of the owner's files or directories: next to the existing entry, in its place, or
//! at another path.
//!
//! The gateway writes a request file, and `svc-files-request.service` serves it (`svc-sync-agent serve-restore`). The
//! entry is restored to a staging directory and moved into place by rename, so a killed run can be retried. Nothing is
//! deleted: a replaced entry is kept under another name.

mod entry_placement;
mod request;
mod run;

pub(super) use entry_placement::Directory;
pub use request::{RestoreRequest, read_current_state};
pub use run::{CAPABILITIES, FAILPOINTS, serve};
