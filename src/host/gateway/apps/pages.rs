//! `GET /apps/<slug>/…`: serves an app's built pages, never anything outside its output directory.
//!
//! Documents run in an opaque origin: apps share a host with the owner's session, but must not run in its origin.

use std::fs::{File, Metadata};
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Redirect, Response};
use flate2::Compression;
use http::request::Parts;
use http::{HeaderValue, Uri, header};

use super::foreign_origin::ForeignOrigin;
use super::manifest::Runtime;
use super::registry::Registry;
use crate::auth::{Caller, Principal};
use svc_base::beneath::DirFd;
use svc_http::files::{Caching, StaticFile, percent_decode, respond};
use svc_http::path_params;
use svc_http::problem::{Code, Problem};

/// Content-Security-Policy directives sandboxing documents in an opaque origin, without plug-ins.
const SANDBOX: &str = "sandbox allow-scripts allow-forms allow-modals allow-popups allow-downloads; \
                       frame-ancestors 'self'; object-src 'none'; base-uri 'none'; form-action 'self'";
/// Larger files aren't compressed, since compression happens in memory.
const MAX_GZIP_BYTES: u64 = 8 << 20;
/// Maximum total size of the cached compressed files.
const MAX_GZIP_CACHE_BYTES: u64 = 16 << 20;

/// Files in the app directories.
pub struct AppFiles {
    pub(super) registry: Arc<Registry>,
    pub(super) home: PathBuf,
    gzip_cache: GzipCache,
}

impl AppFiles {
    pub fn new(registry: Arc<Registry>, home: PathBuf) -> Self {
        Self { registry, home, gzip_cache: GzipCache::default() }
    }
}

/// Compressed files. `None` if compression failed or saved nothing.
struct GzipCache(moka::sync::Cache<GzipKey, Option<StaticFile>>);

/// Entity tag and media type of the plain file: renaming a file keeps its tag but may change its media type.
type GzipKey = (HeaderValue, &'static str);

impl Default for GzipCache {
    fn default() -> Self {
        let weight = |(tag, _): &GzipKey, file: &Option<StaticFile>| {
            let bytes = file.as_ref().map_or(0, StaticFile::size) + tag.len() as u64;
            u32::try_from(bytes).unwrap_or(u32::MAX)
        };
        Self(moka::sync::Cache::builder().max_capacity(MAX_GZIP_CACHE_BYTES).weigher(weight).build())
    }
}

impl GzipCache {
    /// Returns the compressed file, if compression is worthwhile. Blocks.
    fn get_or_compress(&self, file: &StaticFile) -> Option<StaticFile> {
        if !file.is_compressible() || file.size() > MAX_GZIP_BYTES {
            return None;
        }
        let key = (file.tag().clone(), file.media_type());
        // Read errors surface when the file is served.
        self.0.get_with(key, || file.gzip(Compression::default()).ok().flatten())
    }
}

pub async fn serve_page(State(files): State<Arc<AppFiles>>, caller: Caller, request: Request) -> Response {
    let (request, _) = request.into_parts();
    if percent_decode(request.uri.path()).is_none() {
        return path_params::invalid_path().into_response();
    }
    match find_page(&files, &caller.0, &request.uri).await {
        Ok(PageTarget::Redirect(to)) => Redirect::permanent(&to).into_response(),
        Ok(PageTarget::File(file, policy)) => serve(&request, *file, policy),
        Err(problem) => problem.into_response(),
    }
}

enum PageTarget {
    /// The app's URL with a trailing slash, which relative links need, and the request's query.
    Redirect(String),
    File(Box<AppFile>, HeaderValue),
}

/// An app's file and its compressed form, if any.
struct AppFile {
    plain: StaticFile,
    gzip: Option<StaticFile>,
}

async fn find_page(files: &Arc<AppFiles>, principal: &Principal, uri: &Uri) -> Result<PageTarget, Problem> {
    let not_found = || Problem::new(Code::NotFound, "There is no such page.");
    let app_path = uri.path().strip_prefix("/apps/").unwrap_or_default();
    let (slug, path) = app_path.split_once('/').map_or((app_path, None), |(slug, path)| (slug, Some(path)));
    if let Principal::App { slug: own_slug } = principal
        && own_slug != slug
    {
        return Err(Problem::new(Code::Forbidden, "An app may load only its own pages."));
    }
    let snapshot = files.registry.snapshot();
    let (dir, manifest) = snapshot.directories.get(slug).ok_or_else(not_found)?;
    let Some(path) = path else {
        let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
        return Ok(PageTarget::Redirect(format!("/apps/{slug}/{query}")));
    };
    if manifest.runtime == Runtime::Node {
        return Err(Problem::new(Code::Unavailable, "Apps with the `node` runtime are not served yet."));
    }
    let path = parse_path(path).ok_or_else(not_found)?;
    let output = dir.join(&manifest.output);
    let policy = content_security_policy(&manifest.connect);
    let files = files.clone();
    let opened = tokio::task::spawn_blocking(move || {
        let output = DirFd::open(&files.home)?.open_dir(&output)?;
        let (file, meta, name) = open_page(&output, &path)?;
        let plain = StaticFile::from_file(file, &meta, &name);
        let gzip = files.gzip_cache.get_or_compress(&plain);
        Ok::<_, io::Error>(PageTarget::File(Box::new(AppFile { plain, gzip }), policy))
    });
    opened.await.ok().and_then(Result::ok).ok_or_else(not_found)
}

/// Converts a URL path to a path below a directory. Returns `None` if it's invalid, could escape, or has a hidden
/// component.
fn parse_path(path: &str) -> Option<PathBuf> {
    let decoded = percent_decode(path)?;
    if decoded.contains(['\0', '\\']) {
        return None;
    }
    let path = PathBuf::from(decoded);
    let is_visible_below_dir = path.components().all(|part| {
        matches!(part, Component::Normal(name)
        if !name.to_string_lossy().starts_with('.'))
    });
    is_visible_below_dir.then_some(path)
}

/// Exposes `parse_path` to `tests/fuzz`.
#[cfg(feature = "fuzzing")]
pub fn path_in_app(path: &str) -> Option<PathBuf> {
    parse_path(path)
}

/// Opens the file or, for a directory, its `index.html`. Missing paths without an extension may be client-side routes,
/// so they fall back to the app's front page.
fn open_page(output: &DirFd, path: &Path) -> io::Result<(File, Metadata, PathBuf)> {
    let index = Path::new("index.html");
    let candidates = [
        (!path.as_os_str().is_empty()).then(|| path.to_owned()),
        Some(path.join(index)),
        path.extension().is_none().then(|| index.to_owned()),
    ];
    let mut last_error = io::Error::from(io::ErrorKind::NotFound);
    for name in candidates.into_iter().flatten() {
        match output.open_file(&name).and_then(|file| Ok((file.metadata()?, file))) {
            Ok((meta, file)) => return Ok((file, meta, name)),
            Err(error) => last_error = error,
        }
    }
    Err(last_error)
}

/// Restricts a page to loading from and sending data to its own host and the manifest's origins.
fn content_security_policy(connect: &[ForeignOrigin]) -> HeaderValue {
    let origins: String = connect.iter().map(|origin| format!(" {origin}")).collect();
    let policy = format!("{SANDBOX}; default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'{origins}");
    HeaderValue::from_str(&policy).expect("origins are ASCII")
}

fn serve(request: &Parts, file: AppFile, policy: HeaderValue) -> Response {
    let mut response = respond(request, file.plain, file.gzip, Caching::Revalidate);
    let mut set = |name, value| response.headers_mut().insert(name, HeaderValue::from_static(value));
    set(header::ACCESS_CONTROL_ALLOW_ORIGIN, "null");
    set(header::REFERRER_POLICY, "no-referrer");
    // Set for every file: the browser decides which ones are documents.
    response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, policy);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_path_rejects_escapes_and_hidden_files() {
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
            assert_eq!(parse_path(bad), None, "{bad}");
        }
        assert_eq!(parse_path("assets/app%20one.js"), Some("assets/app one.js".into()));
        assert_eq!(parse_path(""), Some(PathBuf::new()));
    }

    #[test]
    fn gzip_cache_uses_media_type_of_renamed_file() {
        let dir = tempfile::tempdir().unwrap();
        let (old, new) = (dir.path().join("index.txt"), dir.path().join("index.html"));
        std::fs::write(&old, "text ".repeat(1000)).unwrap();
        let cache = GzipCache::default();
        let media_type = |path: &Path| {
            let file = File::open(path).unwrap();
            let meta = file.metadata().unwrap();
            cache.get_or_compress(&StaticFile::from_file(file, &meta, path)).unwrap().media_type()
        };
        assert_eq!(media_type(&old), "text/plain; charset=utf-8");
        std::fs::rename(&old, &new).unwrap();
        assert_eq!(media_type(&new), "text/html; charset=utf-8");
    }

    #[test]
    fn open_page_rejects_links_and_falls_back_to_index() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("dist");
        std::fs::create_dir_all(root.join("sub")).unwrap();
        std::fs::create_dir_all(root.join("v1.2")).unwrap();
        std::fs::write(root.join("v1.2/index.html"), "i").unwrap();
        std::fs::write(dir.path().join("secret.txt"), "s").unwrap();
        std::fs::write(root.join("index.html"), "i").unwrap();
        std::fs::write(root.join("sub/index.html"), "i").unwrap();
        std::os::unix::fs::symlink("../secret.txt", root.join("out.txt")).unwrap();
        let output = DirFd::open(&root).unwrap();
        assert!(open_page(&output, Path::new("out.txt")).is_err());
        assert!(open_page(&output, Path::new("missing.js")).is_err());
        let name = |path: &str| open_page(&output, Path::new(path)).unwrap().2;
        assert_eq!(name(""), Path::new("index.html"));
        assert_eq!(name("sub"), Path::new("sub/index.html"));
        assert_eq!(name("v1.2"), Path::new("v1.2/index.html"));
        assert_eq!(name("settings/profile"), Path::new("index.html"));
    }
}
