//! Renders the frame around an app's page, in the owner's origin (docs/apps/tokens.md).
//!
//! The frame passes the app a token instead of the session, renews the token, and restricts the inner page to that app.
//! Invariant: none of the app's code runs in the owner's origin.

use axum::response::Response;
use base64::Engine;
use base64::engine::general_purpose::STANDARD as B64;
use http::header::{CONTENT_SECURITY_POLICY, HeaderValue};
use http::{StatusCode, Uri};
use ring::digest::{SHA256, digest};
use serde_json::json;

use super::app_token::{self, MintedToken};
use super::page;

const TEMPLATE: &str = include_str!("frame.html");
const SCRIPT: &str = include_str!("frame.js");
const STYLE: &str = include_str!("frame.css");
const EXPIRED_TEMPLATE: &str = include_str!("expired.html");
const EXPIRED_STYLE: &str = include_str!("expired.css");
/// Notifies the outer frame, which can request another token.
const EXPIRED_SCRIPT: &str = r#"parent.postMessage({ type: "svc:app-token-ended" }, "*");"#;

/// Splits the path of an app's page into the app and the path inside it; `None` for all other paths.
pub(super) fn parse_target(path: &str) -> Option<(&str, &str)> {
    let (slug, rest) = path.strip_prefix("/apps/")?.split_once('/')?;
    (app_token::is_slug(slug) && !rest.starts_with('~')).then_some((slug, rest))
}

/// Renders the frame around `/apps/<slug>/<rest>`; `origin` is this host's origin in the browser.
pub(super) fn render(slug: &str, rest: &str, uri: &Uri, origin: &str, minted: &MintedToken) -> Response {
    let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    let settings = json!({
        "app": slug,
        "path": format!("{rest}{query}"),
        "token": minted.token,
        "expiresAt": minted.expires_at,
    });
    let body = TEMPLATE
        .replace("{{title}}", slug)
        .replace("{{style}}", STYLE)
        .replace("{{script}}", SCRIPT)
        .replace("{{settings}}", &escape_json(&settings.to_string()));
    let mut response = page::html_response(StatusCode::OK, body);
    // The policy allows only this app: a link in its page must not load another app's page, which would receive this
    // app's token.
    set_csp(&mut response, SCRIPT, STYLE, &format!("{origin}/apps/{slug}/"));
    response
}

/// Returns the page shown inside the frame if the app token is invalid or has expired.
pub(super) fn expired_page() -> Response {
    let body = EXPIRED_TEMPLATE.replace("{{style}}", EXPIRED_STYLE).replace("{{script}}", EXPIRED_SCRIPT);
    let mut response = page::html_response(StatusCode::UNAUTHORIZED, body);
    set_csp(&mut response, EXPIRED_SCRIPT, EXPIRED_STYLE, "'none'");
    response
}

/// Sets a policy that allows only this script and style, by their hashes, and frames from `frame_src`.
fn set_csp(response: &mut Response, script: &str, style: &str, frame_src: &str) {
    let hash = |text: &str| format!("'sha256-{}'", B64.encode(digest(&SHA256, text.as_bytes())));
    let policy = format!(
        "default-src 'none'; script-src {}; style-src {}; img-src data:; connect-src 'self'; frame-src {frame_src}; \
         frame-ancestors 'self'; base-uri 'none'; form-action 'none'",
        hash(script),
        hash(style)
    );
    if let Ok(policy) = HeaderValue::from_str(&policy) {
        response.headers_mut().insert(CONTENT_SECURITY_POLICY, policy);
    }
}

/// Escapes JSON for a `<script>` element, so that no value can close the element.
fn escape_json(json: &str) -> String {
    json.replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_target_accepts_only_app_pages() {
        assert_eq!(parse_target("/apps/notes/"), Some(("notes", "")));
        assert_eq!(parse_target("/apps/notes/a/b"), Some(("notes", "a/b")));
        for other in ["/apps", "/apps/", "/apps/notes", "/apps/Notes/", "/apps/notes/~t/", "/icons/notes/"] {
            assert_eq!(parse_target(other), None, "{other}");
        }
    }

    #[test]
    fn render_escapes_path_in_settings() {
        let minted = MintedToken { token: "svca_x".to_owned(), expires_at: 1 };
        let uri = Uri::from_static("/apps/notes/x?a=%3C");
        let response =
            render("notes", "</script><script>alert(1)</script>", &uri, "https://app.test", &minted);
        let body = String::from_utf8_lossy(
            &futures_util::FutureExt::now_or_never(axum::body::to_bytes(response.into_body(), usize::MAX))
                .unwrap()
                .unwrap(),
        )
        .into_owned();
        assert_eq!(body.matches("</script>").count(), 2, "only the template's own closing tags");
        assert!(body.contains("\\u003c/script\\u003e"), "{body}");
    }
}
