//! Determines which headers the router forwards, drops and adds.
//!
//! Invariant: no machine receives a client's `Cookie`, `Authorization`, `Forwarded`, `x-svc-…` or `x-forwarded-…`
//! header, or a client's header in `PROXY_HEADERS`.

use std::fmt::Write as _;
use std::net::IpAddr;

use axum::body::Bytes;
use http::header::{AUTHORIZATION, COOKIE, FORWARDED, HOST, HeaderMap, HeaderName, HeaderValue};

use svc_http::proof;
use svc_http::proxy::strip_hop_by_hop;
use svc_http::request_id;

static PROOF: HeaderName = HeaderName::from_static(proof::HEADER);
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
pub(super) struct ForwardHeaders {
    pub(super) peer: IpAddr,
    pub(super) scheme: &'static str,
    pub(super) proof: HeaderValue,
}

/// Converts a client's headers into the headers for the machine. Returns whether the request is an upgrade. The request
/// id is the one that `observe` has set.
pub(super) fn prepare_headers(headers: &mut HeaderMap, values: ForwardHeaders) -> bool {
    let request_id = headers.get(&request_id::HEADER_NAME).cloned();
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
    headers.insert(FORWARDED_PROTO.clone(), HeaderValue::from_static(values.scheme));
    // The new values share one buffer, which saves each of them two allocations: its own, and one when it is copied.
    let mut text = String::with_capacity(128);
    let has_traceparent = {
        let mut sent = headers.get_all(&TRACEPARENT).iter();
        sent.next().is_some_and(is_traceparent) && sent.next().is_none()
    };
    if !has_traceparent {
        headers.remove(&TRACESTATE);
        push_traceparent(&mut text, request_id.as_ref().and_then(|id| id.to_str().ok()).unwrap_or_default());
    }
    let traceparent_bytes = text.len();
    let _ = write!(text, "{}", values.peer);
    let text = Bytes::from(text);
    let mut insert = |name: &HeaderName, value: Bytes| {
        if let Ok(value) = HeaderValue::from_maybe_shared(value) {
            headers.insert(name.clone(), value);
        }
    };
    insert(&FORWARDED_FOR, text.slice(traceparent_bytes..));
    if traceparent_bytes > 0 {
        insert(&TRACEPARENT, text.slice(..traceparent_bytes));
    }
    if let Some(id) = request_id {
        headers.insert(request_id::HEADER_NAME.clone(), id);
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

/// Appends a `traceparent`. If the request id has the right format, it is also the trace id, so that one id identifies
/// the request in logs and in traces.
fn push_traceparent(text: &mut String, request_id: &str) {
    let is_hex = request_id.len() == 32 && request_id.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    // The second half becomes the parent id. Neither id may be all zeros.
    let is_usable = is_hex && request_id[16..].bytes().any(|b| b != b'0');
    let generated;
    let trace_id = if is_usable {
        request_id
    } else {
        generated = request_id::generate();
        &generated
    };
    for part in ["00-", trace_id, "-", &trace_id[16..], "-01"] {
        text.push_str(part);
    }
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
            headers.insert(request_id::HEADER, HeaderValue::from_str(&id).unwrap());
            headers.insert("traceparent", HeaderValue::from_static(sent));
            headers.insert("tracestate", HeaderValue::from_static("a=b"));
            let proof = HeaderValue::from_static("p");
            let peer = IpAddr::from([192, 0, 2, 1]);
            prepare_headers(&mut headers, ForwardHeaders { peer, scheme: "https", proof });
            assert_eq!(headers["x-forwarded-for"], "192.0.2.1");
            assert_eq!(headers["x-request-id"], id.as_str());
            assert!(is_traceparent(&headers["traceparent"]));
            assert_eq!(headers["traceparent"] == good, is_kept, "{sent}");
            assert_eq!(headers.contains_key("tracestate"), is_kept, "{sent}");
            assert!(is_kept || headers["traceparent"].to_str().unwrap().contains(&id));
        }
    }
}
