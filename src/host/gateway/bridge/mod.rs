//! The bridge: HTTP access to an app's tables, without SQL.
//!
//! A request is parsed ([`request`]), planned against the app's registered tables ([`plan`], without I/O), and executed
//! with the app's own role ([`execute`]). SQL text never contains a value; errors and log lines never contain row
//! values. [`changes`] streams every change to the tables, including changes made outside the bridge.

mod changes;
mod cursor;
mod describe;
mod execute;
mod fields;
mod filter;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod handler;
mod insert_batch;
mod insert_queue;
mod order;
mod param;
mod plan;
mod problems;
mod request;
mod response;
mod row;
mod schemas;
mod service;
mod sql;
mod value;

pub use changes::{ChangeFeed, EventIdSecret, StreamLimits, stream_changes};
pub use describe::{CHANGES, QUERY, SCHEMAS, app_schema};
pub use handler::{list_schemas, query};
pub use insert_batch::InsertBatcher;
pub use response::json_response;
pub use service::Bridge;
