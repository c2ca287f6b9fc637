//! Validates the paths to which a redirect returns a browser, so that none of them leads to another host.

use http::Uri;

const MAX_RETURN_PATH_BYTES: usize = 2048;

/// Returns the path and query of a request, or `/` if they are too long or a browser could interpret them as a URL on
/// another host.
pub(super) fn local_path(uri: &Uri) -> &str {
    uri.path_and_query()
        .map(http::uri::PathAndQuery::as_str)
        .filter(|path| is_local_path(path))
        .unwrap_or("/")
}

/// Whether this is a path of at most `MAX_RETURN_PATH_BYTES` that no browser interprets as a URL on another host.
pub(super) fn is_local_path(path: &str) -> bool {
    path.len() <= MAX_RETURN_PATH_BYTES
        && path.starts_with('/')
        && !path.starts_with("//")
        && path.chars().all(|c| c.is_ascii_graphic() && c != '\\')
}

#[cfg(test)]
mod tests {
    #[test]
    fn is_local_path_rejects_other_hosts() {
        for good in ["/", "/a?b=c#d", "/%2F/x"] {
            assert!(super::is_local_path(good), "{good}");
        }
        for bad in ["", "a", "//evil", "/\\evil", "https://evil", "/a\nb", "/a b", "/\t/evil"] {
            assert!(!super::is_local_path(bad), "{bad:?}");
        }
    }
}
