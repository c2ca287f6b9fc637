//! The resources of the API, made from rows: what responses show, and what the audit records.

pub mod audit;
pub mod machine;
pub mod operation;
pub mod operator;
pub mod rollout;
pub mod slot;
