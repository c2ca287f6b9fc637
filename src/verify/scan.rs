//! Pure functions that scan built files, without running them, for the files that they refer to and for placeholder
//! hosts.

use std::collections::HashSet;

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;

/// Longer quoted strings are data, not file names.
const MAX_NAME_BYTES: usize = 300;
/// Maximum length of a host name. The search for a name's start and end covers at most this many bytes on each side.
const MAX_HOST_BYTES: usize = 253;

/// Finds the distinct quoted script and style names in HTML or JavaScript, at most `max` of them. Takes time linear in
/// the length of the text, which a hostile host may have crafted.
pub fn find_script_and_style_names(text: &str, max: usize) -> Vec<&str> {
    let mut seen = HashSet::new();
    let parts = ['"', '\'', '`'].into_iter().flat_map(|quote| text.split(quote));
    let names = parts.filter_map(|part| {
        let name = part.split(['?', '#']).next().unwrap_or_default();
        let is_file = [".js", ".mjs", ".css"].iter().any(|suffix| name.ends_with(suffix));
        let is_name = name.len() <= MAX_NAME_BYTES
            && name.chars().all(|c| c.is_ascii_alphanumeric() || "/._-~@:%".contains(c));
        (is_file && is_name).then_some(name)
    });
    names.filter(|name| seen.insert(*name)).take(max).collect()
}

/// The identity provider's host in shells built without a key, and in our examples.
const PLACEHOLDER_HOSTS: [&str; 2] = ["placeholder-idp.invalid", "idp.example.com"];

/// Finds a placeholder host, in plain text or inside a publishable key. A shell that was built without the identity
/// provider's key, or with a key from an example, would connect to such a host.
pub fn find_placeholder_host(text: &str) -> Option<String> {
    let in_key = || {
        hosts_in_keys(text).find_map(|host| find_placeholder_in_text(&format!("//{host}")).map(str::to_owned))
    };
    find_placeholder_in_text(text).map(str::to_owned).or_else(in_key)
}

/// Returns the hosts in publishable keys: `pk_test_` or `pk_live_`, then base64 of a host and a `$`.
fn hosts_in_keys(text: &str) -> impl Iterator<Item = String> {
    let keys = ["pk_test_", "pk_live_"].into_iter().flat_map(|prefix| text.split(prefix).skip(1));
    keys.filter_map(|rest| {
        let is_base64 = |c: char| c.is_ascii_alphanumeric() || "+/-_".contains(c);
        let encoded = rest.split(|c| !is_base64(c)).next().unwrap_or_default();
        let encoded = encoded.replace('-', "+").replace('_', "/");
        let text = String::from_utf8(STANDARD_NO_PAD.decode(encoded).ok()?).ok()?;
        text.strip_suffix('$').filter(|host| host.chars().all(is_host_char)).map(str::to_owned)
    })
}

/// Finds a known placeholder host, or a host name that contains `placeholder`. To distinguish the name from other text,
/// such as an input's `placeholder` attribute, it must be in a URL, or be a quoted string that begins with
/// `placeholder` and has at least two dots.
fn find_placeholder_in_text(text: &str) -> Option<&str> {
    if let Some(host) = PLACEHOLDER_HOSTS.into_iter().find(|host| text.contains(host)) {
        return Some(host);
    }
    for (word_start, _) in text.match_indices("placeholder") {
        let previous = text[..word_start].chars().next_back();
        let word_starts_host = text[..word_start].ends_with("//") || previous == Some('@');
        let is_quoted = matches!(previous, Some('"' | '\'' | '`'));
        let window_start = text.floor_char_boundary(word_start.saturating_sub(MAX_HOST_BYTES));
        let host_start = text[window_start..word_start].rfind(|c: char| !is_host_char(c));
        let host_start =
            host_start.map_or(window_start, |end| text.ceil_char_boundary(window_start + end + 1));
        // A label before `placeholder`, as in `clerk.placeholder.dev`, belongs to the host.
        let start = if previous.is_some_and(is_host_char) { host_start } else { word_start };
        let host_follows_slashes = text[..start].ends_with("//");
        let window_end = text.floor_char_boundary(word_start + MAX_HOST_BYTES);
        let length = text[word_start..window_end].find(|c: char| !is_host_char(c));
        let end = length.map_or(window_end, |length| word_start + length);
        let host = text[start..end].trim_end_matches('.');
        let dots = host.matches('.').count();
        let is_in_url = word_starts_host || host_follows_slashes;
        if (is_in_url && dots >= 1) || (is_quoted && dots >= 2) {
            return Some(host);
        }
    }
    None
}

fn is_host_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '.' || c == '-'
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn find_script_and_style_names_reads_pages_and_chunks() {
        let page = r#"<link rel="modulepreload" href="/assets/vendor-1.js"><script type=module src='/assets/main-2.js?v=1'>"#;
        assert_eq!(find_script_and_style_names(page, 9), ["/assets/vendor-1.js", "/assets/main-2.js"]);
        let chunk = r#"import{a}from"./chunk-3.js";const m=["assets/x.js","assets/x.css"];b=()=>import(`./lazy.mjs`);"no js.js here""#;
        assert_eq!(
            find_script_and_style_names(chunk, 9),
            ["./chunk-3.js", "assets/x.js", "assets/x.css", "./lazy.mjs"]
        );
    }

    #[test]
    fn scan_of_hostile_text_takes_linear_time() {
        let names: String = (0..400_000).map(|n| format!("\"{n}.js")).collect();
        let hosts = "placeholder".repeat(100_000);
        let started = std::time::Instant::now();
        assert_eq!(find_script_and_style_names(&names, usize::MAX).len(), 400_000);
        assert_eq!(find_script_and_style_names(&names, 10).len(), 10);
        assert_eq!(find_placeholder_host(&hosts), None);
        assert_eq!(find_placeholder_host(&"é.placeholder".repeat(20_000)), None);
        // A quadratic scan would take many minutes.
        assert!(started.elapsed().as_secs() < 30, "{:?}", started.elapsed());
    }

    #[test]
    fn find_placeholder_host_requires_a_host_name() {
        for text in [
            r#"fetch("https://placeholder.idp.example/v1")"#,
            r#"const host="placeholder.idp.accounts.dev";"#,
            "//clerk.placeholder.dev/npm",
            r#"const h="placeholder-idp.invalid";"#,
        ] {
            assert!(find_placeholder_host(text).is_some(), "{text}");
        }
        for text in [
            r#"<input placeholder="Search">"#,
            "e.placeholder.length>0",
            r#"t("placeholder.search")"#,
            "::placeholder{color:red}",
            "https://idp.test/placeholder",
        ] {
            assert_eq!(find_placeholder_host(text), None, "{text}");
        }
    }

    #[test]
    fn find_placeholder_host_decodes_keys() {
        let key = |mode: &str, host: &str| {
            let encoded = base64::engine::general_purpose::STANDARD.encode(format!("{host}$"));
            format!(r#"const k="pk_{mode}_{encoded}",other=1;"#)
        };
        for host in ["placeholder-idp.invalid", "idp.example.com", "clerk.placeholder.dev"] {
            for mode in ["test", "live"] {
                assert_eq!(find_placeholder_host(&key(mode, host)).as_deref(), Some(host));
            }
        }
        for text in [key("test", "idp.svc.test"), "pk_test_".to_owned(), r#""pk_live_!""#.to_owned()] {
            assert_eq!(find_placeholder_host(&text), None, "{text}");
        }
    }
}
