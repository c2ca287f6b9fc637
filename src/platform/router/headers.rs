//! Determines which headers the router forwards, drops and adds.
//!
//! Invariant: no machine receives a client's `Cookie`, `Authorization`, `Forwarded`, `x-svc-…` or `x-forwarded-…`
//! header, or any of the `PROXY_HEADERS` from a client.

use std::net::SocketAddr;

use http::header::{AUTHORIZATION, COOKIE, FORWARDED, HOST, HeaderMap, HeaderName, HeaderValue};

use svc_http::proof;
use svc_http::proxy::strip_hop_by_hop;
use svc_http::request_id;

static PROOF: HeaderName = HeaderName::from_static(proof::HEADER);
static REQUEST_ID: HeaderName = HeaderName::from_static(request_id::HEADER);
static FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
static FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
static FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
static TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
static TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Other headers in which proxies pass on the client's address or the original URL.
const PROXY_HEADERS: [&str; 8] = [
    "x-real-ip",
    "x-client-ip",
    "x-cluster-client-ip",
    "true-client-ip",
    "cf-connecting-ip",
    "x-original-host",
    "x-original-url",
    "x-rewrite-url",
];

/// Values for the headers that the router adds.
pub(super) struct ForwardHeaders<'a> {
    pub(super) peer: Option<SocketAddr>,
    pub(super) scheme: &'static str,
    pub(super) proof: HeaderValue,
    pub(super) request_id: &'a str,
}

/// Converts a client's headers to the headers for the machine. Returns whether the request is an upgrade.
pub(super) fn prepare_headers(headers: &mut HeaderMap, values: ForwardHeaders<'_>) -> bool {
    let is_upgrade = strip_hop_by_hop(headers);
    headers.remove(COOKIE);
    headers.remove(AUTHORIZATION);
    headers.remove(FORWARDED);
    let dropped: Vec<HeaderName> =
        headers.keys().filter(|name| is_untrusted(name.as_str())).cloned().collect();
    for name in dropped {
        headers.remove(name);
    }
    if let Some(host) = headers.get(HOST).cloned() {
        headers.insert(FORWARDED_HOST.clone(), host);
    }
    if let Some(peer) = values.peer.and_then(|peer| HeaderValue::from_str(&peer.ip().to_string()).ok()) {
        headers.insert(FORWARDED_FOR.clone(), peer);
    }
    headers.insert(FORWARDED_PROTO.clone(), HeaderValue::from_static(values.scheme));
    if let Ok(id) = HeaderValue::from_str(values.request_id) {
        headers.insert(REQUEST_ID.clone(), id);
    }
    if !headers.get(&TRACEPARENT).is_some_and(is_traceparent) {
        headers.remove(&TRACESTATE);
        headers.insert(TRACEPARENT.clone(), new_traceparent(values.request_id));
    }
    headers.insert(PROOF.clone(), values.proof);
    is_upgrade
}

/// Whether a machine could mistake the client's header for one that the router or a trusted proxy has set.
fn is_untrusted(name: &str) -> bool {
    (name.starts_with("x-") || name.ends_with("-ip"))
        && (name.starts_with("x-svc-") || name.starts_with("x-forwarded-") || PROXY_HEADERS.contains(&name))
}

/// Checks for version 00 of W3C Trace Context: `00-<32 hex>-<16 hex>-<2 hex>`, in which neither id is all zeros.
fn is_traceparent(value: &HeaderValue) -> bool {
    let bytes = value.as_bytes();
    let is_hex = |part: &[u8]| part.iter().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    bytes.len() == 55
        && bytes.starts_with(b"00-")
        && bytes[35] == b'-'
        && bytes[52] == b'-'
        && is_hex(&bytes[3..35])
        && is_hex(&bytes[36..52])
        && is_hex(&bytes[53..])
        && bytes[3..35].iter().any(|b| *b != b'0')
        && bytes[36..52].iter().any(|b| *b != b'0')
}

/// Creates a `traceparent`. If the request id has the right format, it is also the trace id, so that one id identifies
/// the request in logs and in traces.
fn new_traceparent(request_id: &str) -> HeaderValue {
    let is_hex = request_id.len() == 32 && request_id.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    let generated;
    let trace_id = if is_hex {
        request_id
    } else {
        generated = request_id::generate();
        &generated
    };
    let mut text = String::with_capacity(55);
    for part in ["00-", trace_id, "-", &trace_id[16..], "-01"] {
        text.push_str(part);
    }
    HeaderValue::from_str(&text).expect("a traceparent is hexadecimal digits and dashes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prepare_headers_keeps_only_valid_traceparent() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let id = request_id::generate();
        for (sent, is_kept) in [
            (good, true),
            ("00-00000000000000000000000000000000-00f067aa0ba902b7-01", false),
            ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-x", false),
            ("00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01", false),
            ("", false),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert("traceparent", HeaderValue::from_static(sent));
            headers.insert("tracestate", HeaderValue::from_static("a=b"));
            let proof = HeaderValue::from_static("p");
            prepare_headers(
                &mut headers,
                ForwardHeaders { peer: None, scheme: "https", proof, request_id: &id },
            );
            assert!(is_traceparent(&headers["traceparent"]));
            assert_eq!(headers["traceparent"] == good, is_kept, "{sent}");
            assert_eq!(headers.contains_key("tracestate"), is_kept, "{sent}");
            assert!(is_kept || headers["traceparent"].to_str().unwrap().contains(&id));
        }
    }
}
