//! The control plane as its callers see it: real PostgreSQL, real S3 over HTTP, the provider's simulator with record
//! servers, and `svc-platform` as a child process.

mod backups;
mod boot_stages;
mod budget;
mod bundles;
mod calls;
mod config;
mod create;
mod credentials;
mod deletion;
mod deploy;
mod described;
mod fail;
mod fleet;
mod idempotency;
mod key_rotation;
mod kills;
mod last_backup;
mod lives;
mod metrics;
mod pointer;
mod provisioning;
mod reconciling;
mod recovery;
mod registration;
mod resize;
mod resize_failures;
mod several;
pub mod stack;
mod unreachable;
