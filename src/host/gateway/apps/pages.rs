//! `GET /apps/<slug>/…`: an app's built pages, from below its output folder and nowhere else.
//!
//! A document runs in an origin of its own: apps share a host with the owner's session, so none of them may be of it.

use std::collections::BTreeMap;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Extension, Request, State};
use axum::response::{IntoResponse, Redirect, Response};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, header};
use tokio_util::io::ReaderStream;

use super::manifest::Runtime;
use crate::host::gateway::auth::{Caller, Principal};
use crate::host::gateway::state::Gateway;
use crate::http::files::{content_type, is_fresh, not_modified, percent_decode, tagged};
use crate::http::problem::{Code, Problem};
use crate::http::segments::Segments;

const SANDBOX: &str = "sandbox allow-scripts allow-forms allow-modals allow-popups allow-downloads; \
                       frame-ancestors 'self'; object-src 'none'; base-uri 'none'";

pub async fn page(
    State(gateway): State<Arc<Gateway>>,
    Extension(caller): Extension<Caller>,
    // Refused where it is no text; what it leads to is told by the whole of it.
    _: Segments<BTreeMap<String, String>>,
    request: Request,
) -> Response {
    let (method, uri, headers) = (request.method(), request.uri(), request.headers());
    match find(&gateway, &caller.0, uri).await {
        Ok(Found::Folder(to)) => Redirect::permanent(&to).into_response(),
        Ok(Found::File(path, meta)) => serve(method, headers, &path, &meta).await,
        Err(problem) => problem.into_response(),
    }
}

enum Found {
    /// An app's folder without its last slash, by which relative links would miss it.
    Folder(String),
    File(PathBuf, Metadata),
}

async fn find(gateway: &Gateway, principal: &Principal, uri: &Uri) -> Result<Found, Problem> {
    let none = || Problem::new(Code::NotFound, "There is no such page.");
    let below = uri.path().strip_prefix("/apps/").unwrap_or_default();
    let (slug, path) = below.split_once('/').map_or((below, None), |(slug, path)| (slug, Some(path)));
    if let Principal::App { slug: own } = principal
        && own != slug
    {
        return Err(Problem::new(Code::Forbidden, "An app sees its own pages alone."));
    }
    let known = gateway.apps.known();
    let (folder, manifest) = known.folders.get(slug).ok_or_else(none)?;
    let Some(path) = path else { return Ok(Found::Folder(format!("/apps/{slug}/"))) };
    if manifest.runtime == Runtime::Node {
        return Err(Problem::new(Code::Unavailable, "Apps of runtime node are not served yet."));
    }
    let path = relative(path).ok_or_else(none)?;
    let root = folder.join(&manifest.output);
    let looked = tokio::task::spawn_blocking(move || look(&root, &path)).await.ok().flatten();
    looked.map(|(path, meta)| Found::File(path, meta)).ok_or_else(none)
}

/// A URL's path as a path below a folder; `None` if it could lead anywhere else.
fn relative(path: &str) -> Option<PathBuf> {
    let decoded = percent_decode(path)?;
    if decoded.contains(['\0', '\\']) {
        return None;
    }
    let path = PathBuf::from(decoded);
    let inside = path.components().all(|part| {
        matches!(part, Component::Normal(name)
        if !name.to_string_lossy().starts_with('.'))
    });
    inside.then_some(path)
}

/// The file, or the app's first page for a path that only its own router knows. Links that lead out are not followed.
fn look(root: &Path, path: &Path) -> Option<(PathBuf, Metadata)> {
    let root = root.canonicalize().ok()?;
    let index = || file(&root, &root.join("index.html"));
    if path.as_os_str().is_empty() {
        return index();
    }
    let place = root.join(path);
    file(&root, &place)
        .or_else(|| file(&root, &place.join("index.html")))
        .or_else(|| path.extension().is_none().then(index).flatten())
}

fn file(root: &Path, path: &Path) -> Option<(PathBuf, Metadata)> {
    let path = path.canonicalize().ok().filter(|path| path.starts_with(root))?;
    let meta = std::fs::metadata(&path).ok().filter(Metadata::is_file)?;
    Some((path, meta))
}

async fn serve(method: &Method, headers: &HeaderMap, path: &Path, meta: &Metadata) -> Response {
    let tag = format!("\"{:x}-{:x}-{:x}\"", meta.mtime(), meta.mtime_nsec(), meta.len());
    let kind = content_type(path);
    if is_fresh(headers, &tag) {
        return not_modified(&tag);
    }
    let body = if *method == Method::HEAD {
        Body::empty()
    } else {
        match tokio::fs::File::open(path).await {
            Ok(file) => Body::from_stream(ReaderStream::with_capacity(file, 64 * 1024)),
            Err(_) => return Problem::new(Code::NotFound, "There is no such page.").into_response(),
        }
    };
    let mut response = body.into_response();
    let answer = response.headers_mut();
    answer.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    answer.insert(header::CONTENT_LENGTH, HeaderValue::from(meta.len()));
    tagged(answer, &tag);
    let fixed = |answer: &mut HeaderMap, name: HeaderName, value: &'static str| {
        answer.insert(name, HeaderValue::from_static(value));
    };
    fixed(answer, header::ACCESS_CONTROL_ALLOW_ORIGIN, "null");
    fixed(answer, header::REFERRER_POLICY, "no-referrer");
    if is_document(kind) {
        fixed(answer, header::CONTENT_SECURITY_POLICY, SANDBOX);
    }
    response
}

/// What a browser would run in the page's origin when it is opened.
fn is_document(kind: &str) -> bool {
    ["text/html", "image/svg+xml", "application/xml", "application/xhtml", "application/pdf"]
        .iter()
        .any(|document| kind.starts_with(document))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_stays_below_its_folder() {
        for bad in [
            "../x",
            "a/../../x",
            "%2e%2e/x",
            "..%2fx",
            "/etc/passwd",
            "%2fetc",
            ".env",
            "a/.git/x",
            "a%00",
            "a\\..\\b",
            "%zz",
            "%f",
        ] {
            assert_eq!(relative(bad), None, "{bad}");
        }
        assert_eq!(relative("assets/app%20one.js"), Some("assets/app one.js".into()));
        assert_eq!(relative(""), Some(PathBuf::new()));
    }

    #[test]
    fn links_that_lead_out_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("dist");
        std::fs::create_dir(&root).unwrap();
        std::fs::write(dir.path().join("secret.txt"), "s").unwrap();
        std::fs::write(root.join("index.html"), "i").unwrap();
        std::os::unix::fs::symlink("../secret.txt", root.join("out.txt")).unwrap();
        assert!(look(&root, Path::new("out.txt")).is_none());
        assert!(look(&root, Path::new("missing.js")).is_none());
        for page in ["", "settings/profile"] {
            assert!(look(&root, Path::new(page)).unwrap().0.ends_with("index.html"));
        }
    }
}
