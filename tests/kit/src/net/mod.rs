//! Ports, reopenable listeners, and a faulty network.
//!
//! ```no_run
//! # fn f(upstream: std::net::SocketAddr) -> anyhow::Result<()> {
//! let proxy = kit::net::Proxy::start(upstream)?;
//! let address_for_the_client = proxy.addr();
//! proxy.reset_after_bytes(64 * 1024); // each connection is reset after 64 KiB of response
//! proxy.heal();
//! proxy.drop_connections();
//! # Ok(()) }
//! ```

mod ports;
mod proxy;
mod reopenable_listener;

pub use ports::free_port;
pub use proxy::Proxy;
pub(crate) use reopenable_listener::ReopenableListener;
