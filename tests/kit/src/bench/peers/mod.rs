//! The programs that we are measured against, and those that make the load: pinned, fetched once into `target/tools`,
//! never installed.

pub mod haproxy;
pub mod nginx;
pub mod pgbench;
pub mod pigz;
pub mod postgrest;
pub mod s5cmd;
pub mod wrk;
