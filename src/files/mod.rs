//! Object-store backups of an owner's files in the restic repository format, version 2
//! (<https://restic.readthedocs.io/en/v0.14.0/100_references.html>). Stock `restic` can list, check and restore them.
//!
//! Directories form a Merkle tree, so unchanged directories and chunks are stored only once. Chunks and trees are
//! encrypted blobs in packs, and the index maps blobs to packs. Objects are immutable, and all except the configuration
//! are named by their hash. A snapshot references the tree of the home directory at a point in time.
//!
//! [`save`], [`restore`], [`history`] and [`verify`] run on the host. [`prune`] deletes objects, so it runs only on the
//! platform. The files pointer (`svc_store::files_pointer`) references the latest snapshot.

pub mod affected;
mod blocking;
mod cache;
mod chunker;
mod error;
mod escape;
pub mod hard_link_paths;
pub mod history;
mod id;
mod index;
mod index_reader;
mod key;
mod pack;
mod pack_reader;
pub mod path_stack;
pub mod prune;
mod random;
mod repository;
pub mod restore;
pub mod retention;
pub mod save;
mod snapshot;
#[cfg(test)]
mod tests;
mod tree;
mod tree_reader;
mod tree_references;
pub mod usage;
pub mod verify;
mod xattrs;

pub use cache::Cache;
pub use error::FilesError;
pub use id::Id;
pub use key::RepositoryKey;
pub use repository::Repository;
pub use snapshot::{Snapshot, SnapshotOrigin};
pub use xattrs::replace_xattrs;
