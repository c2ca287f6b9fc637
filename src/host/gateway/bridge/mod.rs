//! The bridge: an app's tables over HTTP, without SQL.
//!
//! A request is parsed ([`request`]), planned against the app's registered manifest ([`plan`], pure), and run through
//! the app's own role ([`run`]). No value ever stands in SQL text, no row value in an error or a log line. What changed,
//! and by whomever, is told by [`changes`].

mod answer;
mod changes;
mod cursor;
mod describe;
mod fields;
mod filter;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod handler;
mod order;
mod param;
mod plan;
mod refusal;
mod request;
mod run;
mod schemas;
mod sql;
mod value;

pub use answer::json;
use changes::changes;
pub use changes::{Changes, IdSecret, tend};
pub use describe::{CHANGES, QUERY, SCHEMAS, app_schema};
use handler::{list_schemas, query};
