//! Serves a static build from memory, so request paths never reach the file system.
//!
//! Content-hashed files are cached for a year; everything else is revalidated on each request. Larger text files are
//! also stored gzipped. Unknown paths without a file extension get the index page, as the shell's client-side router
//! handles them.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use flate2::Compression;
use http::header::{self, HeaderValue};
use http::request::Parts;

use svc_http::files::{
    Caching, StaticFile, is_read_method, media_type, method_not_allowed, percent_decode, respond,
};
use svc_http::problem::{Code, Problem};

/// A larger shell is a sign of a broken build.
const MAX_SITE_BYTES: u64 = 64 << 20;
const MAX_SITE_FILES: usize = 10_000;
const INDEX: &str = "index.html";
/// Directory of content-hashed files.
const HASHED_PREFIX: &str = "assets/";
/// The shell shares the owner's origin, so it may load only its own files and connect only to this host.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; \
                      connect-src 'self'; manifest-src 'self'; frame-src 'self'; frame-ancestors 'self'; \
                      base-uri 'none'; form-action 'none'; object-src 'none'";

/// Errors from loading a static build.
#[derive(Debug, thiserror::Error)]
pub enum SiteError {
    #[error("cannot read {}", .path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "the release has no shell: {} is missing; build the bundle without --no-shell",
        .0.display()
    )]
    NoShell(PathBuf),
    #[error("{} exceeds the limits for a shell ({MAX_SITE_FILES} files, {MAX_SITE_BYTES} bytes)", .0.display())]
    TooLarge(PathBuf),
}

struct SiteFile {
    plain: StaticFile,
    gzip: Option<StaticFile>,
}

/// A static build, loaded into memory and keyed by relative path.
pub struct Site {
    files: BTreeMap<String, SiteFile>,
    total_bytes: u64,
}

impl Site {
    /// Reads all files under `root`, skipping symlinks: a build doesn't contain any.
    pub fn read(root: &Path) -> Result<Self, SiteError> {
        let index = root.join(INDEX);
        if !index.is_file() {
            return Err(SiteError::NoShell(index));
        }
        let mut site = Self { files: BTreeMap::new(), total_bytes: 0 };
        let mut pending = vec![root.to_owned()];
        while let Some(dir) = pending.pop() {
            let read_error = |path: &Path| {
                let path = path.to_owned();
                move |source| SiteError::Read { path, source }
            };
            for entry in fs::read_dir(&dir).map_err(read_error(&dir))? {
                let entry = entry.map_err(read_error(&dir))?;
                let path = entry.path();
                let meta = entry.metadata().map_err(read_error(&path))?;
                if meta.is_dir() {
                    pending.push(path);
                    continue;
                }
                let name = path.strip_prefix(root).ok().and_then(Path::to_str);
                let (Some(name), true) = (name, meta.is_file()) else { continue };
                site.total_bytes += meta.len();
                if site.total_bytes > MAX_SITE_BYTES || site.files.len() >= MAX_SITE_FILES {
                    return Err(SiteError::TooLarge(root.to_owned()));
                }
                let content = fs::read(&path).map_err(read_error(&path))?;
                site.files.insert(name.to_owned(), load_file(name, content));
            }
        }
        Ok(site)
    }

    pub fn file_count(&self) -> usize {
        self.files.len()
    }

    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// Looks up the file for a URL path and returns it with its name. Unknown paths without a file extension resolve to
    /// the index page.
    fn find(&self, path: &str) -> Option<(&str, &SiteFile)> {
        let name = percent_decode(path.strip_prefix('/')?)?;
        let name = if name.is_empty() { INDEX } else { &name };
        let file = self.files.get_key_value(name);
        let is_page = || !name.rsplit('/').next().unwrap_or_default().contains('.');
        let file = file.or_else(|| is_page().then(|| self.files.get_key_value(INDEX)).flatten());
        file.map(|(name, entry)| (name.as_str(), entry))
    }
}

fn load_file(name: &str, content: Vec<u8>) -> SiteFile {
    let plain = StaticFile::in_memory(content, media_type(Path::new(name)));
    let compressed = plain.is_compressible().then(|| plain.gzip(Compression::best()));
    // In-memory compression can't fail; if it did, we'd serve the plain file.
    SiteFile { gzip: compressed.and_then(Result::ok).flatten(), plain }
}

/// Returns a router serving the site on all paths.
pub fn router(site: Site) -> Router {
    Router::new().fallback(serve).with_state(Arc::new(site))
}

async fn serve(State(site): State<Arc<Site>>, request: Request) -> Response {
    let (request, _) = request.into_parts();
    if !is_read_method(&request.method) {
        return method_not_allowed();
    }
    match site.find(request.uri.path()) {
        Some((name, entry)) => respond_with(name, entry, &request),
        None => Problem::new(Code::NotFound, "The shell has no such file.").into_response(),
    }
}

fn respond_with(name: &str, entry: &SiteFile, request: &Parts) -> Response {
    let caching = if name.starts_with(HASHED_PREFIX) { Caching::Immutable } else { Caching::Revalidate };
    let mut response = respond(request, entry.plain.clone(), entry.gzip.clone(), caching);
    if entry.plain.media_type().starts_with("text/html") {
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(CONTENT_SECURITY_POLICY));
        headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("same-origin"));
    }
    response
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use http::{Method, StatusCode};

    use super::*;

    fn build_site() -> (tempfile::TempDir, Site) {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("shell");
        fs::create_dir_all(root.join("assets")).unwrap();
        fs::write(dir.path().join("secret.txt"), "secret").unwrap();
        std::os::unix::fs::symlink("../secret.txt", root.join("out.txt")).unwrap();
        fs::write(root.join(INDEX), "<!doctype html>shell").unwrap();
        fs::write(root.join("assets/app-1a2b.js"), "const text = 1;\n".repeat(200)).unwrap();
        let site = Site::read(&root).unwrap();
        (dir, site)
    }

    fn get_response(site: &Site, method: &Method, path: &str, headers: &[(&'static str, &str)]) -> Response {
        let mut request = http::Request::builder().method(method.clone()).uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let (name, entry) = site.find(path).unwrap_or_else(|| panic!("the site has no {path}"));
        respond_with(name, entry, &request.body(()).unwrap().into_parts().0)
    }

    fn body(response: Response) -> Vec<u8> {
        let read = axum::body::to_bytes(response.into_body(), usize::MAX).now_or_never();
        read.unwrap().unwrap().to_vec()
    }

    #[test]
    fn find_stays_inside_site_and_skips_symlinks() {
        let (_dir, site) = build_site();
        for path in
            ["/../secret.txt", "/%2e%2e/secret.txt", "/out.txt", "/assets/../../secret.txt", "/missing.js"]
        {
            assert!(site.find(path).is_none(), "{path}");
        }
        for path in ["/", "/settings", "/a/b"] {
            assert_eq!(site.find(path).unwrap().0, INDEX, "{path}");
        }
    }

    #[test]
    fn index_is_revalidated_and_hashed_files_are_immutable() {
        let (_dir, site) = build_site();
        let page = get_response(&site, &Method::GET, "/", &[]);
        assert_eq!(page.headers()["cache-control"], "private, no-cache");
        let policy = page.headers()["content-security-policy"].to_str().unwrap();
        assert!(policy.contains("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
        let tag = page.headers()["etag"].to_str().unwrap().to_owned();
        assert_eq!(body(page), b"<!doctype html>shell");

        let again = get_response(&site, &Method::GET, "/", &[("if-none-match", &tag)]);
        assert_eq!(
            (again.status(), again.headers()["etag"].to_str().unwrap()),
            (StatusCode::NOT_MODIFIED, &*tag)
        );
        assert!(again.headers().contains_key("content-security-policy") && body(again).is_empty());

        let script = get_response(&site, &Method::HEAD, "/assets/app-1a2b.js", &[]);
        assert_eq!(script.headers()["cache-control"], "private, max-age=31536000, immutable");
        assert_eq!(script.headers()["content-length"], "3200");
        assert_eq!(script.headers()["content-type"], "text/javascript; charset=utf-8");
        assert!(body(script).is_empty());
    }

    #[test]
    fn compressed_text_has_separate_etag() {
        let (_dir, site) = build_site();
        let get = |accepted: &str| {
            get_response(&site, &Method::GET, "/assets/app-1a2b.js", &[("accept-encoding", accepted)])
        };
        let (plain, compressed) = (get("identity, gzip;q=0"), get("br, gzip"));
        assert_eq!((plain.headers()["vary"].clone(), compressed.headers()["vary"].clone()), {
            let vary = HeaderValue::from_static("accept-encoding");
            (vary.clone(), vary)
        });
        assert_ne!(plain.headers()["etag"], compressed.headers()["etag"]);
        assert!(!plain.headers().contains_key("content-encoding"));
        assert_eq!(compressed.headers()["content-encoding"], "gzip");
        let compressed = body(compressed);
        let mut decompressed = Vec::new();
        let mut decoder = flate2::read::GzDecoder::new(compressed.as_slice());
        io::Read::read_to_end(&mut decoder, &mut decompressed).unwrap();
        assert_eq!(decompressed, body(plain));
        assert!(compressed.len() < decompressed.len() / 4);
    }

    #[test]
    fn missing_shell_error_names_next_step() {
        let dir = tempfile::tempdir().unwrap();
        let error = Site::read(dir.path()).err().unwrap().to_string();
        assert!(error.contains("index.html") && error.contains("--no-shell"), "{error}");
    }
}
