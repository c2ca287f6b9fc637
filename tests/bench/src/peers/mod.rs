//! The programs that the product is compared with, and load generators. Their versions are pinned, and they are fetched
//! once into `target/tools` but never installed. The exception is pgbench, which belongs to the PostgreSQL in use.

pub mod haproxy;
pub mod nginx;
pub mod pgbench;
pub mod pigz;
pub mod postgrest;
pub mod rclone;
pub mod s5cmd;
pub mod wrk;
