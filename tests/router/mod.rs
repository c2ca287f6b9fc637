//! The router between browsers and machines: real PostgreSQL, a real issuer, real TLS to recording machines.

mod access;
mod changes;
mod forwarding;
mod machine;
mod proxy;
mod sessions;
mod streams;
mod world;
