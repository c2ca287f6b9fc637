//! Builds a small host bundle, and serves it over HTTP as the platform does, with ETag, Range and If-Range.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use flate2::Compression;
use flate2::write::GzEncoder;
use http::{HeaderMap, StatusCode, Uri, header};
use sha2::{Digest, Sha256};

/// Creates a bundle of the given version, with enough incompressible content that its download can be interrupted
/// partway.
pub fn build_bundle(version: &str) -> Result<Vec<u8>> {
    build_bundle_with(version, &[])
}

/// Like [`build_bundle`], but with additional files.
pub fn build_bundle_with(version: &str, extra_files: &[(&str, &str)]) -> Result<Vec<u8>> {
    let mut tar = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
    let mut add = |path: &str, mode: u32, body: &[u8]| -> Result<()> {
        let mut header = tar::Header::new_gnu();
        header.set_mode(mode);
        header.set_size(body.len() as u64);
        Ok(tar.append_data(&mut header, path, body)?)
    };
    if !extra_files.iter().any(|(path, _)| *path == "bin/svc") {
        add("bin/svc", 0o755, b"#!/bin/sh\n")?;
    }
    let release = serde_json::json!({
        "version": 1, "imageVersion": version, "createdAt": "2026-01-02T03:04:05.000Z",
        "components": [{ "name": "svc", "version": "0.1.0", "path": "bin/svc" }],
    });
    add("release.json", 0o644, release.to_string().as_bytes())?;
    for (path, content) in extra_files {
        add(path, 0o755, content.as_bytes())?;
    }
    for n in 0..40_u32 {
        let noise: Vec<u8> =
            (0..1000_u32).flat_map(|m| Sha256::digest(format!("{n}-{m}")).to_vec()).collect();
        add(&format!("runtime/noise/{n}"), 0o644, &noise)?;
    }
    let mut link = tar::Header::new_gnu();
    link.set_entry_type(tar::EntryType::Symlink);
    link.set_mode(0o777);
    link.set_size(0);
    tar.append_link(&mut link, "bin/svc-gateway", "svc")?;
    Ok(tar.into_inner()?.finish()?)
}

pub fn digest(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// The relevant headers of a request.
#[derive(Debug, Clone)]
pub struct BundleRequest {
    pub authorization: Option<String>,
    pub range: Option<String>,
}

#[derive(Default)]
struct BundleSourceState {
    content: Vec<u8>,
    etag: String,
    supports_ranges: bool,
    /// The content after the next request.
    next: Option<Vec<u8>>,
    requests: Vec<BundleRequest>,
    /// Other files, by the suffixes of their paths; `None` for a missing file.
    other_files: BTreeMap<String, Option<Vec<u8>>>,
}

impl BundleSourceState {
    fn set_content(&mut self, content: Vec<u8>) {
        self.etag = format!("\"{}\"", digest(&content));
        self.content = content;
    }
}

/// The HTTP source; it runs until the test's runtime ends.
#[derive(Clone)]
pub struct BundleSource {
    state: Arc<Mutex<BundleSourceState>>,
    pub addr: std::net::SocketAddr,
}

impl BundleSource {
    pub async fn start(content: Vec<u8>) -> Result<Self> {
        let mut state = BundleSourceState { supports_ranges: true, ..BundleSourceState::default() };
        state.set_content(content);
        let state = Arc::new(Mutex::new(state));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let addr = listener.local_addr()?;
        let app = Router::new().fallback(serve).with_state(Arc::clone(&state));
        tokio::spawn(async move { axum::serve(listener, app).await });
        Ok(Self { state, addr })
    }

    fn access_state<T>(&self, access: impl FnOnce(&mut BundleSourceState) -> T) -> T {
        access(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn replace(&self, content: Vec<u8>) {
        self.access_state(|state| state.set_content(content));
    }

    /// Replaces the content after the next request has been handled.
    pub fn replace_after_next_request(&self, content: Vec<u8>) {
        self.access_state(|state| state.next = Some(content));
    }

    /// Adds another file, or marks it as missing.
    pub fn put(&self, path_suffix: &str, content: Option<Vec<u8>>) {
        self.access_state(|state| state.other_files.insert(path_suffix.to_owned(), content));
    }

    /// Makes the source ignore `Range`, like a server that does not support it.
    pub fn disable_ranges(&self) {
        self.access_state(|state| state.supports_ranges = false);
    }

    pub fn requests(&self) -> Vec<BundleRequest> {
        self.access_state(|state| state.requests.clone())
    }
}

async fn serve(State(state): State<Arc<Mutex<BundleSourceState>>>, uri: Uri, headers: HeaderMap) -> Response {
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    let header_text = |name| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let range = header_text(header::RANGE);
    state
        .requests
        .push(BundleRequest { authorization: header_text(header::AUTHORIZATION), range: range.clone() });
    if let Some((_, file)) =
        state.other_files.iter().find(|(suffix, _)| uri.path().ends_with(suffix.as_str()))
    {
        let status = if file.is_some() { StatusCode::OK } else { StatusCode::NOT_FOUND };
        let response = Response::builder().status(status).body(Body::from(file.clone().unwrap_or_default()));
        return response.expect("known headers are valid");
    }
    let from =
        range.as_deref().and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok());
    let etag_matches = header_text(header::IF_RANGE).as_deref() == Some(state.etag.as_str());
    let response = Response::builder().header(header::ETAG, &state.etag);
    let total = state.content.len();
    let response = match from {
        Some(from) if etag_matches && state.supports_ranges => response
            .status(StatusCode::PARTIAL_CONTENT)
            .header(header::CONTENT_RANGE, format!("bytes {from}-{}/{total}", total - 1))
            .body(Body::from(state.content[from..].to_vec())),
        _ => response.body(Body::from(state.content.clone())),
    };
    if let Some(next) = state.next.take() {
        state.set_content(next);
    }
    response.expect("known headers are valid")
}
