//! The ways to the shell and the code server, each behind its unix socket.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use axum::extract::{Request, State};
use axum::response::{Html, IntoResponse, Response};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use tokio::net::UnixStream;

use super::state::Gateway;
use crate::http::files::percent_decode;
use crate::http::problem::{Code, Problem, chain};
use crate::http::proof;
use crate::http::proxy::{Dial, Io, Proxy, ProxyError, ProxyLimits};

/// When a page asks again, in seconds.
const RETRY_AFTER: u64 = 3;

/// The machine's own services that the gateway stands before.
pub struct Upstreams {
    shell: Proxy,
    code: Proxy,
}

impl Upstreams {
    pub fn new(sockets: &Path) -> Self {
        let to = |name: &str| Proxy::new(Socket(sockets.join(name)), ProxyLimits::default());
        Self { shell: to("shell.sock"), code: to("code.sock") }
    }
}

struct Socket(PathBuf);

#[async_trait]
impl Dial for Socket {
    async fn dial(&self) -> io::Result<Box<dyn Io>> {
        Ok(Box::new(UnixStream::connect(&self.0).await?))
    }
}

/// Everything of the owner's that is not the gateway's own.
pub async fn to_shell(State(gateway): State<Arc<Gateway>>, request: Request) -> Response {
    forward(&gateway.upstreams.shell, "The shell", request).await
}

/// Everything on the code host but code-server's way to local ports: whatever listens there would share the editor's origin,
/// and with it its cookies and its terminal.
pub async fn to_code(gateway: &Gateway, request: Request) -> Response {
    if leads_to_a_port(request.uri().path()) {
        let detail = "The editor's origin leads to no local port. Make it an app, or forward the port by the terminal.";
        return Problem::new(Code::Forbidden, detail).into_response();
    }
    forward(&gateway.upstreams.code, "The code server", request).await
}

/// `/proxy/…` and `/absproxy/…`, however they are written: code-server's router takes no notice of case.
fn leads_to_a_port(path: &str) -> bool {
    let first = path.split('/').find(|part| !part.is_empty()).unwrap_or_default();
    let first = percent_decode(first).unwrap_or_default().to_ascii_lowercase();
    ["proxy", "absproxy"].contains(&first.as_str())
}

async fn forward(upstream: &Proxy, name: &str, mut request: Request) -> Response {
    let page = wants_page(request.headers());
    // They are for this gateway alone.
    request.headers_mut().remove(proof::HEADER);
    request.headers_mut().remove(header::AUTHORIZATION);
    match upstream.forward(request).await {
        Ok(response) => response,
        Err(error) => {
            tracing::warn!(error = %chain(&error), "{name} did not answer");
            let code = match error {
                ProxyError::Connect(_)
                | ProxyError::ConnectTimeout
                | ProxyError::Full
                | ProxyError::Closed => Code::Unavailable,
                ProxyError::Tunnel => Code::InvalidRequest,
                _ => Code::UpstreamUnavailable,
            };
            absent(Problem::new(code, format!("{name} does not answer.")).retry_after(RETRY_AFTER), page)
        }
    }
}

fn wants_page(headers: &HeaderMap) -> bool {
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    accept.is_some_and(|accept| accept.contains("text/html"))
}

/// A page for a person, which asks again by itself; a problem for a program.
fn absent(problem: Problem, page: bool) -> Response {
    if !page || problem.code.status() != StatusCode::SERVICE_UNAVAILABLE {
        return problem.into_response();
    }
    let text = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta http-equiv=\"refresh\" content=\"{RETRY_AFTER}\"><title>Starting</title>\
         <body style=\"font: 1rem/1.5 system-ui; display: grid; place-items: center; min-height: 90vh\">\
         <main role=\"status\"><h1>One moment</h1><p>{} This page looks again by itself.</p></main>",
        problem.detail
    );
    let mut response = (problem.code.status(), Html(text)).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::RETRY_AFTER, HeaderValue::from(RETRY_AFTER));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_to_a_port_is_known_however_it_is_written() {
        for path in
            ["/proxy/8080/", "/proxy", "//PROXY/1", "/absproxy/3000/x", "/%70roxy/3000/", "/AbsProxy/1"]
        {
            assert!(leads_to_a_port(path), "{path}");
        }
        for path in ["/", "/proxying", "/stable-abc/proxy/1", "/_static/proxy.js"] {
            assert!(!leads_to_a_port(path), "{path}");
        }
    }
}
