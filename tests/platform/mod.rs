//! The control plane as its callers see it: real PostgreSQL, real S3 over HTTP, the provider's simulator with record
//! servers, and `svc-platform` as a child process.

mod backups;
mod boot_stages;
mod budget;
mod bundles;
mod calls;
mod compatibility;
mod config;
mod create;
mod credentials;
mod deletion;
mod deploy;
mod described;
mod fail;
mod fleet;
mod fuse;
mod idempotency;
mod internal_host;
mod kept_servers;
mod key_rotation;
mod kills;
mod last_backup;
mod lives;
mod metrics;
mod provisioning;
mod reconciling;
mod recovery;
mod registration;
mod releases;
mod resize;
mod resize_failures;
mod retention;
mod several;
pub mod stack;
mod undelete;
mod unreachable;
mod ways_back;
