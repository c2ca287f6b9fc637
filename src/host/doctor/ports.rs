//! Checks that only the gateway and ssh listen on non-loopback TCP addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use super::services_env;
use crate::system::layout::Layout;
use crate::system::vars;
use svc_base::diagnosis::Findings;

/// `TCP_LISTEN` state in `/proc/net/tcp`.
const LISTEN_STATE: &str = "0A";
const SSH_PORT: u16 = 22;
const POSTGRES_PORT: u16 = 5432;

pub fn check(layout: &Layout) -> Findings {
    let findings = Findings::new("ports");
    if layout.root() != Path::new("/") {
        return findings.skipped("SVC_ROOT is not /, and the ports belong to the whole machine");
    }
    let gateway_port = services_env(layout).or_default::<std::net::SocketAddr>(&vars::GATEWAY_LISTEN).port();
    let read = |name: &str| std::fs::read_to_string(format!("/proc/net/{name}"));
    // `tcp6` doesn't exist without IPv6.
    match (read("tcp"), read("tcp6").or_else(|_| Ok::<_, std::io::Error>(String::new()))) {
        (Ok(v4), Ok(v6)) => assess(findings, &parse_listeners(&v4, &v6), gateway_port),
        (Err(error), _) | (_, Err(error)) => findings.skipped(format!("cannot read /proc/net/tcp: {error}")),
    }
}

fn assess(findings: Findings, listeners: &[(IpAddr, u16)], gateway_port: u16) -> Findings {
    let mut findings = findings;
    for (ip, port) in listeners.iter().filter(|(ip, _)| !ip.to_canonical().is_loopback()) {
        let next = "find the process with `ss -ltnp`, and check that nftables blocks the port";
        if *port == POSTGRES_PORT {
            let what = format!("the database listens on {ip}, not only on loopback");
            findings = findings.problem(what, "set listen_addresses of svc-postgres to 127.0.0.1");
        } else if ![gateway_port, SSH_PORT].contains(port) {
            findings = findings.warning(format!("an unexpected process listens on {ip}:{port}"), next);
        }
    }
    findings.or_ok(format!("only the gateway (port {gateway_port}) and ssh listen beyond loopback"))
}

/// Parses the listening sockets from `/proc/net/tcp` and `/proc/net/tcp6` (see proc(5)). Addresses are 32-bit words in
/// native byte order, which is little-endian.
fn parse_listeners(v4: &str, v6: &str) -> Vec<(IpAddr, u16)> {
    let mut listeners: Vec<_> = v4.lines().chain(v6.lines()).filter_map(parse_listener).collect();
    listeners.sort_unstable();
    listeners.dedup();
    listeners
}

fn parse_listener(line: &str) -> Option<(IpAddr, u16)> {
    let mut fields = line.split_whitespace().skip(1);
    let (local, state) = (fields.next()?, fields.nth(1)?);
    if state != LISTEN_STATE {
        return None;
    }
    let (address, port) = local.split_once(':')?;
    let bytes = hex::decode(address).ok()?;
    let network_order: Vec<u8> = bytes.chunks_exact(4).flat_map(|word| word.iter().rev().copied()).collect();
    let ip = match <[u8; 4]>::try_from(network_order.as_slice()) {
        Ok(v4) => IpAddr::from(Ipv4Addr::from(v4)),
        Err(_) => IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(network_order.as_slice()).ok()?)),
    };
    Some((ip, u16::from_str_radix(port, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assess_reports_listeners_beyond_loopback() {
        let v4 = "  sl  local_address rem_address   st tx_queue\n   0: 0100007F:1538 00000000:0000 0A 0\n   1: \
                  00000000:01BB 00000000:0000 0A 0\n   2: 00000000:1538 00000000:0000 0A 0\n   3: 0200A8C0:D431 \
                  0100A8C0:01BB 01 0\n";
        let v6 = "   0: 00000000000000000000000000000000:0016 0:0 0A 0\n   1: \
                  00000000000000000000000001000000:1F90 0:0 0A 0\n   2: 00000000000000000000000000000000:1F91 0:0 0A 0\n";
        let listeners = parse_listeners(v4, v6);
        assert!(
            listeners.contains(&(Ipv4Addr::LOCALHOST.into(), 5432)) && listeners.len() == 6,
            "{listeners:?}"
        );
        let text = format!("{:?}", assess(Findings::new("ports"), &listeners, 443));
        assert!(text.contains("the database listens on 0.0.0.0"), "{text}");
        assert!(text.contains("an unexpected process listens on :::8081"), "{text}");
        assert_eq!(text.matches("listens on").count(), 2, "{text}");
        let clean = assess(Findings::new("ports"), &parse_listeners("", ""), 443);
        assert!(format!("{clean:?}").contains("Ok"));
    }
}
