//! Whether another site made the browser send this: such unsafe requests and WebSockets are refused.

use http::header::{HeaderMap, ORIGIN};
use http::{HeaderName, Method};

static FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// `scheme` and `authority` are those that the request was sent to: `https` and the name with its port.
pub(super) fn is_foreign(headers: &HeaderMap, scheme: &str, authority: &str) -> bool {
    if headers.contains_key(ORIGIN) {
        return is_foreign_origin(headers, scheme, authority);
    }
    // Browsers that leave out the origin still say how they came here.
    headers.get(&FETCH_SITE).is_some_and(|site| !matches!(site.as_bytes(), b"same-origin" | b"none"))
}

/// By `Origin` alone; a request without one is at home. A page of the same name that came over plain HTTP could be anybody's:
/// it is at home only where this router itself speaks that, behind a proxy or without one.
pub(super) fn is_foreign_origin(headers: &HeaderMap, scheme: &str, authority: &str) -> bool {
    let own = |origin: &http::HeaderValue| {
        let origin = origin.to_str().ok().and_then(|origin| origin.split_once("://"));
        origin.is_some_and(|(of, host)| {
            let is_known = of == "https" || (of == "http" && scheme == "http");
            is_known && same(host, of, authority)
        })
    };
    !headers.get_all(ORIGIN).iter().all(own)
}

/// Only what may change something can be forged to harm.
pub(super) fn matters(method: &Method, upgrade: bool) -> bool {
    upgrade || !method.is_safe()
}

/// An origin leaves out its scheme's own port; a `Host` may name it.
fn same(origin: &str, scheme: &str, authority: &str) -> bool {
    let port = if scheme == "https" { ":443" } else { ":80" };
    let plain = |text: &str| text.strip_suffix(port).unwrap_or(text).to_ascii_lowercase();
    plain(origin) == plain(authority)
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn only_the_own_host_is_at_home() {
        for (origin, foreign) in [
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
            assert_eq!(is_foreign(&headers, "https", "app.example"), foreign, "{origin}");
            headers.append(ORIGIN, HeaderValue::from_static("https://evil.example"));
            assert!(is_foreign(&headers, "https", "app.example"), "two, {origin}");
        }
        let mut headers = HeaderMap::new();
        headers.insert(ORIGIN, HeaderValue::from_static("http://app.example"));
        assert!(!is_foreign(&headers, "http", "app.example:80"), "a router without TLS");
        headers.insert(ORIGIN, HeaderValue::from_static("https://app.example"));
        assert!(!is_foreign(&headers, "http", "app.example"), "a router behind a proxy that has TLS");
        let mut headers = HeaderMap::new();
        assert!(!is_foreign(&headers, "https", "app.example"), "not a browser");
        headers.insert(&FETCH_SITE, HeaderValue::from_static("cross-site"));
        assert!(is_foreign(&headers, "https", "app.example"));
        headers.insert(&FETCH_SITE, HeaderValue::from_static("same-origin"));
        assert!(!is_foreign(&headers, "https", "app.example"));
    }
}
