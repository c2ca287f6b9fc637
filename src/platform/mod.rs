//! The control plane and the router. Nothing here knows the inside of a host.

pub mod keys;
pub mod router;
