//! `svc-gateway` as a separate process, with a real PostgreSQL.

mod agents;
mod app_files;
mod app_quota;
mod apps;
mod bridge;
mod bridge_bounds;
mod bridge_cancel;
mod bridge_changes;
mod bridge_pages;
mod bridge_refusals;
mod bridge_sqlstate;
mod bridge_transaction;
mod bridge_types;
mod bridge_write;
mod certificates;

mod described;
mod dispatch;
mod dispatch_conversation;
mod dispatch_cost;
mod dispatch_queue;
pub mod host;
mod identity;
mod isolation;
mod journal;
mod life;
mod metrics;
mod peers;
mod quiesce;
mod records;
mod records_disk;
