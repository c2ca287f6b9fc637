//! Typed access to the object store: the location, format and verification of each kind of object.
//!
//! An unreachable object is never "absent": [`StoreError`] distinguishes the two, and only a 404, or a listing
//! without the key, means that the object is absent.

mod bounded_list;
pub mod bucket;
pub mod bundle;
pub mod capabilities;
pub mod config;
pub mod credentials;
pub mod epoch_floor;
pub mod files_pointer;
pub mod key;
#[cfg(test)]
mod lenient;
mod list_counter;
mod list_filter;
mod local;
pub mod meta;
pub mod multipart;
pub mod newer_snapshot;
pub mod parallel_probe;
pub mod pointer;
pub mod pointer_io;
mod pointer_log;
pub mod pointer_repair;
pub mod policy;
pub mod problem;
pub mod protection;
mod retrying_signer;
pub mod role_facts;
mod signed_request;
pub mod snapshot;
pub mod snapshot_with_sidecar;
pub mod snapshots;
pub mod sts;
pub mod upload;
mod upload_timeout;
pub mod vars;
mod write_once;

pub use bucket::{Bucket, StoreError};
