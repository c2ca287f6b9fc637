//! A static build, read into memory once and served from there: no path of a request ever meets the file system.
//!
//! What the build named by its content is kept for a year; the first page is asked about each time. Texts are there
//! compressed, too. A path that only the shell's own router knows gets the first page.

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

use crate::http::files::{
    Caching, StaticFile, is_read, media_type, method_not_allowed, percent_decode, respond,
};
use crate::http::problem::{Code, Problem};

/// A shell of more than this was built wrong.
const LARGEST: u64 = 64 << 20;
const MOST_FILES: usize = 10_000;
const INDEX: &str = "index.html";
/// Below it, the build names files by their content.
const NAMED_BY_CONTENT: &str = "assets/";
/// The shell is of the owner's origin: nothing but its own files runs in it, and it asks nobody but this host.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; \
                      connect-src 'self'; manifest-src 'self'; frame-src 'self'; frame-ancestors 'self'; \
                      base-uri 'none'; form-action 'none'; object-src 'none'";

/// A build that cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum SiteError {
    #[error("{}: {source}", .path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "the release has no shell: {} is not there; build the bundle without --no-shell",
        .0.display()
    )]
    NoShell(PathBuf),
    #[error("{} is larger than a shell may be ({MOST_FILES} files, {LARGEST} bytes)", .0.display())]
    TooLarge(PathBuf),
}

struct Entry {
    plain: StaticFile,
    gzip: Option<StaticFile>,
}

/// The files of a build by their path below it.
pub struct Site {
    files: BTreeMap<String, Entry>,
    bytes: u64,
}

impl Site {
    /// Reads all files below `root`. Links are left out: a build has none.
    ///
    /// # Errors
    /// [`SiteError`].
    pub fn read(root: &Path) -> Result<Self, SiteError> {
        let index = root.join(INDEX);
        if !index.is_file() {
            return Err(SiteError::NoShell(index));
        }
        let mut site = Self { files: BTreeMap::new(), bytes: 0 };
        let mut open = vec![root.to_owned()];
        while let Some(dir) = open.pop() {
            let failed = |path: &Path| {
                let path = path.to_owned();
                move |source| SiteError::Read { path, source }
            };
            for entry in fs::read_dir(&dir).map_err(failed(&dir))? {
                let entry = entry.map_err(failed(&dir))?;
                let path = entry.path();
                let meta = entry.metadata().map_err(failed(&path))?;
                if meta.is_dir() {
                    open.push(path);
                    continue;
                }
                let name = path.strip_prefix(root).ok().and_then(Path::to_str);
                let (Some(name), true) = (name, meta.is_file()) else { continue };
                site.bytes += meta.len();
                if site.bytes > LARGEST || site.files.len() >= MOST_FILES {
                    return Err(SiteError::TooLarge(root.to_owned()));
                }
                let content = fs::read(&path).map_err(failed(&path))?;
                site.files.insert(name.to_owned(), entry_of(name, content));
            }
        }
        Ok(site)
    }

    pub fn len(&self) -> usize {
        self.files.len()
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The file of a URL's path and its name; the first page for what has no ending.
    fn find(&self, path: &str) -> Option<(&str, &Entry)> {
        let name = percent_decode(path.strip_prefix('/')?)?;
        let name = if name.is_empty() { INDEX } else { &name };
        let found = self.files.get_key_value(name);
        let is_page = || !name.rsplit('/').next().unwrap_or_default().contains('.');
        let found = found.or_else(|| is_page().then(|| self.files.get_key_value(INDEX)).flatten());
        found.map(|(name, entry)| (name.as_str(), entry))
    }
}

fn entry_of(name: &str, content: Vec<u8>) -> Entry {
    let plain = StaticFile::in_memory(content, media_type(Path::new(name)));
    let packed = plain.is_compressible().then(|| plain.gzip(Compression::best()));
    // Packing what is in memory cannot fail; without it, the plain form is served.
    Entry { gzip: packed.and_then(Result::ok).flatten(), plain }
}

/// The site's one route.
pub fn router(site: Site) -> Router {
    Router::new().fallback(serve).with_state(Arc::new(site))
}

async fn serve(State(site): State<Arc<Site>>, request: Request) -> Response {
    let (request, _) = request.into_parts();
    if !is_read(&request.method) {
        return method_not_allowed();
    }
    match site.find(request.uri.path()) {
        Some((name, entry)) => answer(name, entry, &request),
        None => Problem::new(Code::NotFound, "The shell has no such file.").into_response(),
    }
}

fn answer(name: &str, entry: &Entry, request: &Parts) -> Response {
    let caching = if name.starts_with(NAMED_BY_CONTENT) { Caching::Immutable } else { Caching::Revalidate };
    let mut response = respond(request, entry.plain.clone(), entry.gzip.clone(), caching);
    if entry.plain.media_type().starts_with("text/html") {
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
        headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("same-origin"));
    }
    response
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use http::{Method, StatusCode};

    use super::*;

    fn build() -> (tempfile::TempDir, Site) {
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

    fn ask(site: &Site, method: &Method, path: &str, headers: &[(&'static str, &str)]) -> Response {
        let mut request = http::Request::builder().method(method.clone()).uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let (name, entry) = site.find(path).unwrap_or_else(|| panic!("{path} is there"));
        answer(name, entry, &request.body(()).unwrap().into_parts().0)
    }

    fn body(response: Response) -> Vec<u8> {
        let read = axum::body::to_bytes(response.into_body(), usize::MAX).now_or_never();
        read.unwrap().unwrap().to_vec()
    }

    #[test]
    fn no_path_leads_out_and_links_are_not_followed() {
        let (_dir, site) = build();
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
    fn the_first_page_is_asked_about_and_what_has_its_content_in_its_name_is_kept() {
        let (_dir, site) = build();
        let page = ask(&site, &Method::GET, "/", &[]);
        assert_eq!(page.headers()["cache-control"], "private, no-cache");
        let policy = page.headers()["content-security-policy"].to_str().unwrap();
        assert!(policy.contains("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
        let tag = page.headers()["etag"].to_str().unwrap().to_owned();
        assert_eq!(body(page), b"<!doctype html>shell");

        let again = ask(&site, &Method::GET, "/", &[("if-none-match", &tag)]);
        assert_eq!(
            (again.status(), again.headers()["etag"].to_str().unwrap()),
            (StatusCode::NOT_MODIFIED, &*tag)
        );
        assert!(again.headers().contains_key("content-security-policy") && body(again).is_empty());

        let script = ask(&site, &Method::HEAD, "/assets/app-1a2b.js", &[]);
        assert_eq!(script.headers()["cache-control"], "private, max-age=31536000, immutable");
        assert_eq!(script.headers()["content-length"], "3200");
        assert_eq!(script.headers()["content-type"], "text/javascript; charset=utf-8");
        assert!(body(script).is_empty());
    }

    #[test]
    fn texts_go_compressed_to_whom_takes_it_under_a_tag_of_their_own() {
        let (_dir, site) = build();
        let get = |accepted: &str| {
            ask(&site, &Method::GET, "/assets/app-1a2b.js", &[("accept-encoding", accepted)])
        };
        let (plain, packed) = (get("identity, gzip;q=0"), get("br, gzip"));
        assert_eq!((plain.headers()["vary"].clone(), packed.headers()["vary"].clone()), {
            let vary = HeaderValue::from_static("accept-encoding");
            (vary.clone(), vary)
        });
        assert_ne!(plain.headers()["etag"], packed.headers()["etag"]);
        assert!(!plain.headers().contains_key("content-encoding"));
        assert_eq!(packed.headers()["content-encoding"], "gzip");
        let packed = body(packed);
        let mut read = Vec::new();
        io::Read::read_to_end(&mut flate2::read::GzDecoder::new(packed.as_slice()), &mut read).unwrap();
        assert_eq!(read, body(plain));
        assert!(packed.len() < read.len() / 4);
    }

    #[test]
    fn a_release_without_a_shell_says_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let error = Site::read(dir.path()).err().unwrap().to_string();
        assert!(error.contains("index.html") && error.contains("--no-shell"), "{error}");
    }
}
