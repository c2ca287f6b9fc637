//! Looks up this server's provider id in cloud-init's data, and its public address there or in the routing table.
//! Hetzner's data source doesn't store the address, and only root can reach the metadata service.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};

use serde::Deserialize;
use serde_json::Value;

use crate::system::layout::Layout;
use svc_base::fsx;

/// An address covered by the default route, reserved for documentation (RFC 5737).
const INTERNET_ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// Server details from the provider's metadata service, as of boot. Fields are `None` without cloud-init, or if they're
/// missing or malformed in the stored data.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CloudServer {
    pub id: Option<String>,
    pub public_ipv4: Option<Ipv4Addr>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct InstanceData {
    v1: CloudInitV1,
    ds: Datasource,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct CloudInitV1 {
    instance_id: Option<Value>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Datasource {
    meta_data: Metadata,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Metadata {
    #[serde(rename = "public-ipv4")]
    public_ipv4: Option<String>,
}

impl CloudServer {
    pub fn read(layout: &Layout) -> Self {
        match fsx::read_if_exists(&layout.instance_data()) {
            Ok(Some(text)) => Self::parse(&text),
            Ok(None) | Err(_) => Self::default(),
        }
    }

    fn parse(text: &[u8]) -> Self {
        let data: InstanceData = serde_json::from_slice(text).unwrap_or_default();
        let id = match data.v1.instance_id {
            Some(Value::String(id)) => Some(id),
            Some(Value::Number(id)) => Some(id.to_string()),
            _ => None,
        };
        // Hetzner server ids are numeric; other data sources use their own formats.
        let id = id.filter(|id| !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_digit()));
        Self { id, public_ipv4: data.ds.meta_data.public_ipv4.and_then(|ip| ip.parse().ok()) }
    }
}

/// Returns the source address of internet-bound packets if it's public, which it isn't behind NAT.
pub fn find_public_source_ipv4() -> Option<Ipv4Addr> {
    find_source_ipv4(INTERNET_ADDRESS).filter(|ip| is_public(*ip))
}

fn find_source_ipv4(destination: Ipv4Addr) -> Option<Ipv4Addr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    // This doesn't send anything: for UDP, it only selects the route and thus the source address. The port is
    // irrelevant.
    socket.connect((destination, 9)).ok()?;
    match socket.local_addr().ok()?.ip() {
        IpAddr::V4(ip) => Some(ip),
        IpAddr::V6(_) => None,
    }
}

/// Returns whether a server's address is public. Doesn't consider addresses that servers can't have, such as multicast.
fn is_public(ip: Ipv4Addr) -> bool {
    let is_shared_or_benchmark = matches!(ip.octets(), [100, 64..=127, ..] | [198, 18..=19, ..]);
    let is_local = ip.is_private() || ip.is_loopback() || ip.is_link_local() || ip.is_unspecified();
    !(is_local || is_shared_or_benchmark || ip.is_documentation())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_accepts_only_numeric_ids() {
        let hetzner = br#"{"v1": {"instance_id": "4711"},
            "ds": {"meta_data": {"instance-id": 4711, "local-hostname": "svc-1", "public-keys": []}}}"#;
        let expected = CloudServer { id: Some("4711".to_owned()), public_ipv4: None };
        assert_eq!(CloudServer::parse(hetzner), expected);
        assert_eq!(CloudServer::parse(br#"{"v1": {"instance_id": 4711}}"#).id, expected.id);
        for other in [&br#"{"v1": {"instance_id": "iid-local01"}}"#[..], b"{", b"", br#"{"ds": null}"#] {
            assert_eq!(CloudServer::parse(other), CloudServer::default());
        }
    }

    #[test]
    fn parse_reads_address_from_other_data_sources() {
        let ec2 = br#"{"v1": {"instance_id": "i-0abc"}, "ds": {"meta_data": {"public-ipv4": "192.0.2.7"}}}"#;
        let expected = CloudServer { id: None, public_ipv4: Some(Ipv4Addr::new(192, 0, 2, 7)) };
        assert_eq!(CloudServer::parse(ec2), expected);
    }

    #[test]
    fn is_public_rejects_local_and_reserved_addresses() {
        for text in ["78.46.0.1", "100.63.255.255", "100.128.0.1", "172.32.0.1", "198.20.0.1"] {
            assert!(is_public(text.parse().unwrap()), "{text}");
        }
        let others = ["0.0.0.0", "10.0.0.2", "100.64.0.1", "100.127.0.1", "127.0.0.1", "169.254.0.1"];
        for text in others.into_iter().chain(["172.16.0.1", "192.0.2.1", "192.168.0.1", "198.19.0.1"]) {
            assert!(!is_public(text.parse().unwrap()), "{text}");
        }
    }

    #[test]
    fn find_source_ipv4_follows_the_route() {
        assert_eq!(find_source_ipv4(Ipv4Addr::LOCALHOST), Some(Ipv4Addr::LOCALHOST));
    }
}
