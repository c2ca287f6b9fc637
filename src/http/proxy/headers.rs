//! Removes hop-by-hop headers (RFC 9110, section 7.6.1): the standard ones, and those named in `Connection`.

use http::header::{
    CONNECTION, HeaderMap, HeaderName, HeaderValue, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRAILER,
    TRANSFER_ENCODING, UPGRADE,
};

static HOP_BY_HOP: [HeaderName; 9] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// Removes all hop-by-hop headers except those for an upgrade that may be tunneled, which are reduced to exactly
/// `Connection: upgrade` and one `Upgrade`. Returns whether there is such an upgrade. Idempotent.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) -> bool {
    // Most messages have at most one of these, and even the removal of an absent header hashes its name.
    let mut present = [false; HOP_BY_HOP.len()];
    for name in headers.keys() {
        if let Some(index) = HOP_BY_HOP.iter().position(|hop_by_hop| hop_by_hop == name) {
            present[index] = true;
        }
    }
    let mut upgrade = None;
    if present.contains(&true) && headers.contains_key(CONNECTION) {
        let connection_options: Vec<HeaderName> =
            headers.get_all(CONNECTION).iter().flat_map(parse_names).collect();
        if connection_options.contains(&UPGRADE) {
            upgrade = headers.remove(UPGRADE).filter(can_tunnel);
        }
        for name in connection_options {
            headers.remove(name);
        }
    }
    for (name, _) in HOP_BY_HOP.iter().zip(present).filter(|(_, is_present)| *is_present) {
        headers.remove(name);
    }
    let Some(upgrade) = upgrade else { return false };
    headers.insert(UPGRADE, upgrade);
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    true
}

/// Parses the names of headers in `Connection`, without the options that are not headers or that are removed anyway.
fn parse_names(value: &HeaderValue) -> impl Iterator<Item = HeaderName> + '_ {
    let names = value.as_bytes().split(|b| *b == b',').map(<[u8]>::trim_ascii);
    let is_other =
        |name: &&[u8]| !(name.eq_ignore_ascii_case(b"keep-alive") || name.eq_ignore_ascii_case(b"close"));
    names.filter(is_other).filter_map(|name| HeaderName::from_bytes(name).ok())
}

/// Returns whether the protocol may be tunneled. HTTP and TLS (RFC 2817) may not: requests in the tunnel would bypass
/// the header rules.
fn can_tunnel(protocol: &HeaderValue) -> bool {
    let is_refused = |name: &[u8]| {
        let name = name.trim_ascii().to_ascii_lowercase();
        name.is_empty() || name.starts_with(b"h2c") || name.starts_with(b"http") || name.starts_with(b"tls")
    };
    !protocol.as_bytes().split(|b| *b == b',').any(is_refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strip(lines: &[(&'static str, &'static str)]) -> (bool, HeaderMap) {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, HeaderValue::from_static(value));
        }
        let upgrade = strip_hop_by_hop(&mut headers);
        let once = headers.clone();
        assert_eq!(strip_hop_by_hop(&mut headers), upgrade);
        assert_eq!(headers, once, "not idempotent");
        (upgrade, headers)
    }

    #[test]
    fn strip_removes_standard_and_named_headers() {
        let (upgrade, remaining) = strip(&[
            ("connection", "close, X-Svc-Proof"),
            ("connection", "x-other"),
            ("x-svc-proof", "forged"),
            ("x-other", "1"),
            ("keep-alive", "timeout=5"),
            ("te", "trailers"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "websocket"),
            ("proxy-authorization", "Basic eA=="),
            ("accept", "*/*"),
        ]);
        assert!(!upgrade);
        assert_eq!(remaining.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["accept"]);
    }

    #[test]
    fn strip_keeps_only_upgrades_that_can_be_tunneled() {
        let (upgrade, remaining) = strip(&[("connection", "keep-alive, Upgrade"), ("upgrade", "websocket")]);
        assert!(upgrade);
        assert_eq!(
            (remaining["connection"].as_bytes(), remaining["upgrade"].as_bytes()),
            (&b"upgrade"[..], &b"websocket"[..])
        );
        for protocol in ["h2c", "websocket, H2C", "HTTP/2.0", "TLS/1.0", ""] {
            let (upgrade, remaining) = strip(&[("connection", "upgrade"), ("upgrade", protocol)]);
            assert!(!upgrade && remaining.is_empty(), "{protocol}");
        }
    }
}
