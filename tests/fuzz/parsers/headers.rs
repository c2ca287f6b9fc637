//! Headers that an untrusted peer controls: cookies that a machine sets, and hop-by-hop headers.

use http::header::{CONNECTION, HeaderMap, HeaderName, HeaderValue, SET_COOKIE, UPGRADE};
use proptest::prelude::*;
use svc::http::proxy::strip_hop_by_hop;
use svc::router::{drop_reserved, reserved_names};

use super::Target;

pub fn set_cookie() -> Target {
    Target {
        name: "set-cookie",
        valid: cookies().boxed(),
        check_any: check_any_cookies,
        check_valid: check_valid_cookies,
        cases: 2000,
    }
}

/// Generates one line per cookie; some have the name of one of the router's own cookies.
fn cookies() -> impl Strategy<Value = Vec<u8>> {
    let other_names =
        prop_oneof!["[a-z]{1,6}", Just("__Host-theme".to_owned()), Just("__Secure-id".to_owned())];
    let reserved = prop::sample::select(reserved_names());
    let line = (prop_oneof![3 => other_names, 1 => reserved], "[a-zA-Z0-9%=]{0,12}")
        .prop_map(|(name, value)| format!("{name}={value}; Path=/; HttpOnly"));
    prop::collection::vec(line, 0..5).prop_map(|lines| lines.join("\n").into_bytes())
}

/// Returns a header with this name for each line that is a valid header value.
fn parse_header_lines(name: &HeaderName, bytes: &[u8]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    let lines = bytes.split(|byte| *byte == b'\n').take(64);
    lines.filter_map(|line| HeaderValue::from_bytes(line).ok()).for_each(|line| {
        headers.append(name, line);
    });
    headers
}

/// Returns the name under which a browser stores a cookie (RFC 6265bis, section 5.6).
fn stored_name(line: &[u8]) -> Vec<u8> {
    let pair = line.split(|byte| *byte == b';').next().unwrap_or_default();
    let name = pair.iter().position(|byte| *byte == b'=').map_or(&[][..], |end| &pair[..end]);
    let is_space = |byte: &u8| matches!(byte, b' ' | b'\t');
    let begin = name.iter().position(|byte| !is_space(byte)).unwrap_or(name.len());
    let end = name.iter().rposition(|byte| !is_space(byte)).map_or(begin, |last| last + 1);
    name[begin..end].to_vec()
}

/// Whether a browser would send the cookie under a name that the router reads; prefixes are compared
/// case-insensitively.
fn is_router_cookie(name: &[u8]) -> bool {
    // A cookie without a name is sent as its bare value, which can look like a pair.
    name.is_empty()
        || reserved_names().iter().any(|reserved| match reserved.strip_prefix("__Host-") {
            None => name == reserved.as_bytes(),
            Some(bare) => {
                name.len() == reserved.len()
                    && name[..7].eq_ignore_ascii_case(b"__Host-")
                    && name[7..] == *bare.as_bytes()
            }
        })
}

fn check_any_cookies(bytes: &[u8]) -> Result<(), String> {
    let before = parse_header_lines(&SET_COOKIE, bytes);
    let mut after = before.clone();
    drop_reserved(&mut after);
    let lines =
        |headers: &HeaderMap| -> Vec<HeaderValue> { headers.get_all(SET_COOKIE).iter().cloned().collect() };
    let (before, after) = (lines(&before), lines(&after));
    if let Some(line) = after.iter().find(|line| is_router_cookie(&stored_name(line.as_bytes()))) {
        return Err(format!("the router's cookie {line:?} was not removed"));
    }
    let expected: Vec<_> =
        before.into_iter().filter(|line| !is_router_cookie(&stored_name(line.as_bytes()))).collect();
    // Cookies with invalid names may be dropped as well, but none may be added or reordered.
    let mut rest = expected.iter();
    if after.iter().all(|line| rest.any(|expected| expected == line)) {
        Ok(())
    } else {
        Err(format!("expected only cookies from {expected:?}, in this order; found {after:?}"))
    }
}

fn check_valid_cookies(bytes: &[u8]) -> Result<(), String> {
    let before = parse_header_lines(&SET_COOKIE, bytes);
    let expected = before.get_all(SET_COOKIE).iter();
    let expected = expected.filter(|line| !is_router_cookie(&stored_name(line.as_bytes()))).count();
    let mut after = before.clone();
    drop_reserved(&mut after);
    let found = after.get_all(SET_COOKIE).iter().count();
    if found == expected { Ok(()) } else { Err(format!("expected {expected} cookies, found {found}")) }
}

pub fn hop_by_hop() -> Target {
    Target {
        name: "hop-by-hop",
        valid: hop_by_hop_lines().boxed(),
        check_any: check_any_hop_by_hop,
        check_valid: check_valid_hop_by_hop,
        cases: 2000,
    }
}

fn hop_by_hop_lines() -> impl Strategy<Value = Vec<u8>> {
    let line = prop_oneof![
        Just("connection: keep-alive, Upgrade".to_owned()),
        Just("connection: x-own, te".to_owned()),
        Just("upgrade: websocket".to_owned()),
        Just("upgrade: h2c".to_owned()),
        Just("te: trailers".to_owned()),
        Just("transfer-encoding: chunked".to_owned()),
        Just("x-own: 1".to_owned()),
        "x-[a-z]{1,8}: [a-z]{0,8}",
    ];
    prop::collection::vec(line, 0..8).prop_map(|lines| lines.join("\n").into_bytes())
}

fn parse_headers(bytes: &[u8]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for line in bytes.split(|byte| *byte == b'\n').take(64) {
        let Some(colon) = line.iter().position(|byte| *byte == b':') else { continue };
        let name = HeaderName::from_bytes(&line[..colon]);
        if let (Ok(name), Ok(value)) = (name, HeaderValue::from_bytes(line[colon + 1..].trim_ascii())) {
            headers.append(name, value);
        }
    }
    headers
}

const HOP_BY_HOP: [&str; 7] = [
    "keep-alive",
    "proxy-connection",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
];

/// Checks that hop-by-hop headers and those named in `Connection` are removed, and that a remaining upgrade is valid
/// and does not switch to HTTP or TLS, which would allow request smuggling.
fn check_any_hop_by_hop(bytes: &[u8]) -> Result<(), String> {
    let before = parse_headers(bytes);
    let mut after = before.clone();
    let has_upgrade = strip_hop_by_hop(&mut after);
    let listed = before.get_all(CONNECTION).iter().flat_map(|value| value.as_bytes().split(|b| *b == b','));
    for name in listed.filter_map(|name| HeaderName::from_bytes(name.trim_ascii()).ok()) {
        if after.contains_key(&name) && name != UPGRADE && name != CONNECTION {
            return Err(format!("{name} is listed in Connection, but was not removed"));
        }
    }
    if let Some(name) = HOP_BY_HOP.iter().find(|name| after.contains_key(**name)) {
        return Err(format!("the hop-by-hop header {name} was not removed"));
    }
    let all = |name: HeaderName| after.get_all(name).iter().map(HeaderValue::as_bytes).collect::<Vec<_>>();
    let (connection, upgrade) = (all(CONNECTION), all(UPGRADE));
    let names_http_or_tls = |value: &[u8]| {
        let text = String::from_utf8_lossy(value).to_ascii_lowercase();
        let mut protocols = text.split(',').map(str::trim);
        protocols.any(|protocol| ["h2c", "http", "tls"].iter().any(|name| protocol.starts_with(name)))
    };
    let is_valid = match (has_upgrade, connection.as_slice(), upgrade.as_slice()) {
        (false, [], []) => true,
        (true, [b"upgrade"], [protocols]) => !names_http_or_tls(protocols),
        _ => false,
    };
    if !is_valid {
        return Err(format!(
            "invalid upgrade headers: Connection {connection:?}, Upgrade {upgrade:?} (reported: {has_upgrade})"
        ));
    }
    let mut second_pass = after.clone();
    if strip_hop_by_hop(&mut second_pass) != has_upgrade || second_pass != after {
        return Err(format!("a second pass changed the result: {after:?} became {second_pass:?}"));
    }
    Ok(())
}

fn check_valid_hop_by_hop(bytes: &[u8]) -> Result<(), String> {
    let before = parse_headers(bytes);
    let connection_names_x_own =
        before.get_all(CONNECTION).iter().any(|value| value.as_bytes().starts_with(b"x-own"));
    let mut after = before.clone();
    strip_hop_by_hop(&mut after);
    let end_to_end = before.keys().filter(|name| name.as_str().starts_with("x-"));
    let mut end_to_end = end_to_end.filter(|name| !(connection_names_x_own && name.as_str() == "x-own"));
    match end_to_end.find(|name| after.get_all(*name).iter().ne(before.get_all(*name).iter())) {
        Some(name) => Err(format!("the values of the end-to-end header {name} were changed")),
        None => Ok(()),
    }
}
