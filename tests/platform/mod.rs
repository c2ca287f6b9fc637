//! The control plane as its callers see it: real PostgreSQL, real S3 over HTTP, the provider's simulator with record
//! servers, and `svc-platform` as a child process.

mod bundles;
mod calls;
mod config;
mod create;
mod credentials;
mod deletion;
mod described;
mod idempotency;
mod kills;
mod last_backup;
mod provisioning;
mod recovery;
mod registration;
mod several;
mod stack;
mod unreachable;
