//! Converts rows to the resources that the API returns and the audit log records.

pub mod audit;
pub mod machine;
pub mod operation;
pub mod operator;
pub mod rollout;
pub mod slot;
