//! Public addresses of the simulated servers: loopback addresses of a network chosen at random for each simulator.
//!
//! No address is given twice in a simulator's life, so that a replaced server can be started again on its own.

use std::net::{Ipv4Addr, TcpListener};

use anyhow::{Context, Result};
use uuid::Uuid;

/// The addresses that are left, and the port on which every host of the simulator serves HTTPS.
pub(super) struct Addresses {
    network: [u8; 2],
    given: u16,
    https_port: u16,
}

impl Addresses {
    pub(super) fn choose() -> Result<Self> {
        let mut refused = None;
        for _ in 0..20 {
            let random = *Uuid::new_v4().as_bytes();
            // 127.0 is everybody's.
            let network = [random[0].max(1), random[1]];
            match TcpListener::bind((Ipv4Addr::new(127, network[0], network[1], 1), 0)) {
                Ok(listener) => {
                    let https_port = listener.local_addr().context("a bound socket has an address")?.port();
                    return Ok(Self { network, given: 0, https_port });
                }
                Err(error) => refused = Some(error),
            }
        }
        Err(refused.context("no network was tried")?).context("no loopback network can be bound")
    }

    pub(super) fn https_port(&self) -> u16 {
        self.https_port
    }

    /// The next address on which the port is free.
    pub(super) fn next(&mut self) -> Ipv4Addr {
        loop {
            let nth = self.given;
            self.given = self.given.wrapping_add(1);
            let third = self.network[1].wrapping_add((nth / 254) as u8);
            let address = Ipv4Addr::new(127, self.network[0], third, 1 + (nth % 254) as u8);
            if TcpListener::bind((address, self.https_port)).is_ok() {
                return address;
            }
        }
    }
}
