//! The JSON of the platform's API, one file for each resource.
//!
//! A type is written once and used three times: the platform builds responses from it, `svcctl` reads them with it, and
//! the OpenAPI document describes it (`svc_http::openapi::schema_of`).
//!
//! Invariant: a reader accepts what older and newer platforms send. Unknown fields are ignored, a field that older
//! platforms omit is optional to read, and [`Text`](text::Text) accepts unknown words.

pub mod alarm;
pub mod audit;
pub mod backup;
pub mod change;
pub mod copies;
pub mod fleet;
pub mod host;
pub mod machine;
pub mod operation;
pub mod operator;
pub mod pointer;
pub mod rollout;
pub mod slot;
pub mod text;
