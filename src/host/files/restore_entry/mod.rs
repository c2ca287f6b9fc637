//! Brings a file or directory of the owner back as it was: next to the present one, over it, or to another place.
//!
//! The gateway writes a request file, and `svc-files-request.service` serves it (`svc-sync-agent serve-restore`). The
//! entry is restored to a staging directory and moved into place by a rename, so that a killed run can be repeated.
//! Nothing is deleted: what is replaced stays under another name.

mod put;
mod request;
mod run;

pub use request::{RestoreRequest, current};
pub use run::{CAPABILITIES, FAILPOINTS, serve};
