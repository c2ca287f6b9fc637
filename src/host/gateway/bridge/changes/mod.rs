//! `GET /api/bridge/changes`: a stream of what changed in the apps' tables, for as long as somebody listens.
//!
//! It tells which rows, not what is in them. An event is a transaction, its position the transaction's id, and it is told
//! only once no transaction with a lower id can still commit: so nothing is told late, and nothing is skipped.

mod feed;
mod position;
mod read;
mod stream;

pub use feed::{Changes, tend};
pub use position::IdSecret;
#[cfg(feature = "fuzzing")]
pub use position::{EventId, IdForm};
pub use stream::changes;
