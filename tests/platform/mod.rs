//! The control plane as its callers see it: real PostgreSQL, real S3 over HTTP, the provider's simulator with record
//! servers, and `svc-platform` as a child process.

mod bundles;
mod calls;
mod config;
mod create;
mod deletion;
mod idempotency;
mod kills;
mod last_backup;
mod provisioning;
mod recovery;
mod registration;
mod several;
pub mod stack;
mod unreachable;
