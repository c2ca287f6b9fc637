//! The router between browsers and machines: real PostgreSQL, a real issuer, and real TLS to recording machines.

mod access;
mod apps;
mod browser_data;
mod changes;
mod described;
mod forwarding;
mod machine;
mod poll_cost;
mod proxy;
mod sessions;
mod sign_out;
mod streams;
mod verification;
mod world;
