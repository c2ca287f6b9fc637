//! Origins in app manifests: a single scheme, host and port, without a path or wildcard.

use std::fmt;
use std::str::FromStr;

use url::{Host, Url};

const MAX_ORIGIN_BYTES: usize = 255;

/// A normalized `https` or `wss` origin. Safe inside a Content-Security-Policy: contains no spaces, quotes, commas,
/// semicolons or wildcards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForeignOrigin(String);

impl ForeignOrigin {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ForeignOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for ForeignOrigin {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const EXPECTED: &str = "must be an origin such as https://api.example.com or wss://example.com:8443";
        let url = Url::parse(text).map_err(|_| EXPECTED)?;
        let is_bare = url.username().is_empty()
            && url.password().is_none()
            && url.path().trim_start_matches('/').is_empty()
            && url.query().is_none()
            && url.fragment().is_none();
        let Some(host) = url.host() else { return Err(EXPECTED) };
        if text.len() > MAX_ORIGIN_BYTES || !is_bare || !matches!(url.scheme(), "https" | "wss") {
            return Err(EXPECTED);
        }
        let is_safe_host = match &host {
            Host::Domain(name) => name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.')),
            Host::Ipv4(_) | Host::Ipv6(_) => true,
        };
        if !is_safe_host {
            return Err(EXPECTED);
        }
        let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
        Ok(Self(format!("{}://{host}{port}", url.scheme())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_normalizes_origins() {
        for (text, origin) in [
            ("https://API.example.com/", "https://api.example.com"),
            ("https://api.example.com:443", "https://api.example.com"),
            ("wss://example.com:8443", "wss://example.com:8443"),
            ("https://192.0.2.1", "https://192.0.2.1"),
            ("https://b\u{fc}cher.example", "https://xn--bcher-kva.example"),
        ] {
            assert_eq!(text.parse::<ForeignOrigin>().unwrap().as_str(), origin);
        }
    }

    #[test]
    fn parse_rejects_patterns_paths_and_other_schemes() {
        for text in [
            "",
            "*",
            "https:",
            "https://*",
            "https://*.example.com",
            "http://example.com",
            "data:x",
            "example.com",
            "https://example.com/path",
            "https://example.com?x",
            "https://example.com#x",
            "https://u:p@example.com",
            "https://example.com; script-src *",
            "https://a.example https://b.example",
            "https://a'b.example",
        ] {
            assert!(text.parse::<ForeignOrigin>().is_err(), "{text}");
        }
    }
}
