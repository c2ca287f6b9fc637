//! The page around an app's page, of the owner's origin (contract, part 4, "Apps").
//!
//! It gives the app inside a token instead of the session, renews it, and lets the inner page go nowhere but to the same
//! app. Invariant: nothing of the app runs in the owner's origin.

use axum::response::Response;
use base64::Engine;
use base64::engine::general_purpose::STANDARD as B64;
use http::header::{CONTENT_SECURITY_POLICY, HeaderValue};
use http::{StatusCode, Uri};
use ring::digest::{SHA256, digest};
use serde_json::json;

use super::app_token::{self, Minted};
use super::page;

const TEMPLATE: &str = include_str!("frame.html");
const SCRIPT: &str = include_str!("frame.js");
const STYLE: &str = include_str!("frame.css");
const ENDED: &str = include_str!("ended.html");
const ENDED_STYLE: &str = include_str!("ended.css");
/// Tells the frame, which can ask for another token.
const ENDED_SCRIPT: &str = r#"parent.postMessage({ type: "svc:app-token-ended" }, "*");"#;

/// The app whose page a path is, and the path inside it; `None` for all other paths.
pub(super) fn target(path: &str) -> Option<(&str, &str)> {
    let (slug, rest) = path.strip_prefix("/apps/")?.split_once('/')?;
    (app_token::is_slug(slug) && !rest.starts_with('~')).then_some((slug, rest))
}

/// The frame around `/apps/<slug>/<rest>`.
///
/// `origin` is this host's, as the browser knows it.
pub(super) fn around(slug: &str, rest: &str, uri: &Uri, origin: &str, minted: &Minted) -> Response {
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
        .replace("{{settings}}", &in_html(&settings.to_string()));
    let mut answer = page::html(StatusCode::OK, body);
    // Of this app alone: a link of its page must not lead to another app's, which would be handed this one's token.
    restrict(&mut answer, SCRIPT, STYLE, &format!("{origin}/apps/{slug}/"));
    answer
}

/// What stands inside the frame when its token has ended.
pub(super) fn ended() -> Response {
    let body = ENDED.replace("{{style}}", ENDED_STYLE).replace("{{script}}", ENDED_SCRIPT);
    let mut answer = page::html(StatusCode::UNAUTHORIZED, body);
    restrict(&mut answer, ENDED_SCRIPT, ENDED_STYLE, "'none'");
    answer
}

/// Our script and style by their hashes: nothing else runs, and an inner page stays where `frames` says.
fn restrict(answer: &mut Response, script: &str, style: &str, frames: &str) {
    let hash = |text: &str| format!("'sha256-{}'", B64.encode(digest(&SHA256, text.as_bytes())));
    let policy = format!(
        "default-src 'none'; script-src {}; style-src {}; img-src data:; connect-src 'self'; frame-src {frames}; \
         frame-ancestors 'self'; base-uri 'none'; form-action 'none'",
        hash(script),
        hash(style)
    );
    if let Ok(policy) = HeaderValue::from_str(&policy) {
        answer.headers_mut().insert(CONTENT_SECURITY_POLICY, policy);
    }
}

/// JSON inside a `<script type="application/json">`, which nothing in it can end.
fn in_html(json: &str) -> String {
    json.replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_apps_pages_have_a_frame() {
        assert_eq!(target("/apps/notes/"), Some(("notes", "")));
        assert_eq!(target("/apps/notes/a/b"), Some(("notes", "a/b")));
        for other in ["/apps", "/apps/", "/apps/notes", "/apps/Notes/", "/apps/notes/~t/", "/icons/notes/"] {
            assert_eq!(target(other), None, "{other}");
        }
    }

    #[test]
    fn a_path_cannot_end_the_settings() {
        let minted = Minted { token: "svca_x".to_owned(), expires_at: 1 };
        let uri = Uri::from_static("/apps/notes/x?a=%3C");
        let answer = around("notes", "</script><script>alert(1)</script>", &uri, "https://app.test", &minted);
        let body = String::from_utf8_lossy(
            &futures_util::FutureExt::now_or_never(axum::body::to_bytes(answer.into_body(), usize::MAX))
                .unwrap()
                .unwrap(),
        )
        .into_owned();
        assert_eq!(body.matches("</script>").count(), 2, "the template's own");
        assert!(body.contains("\\u003c/script\\u003e"), "{body}");
    }
}
