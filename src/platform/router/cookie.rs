//! Cookies (RFC 6265): sets and reads the router's cookies, and drops machine cookies that use the same names.
//!
//! Over HTTPS, the router's cookies have the prefix `__Host-`: a browser accepts such a cookie only from the host
//! itself, so that no other host on the same domain can set one.

use http::header::{COOKIE, HeaderMap, SET_COOKIE};
use http::{HeaderName, HeaderValue};

use crate::public_host::PublicHost;

/// The identity provider's session cookie.
const PROVIDER_COOKIE: &str = "__session";
const HOST_PREFIX: &str = "__Host-";
/// Browsers send this header; other clients do not.
static FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// A cookie that the router sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RouterCookie {
    Session(PublicHost),
    /// Binds a single-use code to the browser that requested it.
    State,
    /// Records that the user kept the session's account even though the provider's cookie belongs to a different user.
    KeptAccount,
    /// A digest of the user whose machine this browser last used. The cookie outlives the session.
    LastUser,
}

impl RouterCookie {
    const ALL: [Self; 5] = [
        Self::Session(PublicHost::App),
        Self::Session(PublicHost::Code),
        Self::State,
        Self::KeptAccount,
        Self::LastUser,
    ];

    /// Returns the name without the prefix. It is used over plain HTTP, and by clients that are not browsers.
    fn name(self) -> &'static str {
        match self {
            Self::Session(host) => host.session_cookie_name(),
            Self::State => "svc_code_state",
            Self::KeptAccount => "svc_kept_account",
            Self::LastUser => "svc_last_user",
        }
    }

    /// Returns the cookie's value. Over HTTPS, a cookie without the prefix is ignored if a browser sent it.
    pub(super) fn get<'a>(self, headers: &'a HeaderMap, scheme: &str) -> Option<&'a str> {
        if scheme != "https" {
            return find_value(headers, |name| name == self.name());
        }
        find_value(headers, |name| name.strip_prefix(HOST_PREFIX) == Some(self.name())).or_else(|| {
            if is_browser(headers) { None } else { find_value(headers, |name| name == self.name()) }
        })
    }

    /// Returns the `Set-Cookie` value for this host. Scripts cannot read the cookie, and browsers send it only over
    /// HTTPS.
    pub(super) fn set_cookie_header(self, value: &str, scheme: &str, max_age_seconds: u64) -> HeaderValue {
        let prefix = if scheme == "https" { HOST_PREFIX } else { "" };
        let name = self.name();
        let line = format!(
            "{prefix}{name}={value}; Path=/; Max-Age={max_age_seconds}; HttpOnly; Secure; SameSite=Lax"
        );
        let mut line = HeaderValue::from_str(&line).expect("cookie values are visible ASCII");
        line.set_sensitive(true);
        line
    }

    /// Returns the `Set-Cookie` value that deletes the cookie.
    pub(super) fn expired_cookie_header(self, scheme: &str) -> HeaderValue {
        self.set_cookie_header("", scheme, 0)
    }
}

/// Whether the client is a browser: other clients do not send `Sec-Fetch-Site`.
pub(super) fn is_browser(headers: &HeaderMap) -> bool {
    headers.contains_key(&FETCH_SITE)
}

/// Returns the identity provider's session token.
pub(super) fn provider_token(headers: &HeaderMap) -> Option<&str> {
    find_value(headers, |name| name == PROVIDER_COOKIE)
}

/// Returns the value of the first cookie whose name matches. The router's cookies and the provider's are ASCII, but
/// pages, machines and other hosts can set cookies that are not, and a browser sends all of them in one line.
fn find_value(headers: &HeaderMap, matches: impl Fn(&str) -> bool) -> Option<&str> {
    let pairs = headers.get_all(COOKIE).iter().flat_map(|line| line.as_bytes().split(|byte| *byte == b';'));
    let ascii = pairs.filter(|pair| pair.is_ascii()).filter_map(|pair| std::str::from_utf8(pair).ok());
    let mut pairs = ascii.filter_map(|pair| pair.trim().split_once('='));
    pairs.find(|(name, _)| matches(name)).map(|(_, value)| value.trim_matches('"'))
}

/// Whether machines must not set a cookie with this name. Browsers ignore the case of the prefix.
fn is_reserved(name: &[u8]) -> bool {
    let bare = match name.split_at_checked(HOST_PREFIX.len()) {
        Some((prefix, bare)) if prefix.eq_ignore_ascii_case(HOST_PREFIX.as_bytes()) => bare,
        _ => name,
    };
    bare.is_empty()
        || bare == PROVIDER_COOKIE.as_bytes()
        || RouterCookie::ALL.iter().any(|cookie| bare == cookie.name().as_bytes())
}

/// Returns all reserved cookie names, with and without the prefix, for `tests/fuzz`.
#[cfg(feature = "fuzzing")]
pub fn reserved_names() -> Vec<String> {
    let names = RouterCookie::ALL.iter().map(|cookie| cookie.name()).chain([PROVIDER_COOKIE]);
    names.flat_map(|name| [name.to_owned(), format!("{HOST_PREFIX}{name}")]).collect()
}

/// Calls `drop_reserved_cookies`, for `tests/fuzz`.
#[cfg(feature = "fuzzing")]
pub fn drop_reserved(headers: &mut HeaderMap) {
    drop_reserved_cookies(headers);
}

/// Drops cookies that a machine sets under reserved names. Also drops cookies without a name: a browser sends only
/// their value, which can contain a reserved name and a value.
pub(super) fn drop_reserved_cookies(headers: &mut HeaderMap) {
    let is_reserved_line = |line: &HeaderValue| {
        let pair = line.as_bytes().split(|b| *b == b';').next().unwrap_or_default();
        match pair.iter().position(|b| *b == b'=') {
            None | Some(0) => true,
            Some(end) => is_reserved(pair[..end].trim_ascii()),
        }
    };
    if !headers.get_all(SET_COOKIE).iter().any(is_reserved_line) {
        return;
    }
    let allowed: Vec<HeaderValue> =
        headers.get_all(SET_COOKIE).iter().filter(|line| !is_reserved_line(line)).cloned().collect();
    headers.remove(SET_COOKIE);
    for line in allowed {
        headers.append(SET_COOKIE, line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drop_reserved_cookies_keeps_other_cookies() {
        let mut headers = HeaderMap::new();
        for line in [
            "a=1; Path=/",
            "svc_session=x",
            "svc_code_session =x",
            "=svc_session=x",
            "svc_session",
            "__session=x",
            "svc_code_state=1",
            "__Host-svc_session=x",
            "__HOST-svc_session=x",
            "__Host-=x",
            "svc_sessions=2",
        ] {
            headers.append(SET_COOKIE, HeaderValue::from_static(line));
        }
        drop_reserved_cookies(&mut headers);
        assert_eq!(headers.get_all(SET_COOKIE).iter().collect::<Vec<_>>(), ["a=1; Path=/", "svc_sessions=2"]);
    }

    #[test]
    fn get_returns_first_cookie_with_name() {
        let mut headers = HeaderMap::new();
        headers.append(COOKIE, HeaderValue::from_static("a=1; svc_session=x=y; svc_session=z"));
        headers.append(COOKIE, HeaderValue::from_static("__session=\"2\""));
        assert_eq!(RouterCookie::Session(PublicHost::App).get(&headers, "http"), Some("x=y"));
        assert_eq!(provider_token(&headers), Some("2"));
        assert_eq!(RouterCookie::State.get(&headers, "http"), None);
    }

    #[test]
    fn get_skips_only_non_ascii_cookies() {
        let mut headers = HeaderMap::new();
        // A value in Latin-1, and a name that starts with a UTF-8 no-break space, which `str::trim` would remove.
        let line =
            b"name=gr\xf6\xdfe; \xc2\xa0__Host-svc_session=planted; __Host-svc_session=own; __session=2";
        headers.append(COOKIE, HeaderValue::from_bytes(line).unwrap());
        assert_eq!(RouterCookie::Session(PublicHost::App).get(&headers, "https"), Some("own"));
        assert_eq!(provider_token(&headers), Some("2"));
    }

    #[test]
    fn get_ignores_unprefixed_browser_cookie_over_https() {
        let session = RouterCookie::Session(PublicHost::App);
        let mut headers = HeaderMap::new();
        headers.append(COOKIE, HeaderValue::from_static("svc_session=planted"));
        assert_eq!(session.get(&headers, "https"), Some("planted"), "not a browser");
        headers.append(&FETCH_SITE, HeaderValue::from_static("same-origin"));
        assert_eq!(session.get(&headers, "https"), None);
        headers.append(COOKIE, HeaderValue::from_static("__Host-svc_session=own"));
        assert_eq!(session.get(&headers, "https"), Some("own"));
        let line = session.set_cookie_header("x", "https", 60);
        let line = line.to_str().unwrap();
        assert!(line.starts_with("__Host-svc_session=x; Path=/; ") && line.contains("; Secure"), "{line}");
        assert!(!line.to_ascii_lowercase().contains("domain"), "{line}");
    }
}
