//! Cookies (RFC 6265): ours as they are set and read, and which of an upstream's are dropped.

use http::HeaderValue;
use http::header::{COOKIE, HeaderMap, SET_COOKIE};

/// The identity provider's session cookie.
pub(super) const IDP: &str = "__session";
/// Binds a one-time code to the browser that asked for it.
pub(super) const STATE: &str = "svc_code_state";

/// None of these may be set by a machine.
const OURS: [&str; 4] = ["svc_session", "svc_code_session", STATE, IDP];

/// The first cookie of this name.
pub(super) fn get<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let lines = headers.get_all(COOKIE).iter().filter_map(|line| line.to_str().ok());
    let mut pairs = lines.flat_map(|line| line.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.find(|(found, _)| *found == name).map(|(_, value)| value.trim_matches('"'))
}

/// A cookie that scripts cannot read and that goes over HTTPS alone.
pub(super) fn set(name: &str, value: &str, path: &str, max_age_seconds: u64) -> HeaderValue {
    let line =
        format!("{name}={value}; Path={path}; Max-Age={max_age_seconds}; HttpOnly; Secure; SameSite=Lax");
    let mut line = HeaderValue::from_str(&line).expect("our cookies are base64url");
    line.set_sensitive(true);
    line
}

/// Drops what an upstream would set under our names. A line without a name is dropped too: browsers send it back as
/// if its value were the pair.
pub(super) fn drop_ours(headers: &mut HeaderMap) {
    let ours = |line: &HeaderValue| {
        let pair = line.as_bytes().split(|b| *b == b';').next().unwrap_or_default();
        match pair.iter().position(|b| *b == b'=') {
            None | Some(0) => true,
            Some(end) => {
                let name = pair[..end].trim_ascii();
                name.is_empty() || OURS.iter().any(|own| name == own.as_bytes())
            }
        }
    };
    if !headers.get_all(SET_COOKIE).iter().any(ours) {
        return;
    }
    let kept: Vec<HeaderValue> =
        headers.get_all(SET_COOKIE).iter().filter(|line| !ours(line)).cloned().collect();
    headers.remove(SET_COOKIE);
    for line in kept {
        headers.append(SET_COOKIE, line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_sets_its_own_cookies_and_none_of_ours() {
        let mut headers = HeaderMap::new();
        for line in [
            "a=1; Path=/",
            "svc_session=x",
            "svc_code_session =x",
            "=svc_session=x",
            "svc_session",
            "__session=x",
            "svc_code_state=1",
            "svc_sessions=2",
        ] {
            headers.append(SET_COOKIE, HeaderValue::from_static(line));
        }
        drop_ours(&mut headers);
        assert_eq!(headers.get_all(SET_COOKIE).iter().collect::<Vec<_>>(), ["a=1; Path=/", "svc_sessions=2"]);
    }

    #[test]
    fn the_first_of_a_name_is_read() {
        let mut headers = HeaderMap::new();
        headers.append(COOKIE, HeaderValue::from_static("a=1; svc_session=x=y; svc_session=z"));
        headers.append(COOKIE, HeaderValue::from_static("b=\"2\""));
        assert_eq!(get(&headers, "svc_session"), Some("x=y"));
        assert_eq!(get(&headers, "b"), Some("2"));
        assert_eq!(get(&headers, "session"), None);
    }
}
