//! The programs that the product is compared with, and load generators: pinned versions, fetched once into
//! `target/tools`, never installed.

pub mod haproxy;
pub mod nginx;
pub mod pgbench;
pub mod pigz;
pub mod postgrest;
pub mod rclone;
pub mod s5cmd;
pub mod wrk;
