//! Proxies requests to the shell, code-server and the file history over their Unix sockets.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use axum::extract::Request;
use axum::response::{Html, IntoResponse, Response};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use tokio::net::UnixStream;
use tokio::sync::Semaphore;

use svc_host::files::history;
use svc_host::system::layout::Layout;
use svc_http::files::percent_decode;
use svc_http::problem::{Code, Problem, format_chain};
use svc_http::proof;
use svc_http::proxy::{Dial, Io, Proxy, ProxyError, ProxyLimits, end_stalled_body};
use svc_http::server::ListenerLimits;

/// Reload interval of the waiting page and `Retry-After` for problems, in seconds.
const RETRY_AFTER_SECONDS: u64 = 3;
/// Maximum number of concurrent file-history requests; `svc-files-history.socket` has the same limit.
const MAX_HISTORY_REQUESTS: usize = 4;
/// Maximum number of concurrent downloads, which can take hours. The rest is reserved for listings.
const MAX_DOWNLOADS: usize = MAX_HISTORY_REQUESTS - 1;
/// Timeout for clients that stop reading a file-history response. Longer than the file history's own timeout for a
/// gateway that stops reading.
const HISTORY_STALL_TIMEOUT: Duration = Duration::from_secs(90);
const HISTORY_NAME: &str = "The file history";

/// Local services behind the gateway.
pub struct Upstreams {
    shell: Proxy,
    code: Proxy,
    history: Proxy,
    download_permits: Arc<Semaphore>,
}

impl Upstreams {
    pub fn new(layout: &Layout) -> Self {
        // The gateway's listener already limits the number of clients, so don't set a lower limit here.
        let max_connections = ListenerLimits::default().max_connections;
        let limits = ProxyLimits { max_connections, ..ProxyLimits::default() };
        let sockets = layout.owner_sockets();
        let proxy_to = |name: &str| Proxy::new(UnixDialer(sockets.join(name)), limits);
        // Each connection carries one request and is served by its own process.
        let history_limits =
            ProxyLimits { max_connections: MAX_HISTORY_REQUESTS, max_idle_connections: 0, ..limits };
        let history = UnixDialer(layout.history_sockets().join(history::SOCKET));
        Self {
            shell: proxy_to("shell.sock"),
            code: proxy_to("code.sock"),
            history: Proxy::new(history, history_limits),
            download_permits: Arc::new(Semaphore::new(MAX_DOWNLOADS)),
        }
    }
}

struct UnixDialer(PathBuf);

#[async_trait]
impl Dial for UnixDialer {
    async fn dial(&self) -> io::Result<Box<dyn Io>> {
        Ok(Box::new(UnixStream::connect(&self.0).await?))
    }
}

/// Proxies requests not handled by a gateway route.
pub async fn proxy_to_shell(upstreams: &Upstreams, request: Request) -> Response {
    forward(&upstreams.shell, "The shell", request).await
}

/// Proxies requests on the code host, except for code-server's local port proxy: a local service would share the
/// editor's origin, and with it cookies and the terminal.
pub async fn proxy_to_code(upstreams: &Upstreams, request: Request) -> Response {
    if is_port_proxy_path(request.uri().path()) {
        let detail = "The editor's origin does not proxy local ports. Make the service an app, or forward its port from the terminal.";
        return Problem::new(Code::Forbidden, detail).into_response();
    }
    forward(&upstreams.code, "The code server", request).await
}

/// Proxies a listing request to the file history.
pub async fn proxy_to_history(upstreams: &Upstreams, request: Request) -> Response {
    forward_to_history(upstreams, request, ()).await
}

/// Proxies a download request to the file history.
pub async fn proxy_download(upstreams: &Upstreams, request: Request) -> Response {
    match Arc::clone(&upstreams.download_permits).try_acquire_owned() {
        Ok(permit) => forward_to_history(upstreams, request, permit).await,
        Err(_) => {
            let detail = "Too many downloads are in progress; try again when one has ended.";
            let problem = Problem::new(Code::Unavailable, detail).retry_after(RETRY_AFTER_SECONDS);
            unavailable_response(problem, accepts_html(request.headers()))
        }
    }
}

/// Proxies a request to the file history, holding `permit` until the response has been read.
async fn forward_to_history(
    upstreams: &Upstreams,
    request: Request,
    permit: impl Send + 'static,
) -> Response {
    let wants_page = accepts_html(request.headers());
    match send(&upstreams.history, request).await {
        Ok(response) => response.map(|body| end_stalled_body(body, HISTORY_STALL_TIMEOUT, permit)),
        Err(error) => error_response(HISTORY_NAME, &error, wants_page),
    }
}

/// Whether a path is `/proxy/…` or `/absproxy/…` in any encoding and case: code-server's router is case-insensitive.
fn is_port_proxy_path(path: &str) -> bool {
    let first = path.split('/').find(|part| !part.is_empty()).unwrap_or_default();
    let first = percent_decode(first).unwrap_or_default().to_ascii_lowercase();
    ["proxy", "absproxy"].contains(&first.as_str())
}

async fn forward(upstream: &Proxy, name: &str, request: Request) -> Response {
    let wants_page = accepts_html(request.headers());
    match send(upstream, request).await {
        Ok(response) => response,
        Err(error) => error_response(name, &error, wants_page),
    }
}

async fn send(upstream: &Proxy, mut request: Request) -> Result<Response, ProxyError> {
    // Don't leak gateway credentials to upstreams.
    request.headers_mut().remove(proof::HEADER);
    request.headers_mut().remove(header::AUTHORIZATION);
    upstream.forward(request).await
}

fn error_response(name: &str, error: &ProxyError, wants_page: bool) -> Response {
    if matches!(error, ProxyError::ConnectMethod) {
        return Problem::new(Code::InvalidRequest, "The CONNECT method is not supported.").into_response();
    }
    tracing::warn!(error = %format_chain(error), "{name} is unavailable");
    let code = match error {
        ProxyError::Connect(_) | ProxyError::ConnectTimeout | ProxyError::Full | ProxyError::Closed => {
            Code::Unavailable
        }
        _ => Code::UpstreamUnavailable,
    };
    unavailable_response(
        Problem::new(code, format!("{name} is unavailable.")).retry_after(RETRY_AFTER_SECONDS),
        wants_page,
    )
}

fn accepts_html(headers: &HeaderMap) -> bool {
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    accept.is_some_and(|accept| accept.contains("text/html"))
}

/// Returns a self-reloading page to browsers while the service is unavailable, and a problem otherwise.
fn unavailable_response(problem: Problem, wants_page: bool) -> Response {
    if !wants_page || problem.code.status() != StatusCode::SERVICE_UNAVAILABLE {
        return problem.into_response();
    }
    let page = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta http-equiv=\"refresh\" content=\"{RETRY_AFTER_SECONDS}\"><title>One moment</title>\
         <body style=\"font: 1rem/1.5 system-ui; display: grid; place-items: center; min-height: 90vh\">\
         <main role=\"status\"><h1>One moment</h1><p>{} This page reloads automatically.</p></main>",
        problem.detail
    );
    let mut response = (problem.code.status(), Html(page)).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::RETRY_AFTER, HeaderValue::from(RETRY_AFTER_SECONDS));
    response
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixListener;

    use super::*;

    #[test]
    fn is_port_proxy_path_handles_any_encoding_and_case() {
        for path in
            ["/proxy/8080/", "/proxy", "//PROXY/1", "/absproxy/3000/x", "/%70roxy/3000/", "/AbsProxy/1"]
        {
            assert!(is_port_proxy_path(path), "{path}");
        }
        for path in ["/", "/proxying", "/stable-abc/proxy/1", "/_static/proxy.js"] {
            assert!(!is_port_proxy_path(path), "{path}");
        }
    }

    #[tokio::test]
    async fn downloads_leave_one_history_request_for_listings() {
        let root = tempfile::tempdir().unwrap();
        let layout = Layout::new(root.path());
        std::fs::create_dir_all(layout.history_sockets()).unwrap();
        let listener = UnixListener::bind(layout.history_sockets().join(history::SOCKET)).unwrap();
        tokio::spawn(async move {
            let mut connections = Vec::new();
            while let Ok((mut stream, _)) = listener.accept().await {
                assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0);
                stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
                connections.push(stream);
            }
        });
        let upstreams = Upstreams::new(&layout);
        let request = || Request::new(Body::empty());
        let mut downloads = Vec::new();
        for _ in 0..MAX_DOWNLOADS {
            let download = proxy_download(&upstreams, request()).await;
            assert_eq!(download.status(), StatusCode::OK);
            downloads.push(download);
        }
        let refused = proxy_download(&upstreams, request()).await;
        assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(proxy_to_history(&upstreams, request()).await.status(), StatusCode::OK);
        drop(downloads);
        // The permits are released asynchronously.
        let released = async {
            while proxy_download(&upstreams, request()).await.status() != StatusCode::OK {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), released).await.unwrap();
    }
}
