//! The provider's data about this server, from cloud-init: its id and its public address.

use std::net::Ipv4Addr;

use serde::Deserialize;
use serde_json::Value;

use crate::system::layout::Layout;
use svc_base::fsx;

/// The server as the provider's metadata service described it at boot. A field is `None` without cloud-init, or if the
/// provider's data has an unexpected format.
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
        // Hetzner's server ids are numbers; other data sources use their own formats.
        let id = id.filter(|id| !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_digit()));
        Self { id, public_ipv4: data.ds.meta_data.public_ipv4.and_then(|ip| ip.parse().ok()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_accepts_only_numeric_ids() {
        let hetzner =
            br#"{"v1": {"instance_id": "4711"}, "ds": {"meta_data": {"public-ipv4": "192.0.2.7"}}}"#;
        let expected =
            CloudServer { id: Some("4711".to_owned()), public_ipv4: Some(Ipv4Addr::new(192, 0, 2, 7)) };
        assert_eq!(CloudServer::parse(hetzner), expected);
        assert_eq!(CloudServer::parse(br#"{"v1": {"instance_id": 4711}}"#).id, expected.id);
        for other in [&br#"{"v1": {"instance_id": "iid-local01"}}"#[..], b"{", b"", br#"{"ds": null}"#] {
            assert_eq!(CloudServer::parse(other), CloudServer::default());
        }
    }
}
