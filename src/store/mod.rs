//! Typed places in the object store: what is where, how it is written, and what may be believed of it.
//!
//! Unreachable is never "absent": [`StoreError`] keeps them apart, and only a confirmed 404 is an absence.

pub mod bucket;
pub mod bundle;
pub mod config;
pub mod credentials;
pub mod key;
mod local;
pub mod meta;
pub mod multipart;
pub mod pointer;
pub mod pointer_io;
pub mod policy;
mod resign;
pub mod role_facts;
pub mod snapshot;
pub mod snapshots;
pub mod sts;
pub mod upload;

pub use bucket::{Bucket, StoreError};
