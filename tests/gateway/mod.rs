//! `svc-gateway` as a process of its own, before a real PostgreSQL.

mod apps;
mod bridge;
mod bridge_refusals;
mod host;
mod identity;
mod isolation;
mod life;
