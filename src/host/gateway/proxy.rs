//! Proxies requests to the shell, to code-server and to the file history, each on its Unix socket.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use axum::extract::{Request, State};
use axum::response::{Html, IntoResponse, Response};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use tokio::net::UnixStream;

use svc_host::files::history;
use svc_host::system::layout::Layout;
use svc_http::files::percent_decode;
use svc_http::problem::{Code, Problem, format_chain};
use svc_http::proof;
use svc_http::proxy::{Dial, Io, Proxy, ProxyError, ProxyLimits};
use svc_http::server::ListenerLimits;

/// Reload interval for the waiting page, and `Retry-After` for problems, in seconds.
const RETRY_AFTER_SECONDS: u64 = 3;
/// Maximum number of concurrent requests to the file history; `svc-files-history.socket` has the same limit.
const MAX_HISTORY_REQUESTS: usize = 4;

/// The machine's services behind the gateway.
pub struct Upstreams {
    shell: Proxy,
    code: Proxy,
    history: Proxy,
}

impl Upstreams {
    pub fn new(layout: &Layout) -> Self {
        // The gateway's listener already limits the number of clients, so these proxies set no lower limit.
        let max_connections = ListenerLimits::default().max_connections;
        let limits = ProxyLimits { max_connections, ..ProxyLimits::default() };
        let sockets = layout.owner_sockets();
        let proxy_to = |name: &str| Proxy::new(UnixDialer(sockets.join(name)), limits);
        // A separate process serves each connection, which carries one request.
        let history_limits =
            ProxyLimits { max_connections: MAX_HISTORY_REQUESTS, max_idle_connections: 0, ..limits };
        let history = UnixDialer(layout.history_sockets().join(history::SOCKET));
        Self {
            shell: proxy_to("shell.sock"),
            code: proxy_to("code.sock"),
            history: Proxy::new(history, history_limits),
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

/// Proxies the requests that no gateway route handles.
pub async fn proxy_to_shell(State(upstreams): State<Arc<Upstreams>>, request: Request) -> Response {
    forward(&upstreams.shell, "The shell", request).await
}

/// Proxies requests on the code host, except code-server's proxy to local ports: a local service would share the
/// editor's origin, and thus its cookies and terminal.
pub async fn proxy_to_code(upstreams: &Upstreams, request: Request) -> Response {
    if is_port_proxy_path(request.uri().path()) {
        let detail = "The editor's origin does not proxy local ports. Make the service an app, or forward its port from the terminal.";
        return Problem::new(Code::Forbidden, detail).into_response();
    }
    forward(&upstreams.code, "The code server", request).await
}

/// Proxies requests to the file history.
pub async fn proxy_to_history(upstreams: &Upstreams, request: Request) -> Response {
    forward(&upstreams.history, "The file history", request).await
}

/// Whether a path is `/proxy/…` or `/absproxy/…` in any encoding; code-server's router ignores case.
fn is_port_proxy_path(path: &str) -> bool {
    let first = path.split('/').find(|part| !part.is_empty()).unwrap_or_default();
    let first = percent_decode(first).unwrap_or_default().to_ascii_lowercase();
    ["proxy", "absproxy"].contains(&first.as_str())
}

async fn forward(upstream: &Proxy, name: &str, mut request: Request) -> Response {
    let is_page = wants_page(request.headers());
    // These credentials are only for the gateway.
    request.headers_mut().remove(proof::HEADER);
    request.headers_mut().remove(header::AUTHORIZATION);
    match upstream.forward(request).await {
        Ok(response) => response,
        Err(ProxyError::ConnectMethod) => {
            Problem::new(Code::InvalidRequest, "The CONNECT method is not supported.").into_response()
        }
        Err(error) => {
            tracing::warn!(error = %format_chain(&error), "{name} is unavailable");
            let code = match error {
                ProxyError::Connect(_)
                | ProxyError::ConnectTimeout
                | ProxyError::Full
                | ProxyError::Closed => Code::Unavailable,
                _ => Code::UpstreamUnavailable,
            };
            unavailable_response(
                Problem::new(code, format!("{name} is unavailable.")).retry_after(RETRY_AFTER_SECONDS),
                is_page,
            )
        }
    }
}

fn wants_page(headers: &HeaderMap) -> bool {
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    accept.is_some_and(|accept| accept.contains("text/html"))
}

/// Returns a self-reloading page to a browser while the service is unavailable, and a problem in all other cases.
fn unavailable_response(problem: Problem, is_page: bool) -> Response {
    if !is_page || problem.code.status() != StatusCode::SERVICE_UNAVAILABLE {
        return problem.into_response();
    }
    let text = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta http-equiv=\"refresh\" content=\"{RETRY_AFTER_SECONDS}\"><title>One moment</title>\
         <body style=\"font: 1rem/1.5 system-ui; display: grid; place-items: center; min-height: 90vh\">\
         <main role=\"status\"><h1>One moment</h1><p>{} This page reloads automatically.</p></main>",
        problem.detail
    );
    let mut response = (problem.code.status(), Html(text)).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::RETRY_AFTER, HeaderValue::from(RETRY_AFTER_SECONDS));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_proxy_path_is_recognized_in_any_encoding() {
        for path in
            ["/proxy/8080/", "/proxy", "//PROXY/1", "/absproxy/3000/x", "/%70roxy/3000/", "/AbsProxy/1"]
        {
            assert!(is_port_proxy_path(path), "{path}");
        }
        for path in ["/", "/proxying", "/stable-abc/proxy/1", "/_static/proxy.js"] {
            assert!(!is_port_proxy_path(path), "{path}");
        }
    }
}
