//! Peers of the benchmarks and load generators: pinned, fetched once into `target/tools`, never installed.

pub mod haproxy;
pub mod nginx;
pub mod pgbench;
pub mod pigz;
pub mod postgrest;
pub mod s5cmd;
pub mod wrk;
