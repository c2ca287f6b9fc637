//! Public addresses for the simulated servers: loopback addresses in a random network per simulator.
//!
//! Each address is used only once, so that a replaced server can be restarted at its old address.

use std::net::{Ipv4Addr, TcpListener};

use anyhow::{Context, Result};
use uuid::Uuid;

/// Allocates addresses, and chooses the HTTPS port for all the simulator's hosts.
pub(super) struct Addresses {
    network: [u8; 2],
    next_index: u16,
    https_port: u16,
}

impl Addresses {
    pub(super) fn in_random_network() -> Result<Self> {
        let mut last_error = None;
        for _ in 0..20 {
            let random = *Uuid::new_v4().as_bytes();
            // Other programs use addresses that begin with 127.0.
            let network = [random[0].max(1), random[1]];
            match TcpListener::bind((Ipv4Addr::new(127, network[0], network[1], 1), 0)) {
                Ok(listener) => {
                    let address = listener.local_addr().context("cannot read the bound socket's address")?;
                    let https_port = address.port();
                    return Ok(Self { network, next_index: 0, https_port });
                }
                Err(error) => last_error = Some(error),
            }
        }
        Err(last_error.context("no attempt was made")?).context("no loopback network can be bound")
    }

    pub(super) fn https_port(&self) -> u16 {
        self.https_port
    }

    /// Returns the next address whose HTTPS port is free.
    pub(super) fn allocate(&mut self) -> Ipv4Addr {
        loop {
            let index = self.next_index;
            self.next_index = self.next_index.wrapping_add(1);
            let third_octet = self.network[1].wrapping_add((index / 254) as u8);
            let address = Ipv4Addr::new(127, self.network[0], third_octet, 1 + (index % 254) as u8);
            if TcpListener::bind((address, self.https_port)).is_ok() {
                return address;
            }
        }
    }
}
