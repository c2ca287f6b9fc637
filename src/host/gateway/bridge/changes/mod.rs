//! `GET /api/bridge/changes`: a stream of the changes in the apps' tables.
//!
//! An event describes one transaction, and its position is the transaction's id. It lists the ids of the changed rows,
//! not their contents. It is sent only when no transaction with a lower id can still commit, so events are neither out
//! of order nor skipped.

mod feed;
mod position;
mod read;
mod shared_read;
mod stream;

pub use feed::{ChangeFeed, StreamLimits};
pub use position::EventIdSecret;
#[cfg(feature = "fuzzing")]
pub use position::{EventId, EventIdFormat};
pub use stream::stream_changes;
