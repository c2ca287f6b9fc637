//! Detects cross-origin requests from browsers. The router rejects such a request if its method is unsafe or it is an
//! upgrade, for example to a WebSocket. Requests from apps' pages have a rule of their own (`app_request`).

use http::header::{HeaderMap, ORIGIN};
use http::{HeaderName, Method};

static FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Whether a request comes from an origin other than `scheme` and `authority`, to which it was sent.
pub(super) fn is_cross_origin(headers: &HeaderMap, scheme: &str, authority: &str) -> bool {
    if headers.contains_key(ORIGIN) {
        return is_foreign_origin(headers, scheme, authority);
    }
    // Browsers omit `Origin` from some requests, but still send `Sec-Fetch-Site`.
    headers.get(&FETCH_SITE).is_some_and(|site| !matches!(site.as_bytes(), b"same-origin" | b"none"))
}

/// Whether `Origin` names a different origin; `false` without the header. An `http` origin of this host is foreign
/// unless browsers reach the router over plain HTTP, because an attacker on the network could have served the page.
pub(super) fn is_foreign_origin(headers: &HeaderMap, scheme: &str, authority: &str) -> bool {
    let is_same_origin = |origin: &http::HeaderValue| {
        let origin = origin.to_str().ok().and_then(|origin| origin.split_once("://"));
        origin.is_some_and(|(origin_scheme, host)| {
            let is_trusted_scheme = origin_scheme == "https" || (origin_scheme == "http" && scheme == "http");
            is_trusted_scheme && is_same_host(host, origin_scheme, authority)
        })
    };
    !headers.get_all(ORIGIN).iter().all(is_same_origin)
}

/// Whether the origin must be checked, because the request may have side effects.
pub(super) fn must_check(method: &Method, is_upgrade: bool) -> bool {
    is_upgrade || !method.is_safe()
}

/// Compares hosts without the scheme's default port: an origin omits it, but `Host` may contain it.
fn is_same_host(origin_host: &str, scheme: &str, authority: &str) -> bool {
    let port = if scheme == "https" { ":443" } else { ":80" };
    let normalize = |text: &str| text.strip_suffix(port).unwrap_or(text).to_ascii_lowercase();
    normalize(origin_host) == normalize(authority)
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn is_cross_origin_recognizes_foreign_origins() {
        for (origin, is_foreign) in [
            ("https://app.example", false),
            ("https://APP.example:443", false),
            ("http://app.example", true),
            ("http://app.example:443", true),
            ("https://code.example", true),
            ("https://app.example.evil", true),
            ("https://app.example:8443", true),
            ("null", true),
            ("app.example", true),
            ("", true),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(ORIGIN, HeaderValue::from_static(origin));
            assert_eq!(is_cross_origin(&headers, "https", "app.example"), is_foreign, "{origin}");
            headers.append(ORIGIN, HeaderValue::from_static("https://evil.example"));
            assert!(is_cross_origin(&headers, "https", "app.example"), "two origins, {origin}");
        }
        let mut headers = HeaderMap::new();
        headers.insert(ORIGIN, HeaderValue::from_static("http://app.example"));
        assert!(!is_cross_origin(&headers, "http", "app.example:80"), "a router without TLS");
        headers.insert(ORIGIN, HeaderValue::from_static("https://app.example"));
        assert!(!is_cross_origin(&headers, "http", "app.example"), "behind a proxy that terminates TLS");
        let mut headers = HeaderMap::new();
        assert!(!is_cross_origin(&headers, "https", "app.example"), "not a browser");
        headers.insert(&FETCH_SITE, HeaderValue::from_static("cross-site"));
        assert!(is_cross_origin(&headers, "https", "app.example"));
        headers.insert(&FETCH_SITE, HeaderValue::from_static("same-origin"));
        assert!(!is_cross_origin(&headers, "https", "app.example"));
    }
}
