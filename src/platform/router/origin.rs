//! Whether another site made the browser send this: such unsafe requests and WebSockets are refused.

use http::header::{HeaderMap, ORIGIN};
use http::{HeaderName, Method};

static FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// `authority` is the name and port that the request was sent to.
pub(super) fn is_foreign(headers: &HeaderMap, authority: &str) -> bool {
    if headers.contains_key(ORIGIN) {
        return is_foreign_origin(headers, authority);
    }
    // Browsers that leave out the origin still say how they came here.
    headers.get(&FETCH_SITE).is_some_and(|site| !matches!(site.as_bytes(), b"same-origin" | b"none"))
}

/// By `Origin` alone; a request without one is at home.
pub(super) fn is_foreign_origin(headers: &HeaderMap, authority: &str) -> bool {
    let own = |origin: &http::HeaderValue| {
        let origin = origin.to_str().unwrap_or_default();
        let host = origin.strip_prefix("https://").or_else(|| origin.strip_prefix("http://"));
        host.is_some_and(|host| same(host, authority))
    };
    !headers.get_all(ORIGIN).iter().all(own)
}

/// Only what may change something can be forged to harm.
pub(super) fn matters(method: &Method, upgrade: bool) -> bool {
    upgrade || !method.is_safe()
}

/// An origin leaves out its scheme's own port; a `Host` may name it.
fn same(origin: &str, authority: &str) -> bool {
    let plain = |text: &str| {
        let text = text.strip_suffix(":443").or_else(|| text.strip_suffix(":80")).unwrap_or(text);
        text.to_ascii_lowercase()
    };
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
            ("http://APP.example:80", false),
            ("https://code.example", true),
            ("https://app.example.evil", true),
            ("https://app.example:8443", true),
            ("null", true),
            ("app.example", true),
            ("", true),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(ORIGIN, HeaderValue::from_static(origin));
            assert_eq!(is_foreign(&headers, "app.example"), foreign, "{origin}");
            headers.append(ORIGIN, HeaderValue::from_static("https://evil.example"));
            assert!(is_foreign(&headers, "app.example"), "two, {origin}");
        }
        let mut headers = HeaderMap::new();
        assert!(!is_foreign(&headers, "app.example"), "not a browser");
        headers.insert(&FETCH_SITE, HeaderValue::from_static("cross-site"));
        assert!(is_foreign(&headers, "app.example"));
        headers.insert(&FETCH_SITE, HeaderValue::from_static("same-origin"));
        assert!(!is_foreign(&headers, "app.example"));
    }
}
