//! Ports, listeners that can go away and come back, and a wire that can be bad.
//!
//! ```no_run
//! # fn f(upstream: std::net::SocketAddr) -> anyhow::Result<()> {
//! let wire = kit::net::Proxy::start(upstream)?;
//! let address_for_the_client = wire.addr();
//! wire.reset_after(64 * 1024); // each further connection is reset after 64 KiB of answer
//! wire.heal();
//! wire.cut(); // the connections there are, once
//! # Ok(()) }
//! ```

mod gate;
mod ports;
mod proxy;

pub(crate) use gate::Gate;
pub use ports::free_port;
pub use proxy::Proxy;
