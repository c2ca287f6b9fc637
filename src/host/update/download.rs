//! Sequential downloads of bundles and their companion files. Interrupted downloads resume with a Range request,
//! provided that the file still has the same strong ETag.
//!
//! `UPGRADE_TOKEN` is sent only to the platform's own origin.

use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use http::{StatusCode, header};
use secrecy::ExposeSecret;
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;
use tokio_util::io::ReaderStream;
use url::Url;

use crate::system::backoff::Backoff;
use crate::system::config::PlatformAccess;
use crate::system::upgrade_token::UpgradeToken;
use svc_base::failpoint::{self, InjectedFailure};
use svc_http::client::{self, Timeouts};
use svc_http::request_id;

/// Maximum time to retry without progress. The timer restarts whenever an attempt that received new bytes ends.
const STALL_TIMEOUT: Duration = Duration::from_secs(300);

/// URL of a bundle or companion file, plus the platform token if the URL belongs to the platform.
pub struct BundleSource {
    url: Url,
    token: Option<UpgradeToken>,
}

/// Errors from downloading a file.
#[derive(Debug, thiserror::Error)]
pub enum DownloadError {
    #[error("cannot create the HTTP client")]
    Client(#[source] anyhow::Error),
    #[error("cannot download {url}")]
    Transport {
        url: String,
        #[source]
        source: reqwest::Error,
    },
    #[error("cannot read {url}")]
    File {
        url: String,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot download {url}: {status}")]
    Status { url: String, status: StatusCode },
    #[error("cannot download {url}: {status}: access denied for this machine")]
    Refused { url: String, status: StatusCode },
    #[error("cannot download {url}: larger than {limit} bytes")]
    TooLarge { url: String, limit: u64 },
    #[error("cannot resume download of {url}: the file has changed or has no strong ETag")]
    Changed { url: String },
    #[error("cannot download {url}: response truncated after {received} bytes")]
    Truncated { url: String, received: u64 },
    /// The receiver stopped early. If it did so because of an error, that error is reported instead.
    #[error("the archive was rejected")]
    Abandoned,
    #[error(transparent)]
    Injected(#[from] InjectedFailure),
}

impl DownloadError {
    fn is_transient(&self) -> bool {
        match self {
            Self::Transport { .. } | Self::Truncated { .. } => true,
            Self::Status { status, .. } => {
                status.is_server_error()
                    || [StatusCode::TOO_MANY_REQUESTS, StatusCode::REQUEST_TIMEOUT].contains(status)
            }
            _ => false,
        }
    }
}

impl BundleSource {
    pub fn new(url: Url, platform: PlatformAccess) -> Self {
        let is_platform = url.origin() == platform.base.origin();
        Self { url, token: is_platform.then_some(platform.upgrade_token) }
    }

    /// Reads a small file into memory.
    ///
    /// # Errors
    /// [`DownloadError`] if the download fails or the file is larger than `max_bytes`.
    pub async fn read(&self, max_bytes: u64) -> Result<Vec<u8>, DownloadError> {
        let download = self.open().await?;
        let url = download.url();
        let (sender, mut receiver) = mpsc::channel::<Bytes>(4);
        let collect = async move {
            let mut content = Vec::new();
            while let Some(chunk) = receiver.recv().await {
                if (content.len() + chunk.len()) as u64 > max_bytes {
                    return Err(DownloadError::TooLarge { url, limit: max_bytes });
                }
                content.extend_from_slice(&chunk);
            }
            Ok(content)
        };
        // A receiver that stops early also aborts the download, so its error takes precedence.
        let (streamed, collected) = tokio::join!(download.stream_to(sender), collect);
        let content = collected?;
        streamed?;
        Ok(content)
    }

    /// Sends the first request, retrying on transient errors. The length is usually known from the response.
    pub async fn open(&self) -> Result<Download<'_>, DownloadError> {
        let client = client::build(Timeouts::DOWNLOAD).map_err(DownloadError::Client)?;
        let mut download =
            Download { source: self, client, etag: None, length: None, received: 0, body: None };
        let mut backoff = Backoff::new(STALL_TIMEOUT);
        loop {
            match download.send_request().await {
                Ok(()) => return Ok(download),
                Err(error) => back_off(&mut backoff, error).await?,
            }
        }
    }
}

async fn back_off(backoff: &mut Backoff, error: DownloadError) -> Result<(), DownloadError> {
    if !error.is_transient() {
        return Err(error);
    }
    tracing::warn!(
        error = %svc_http::problem::format_chain(&error),
        "the download was interrupted; retrying"
    );
    backoff.pause().await.map_err(|_| error)
}

/// A download in progress.
pub struct Download<'a> {
    source: &'a BundleSource,
    client: reqwest::Client,
    /// Strong ETag. Without one, an interrupted HTTP download fails.
    etag: Option<String>,
    length: Option<u64>,
    /// Bytes received so far.
    received: u64,
    body: Option<PendingBody>,
}

struct PendingBody {
    response: reqwest::Response,
    /// Leading bytes to discard because we already have them and the source resent them.
    skip: u64,
}

impl Download<'_> {
    /// Returns the length of the whole file if the source reports it.
    pub fn length(&self) -> Option<u64> {
        self.length
    }

    fn url(&self) -> String {
        // The query string of a signed URL is a credential.
        let mut url = self.source.url.clone();
        url.set_query(None);
        url.to_string()
    }

    async fn send_request(&mut self) -> Result<(), DownloadError> {
        if self.source.url.scheme() == "file" {
            return self.open_file().await;
        }
        let mut request = self.client.get(self.source.url.clone());
        if let Some(token) = &self.source.token {
            request = request.bearer_auth(token.current().expose_secret());
        }
        if let (1.., Some(etag)) = (self.received, &self.etag) {
            request = request
                .header(header::RANGE, format!("bytes={}-", self.received))
                .header(header::IF_RANGE, etag);
        }
        let response = request_id::attach(request).send().await;
        let response = response
            .map_err(|source| DownloadError::Transport { url: self.url(), source: source.without_url() })?;
        let skip = match response.status() {
            StatusCode::PARTIAL_CONTENT if self.received > 0 => {
                if parse_range_start(&response) != Some(self.received) || self.has_changed(&response) {
                    return Err(DownloadError::Changed { url: self.url() });
                }
                0
            }
            StatusCode::OK if self.received == 0 => {
                self.etag = strong_etag(&response);
                self.length = response.content_length();
                0
            }
            StatusCode::OK => {
                if self.etag.is_none() || self.has_changed(&response) {
                    return Err(DownloadError::Changed { url: self.url() });
                }
                self.received
            }
            status @ (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => {
                return Err(DownloadError::Refused { url: self.url(), status });
            }
            status => return Err(DownloadError::Status { url: self.url(), status }),
        };
        self.body = Some(PendingBody { response, skip });
        Ok(())
    }

    /// Opens a `file:` URL, for bundles already on this machine. Reads from the start and skips the bytes already
    /// received.
    async fn open_file(&mut self) -> Result<(), DownloadError> {
        let read_error = |source| DownloadError::File { url: self.url(), source };
        let path = self.source.url.to_file_path().unwrap_or_default();
        let file = tokio::fs::File::open(path).await.map_err(read_error)?;
        let length = file.metadata().await.map_err(read_error)?.len();
        let body = reqwest::Body::wrap_stream(ReaderStream::with_capacity(file, 1 << 16));
        self.length = Some(length);
        self.body = Some(PendingBody { response: http::Response::new(body).into(), skip: self.received });
        Ok(())
    }

    fn has_changed(&self, response: &reqwest::Response) -> bool {
        strong_etag(response) != self.etag
    }

    /// Sends all bytes to `chunks`, in order, and returns their SHA-256 digest. Resumes after transient errors.
    ///
    /// # Errors
    /// [`DownloadError`] if the download fails and can't be resumed; `Abandoned` if the receiver was dropped.
    pub async fn stream_to(mut self, chunks: mpsc::Sender<Bytes>) -> Result<String, DownloadError> {
        let mut digest = Sha256::new();
        let mut backoff = Backoff::new(STALL_TIMEOUT);
        loop {
            let previously_received = self.received;
            match self.stream_body(&chunks, &mut digest).await {
                Ok(()) => return Ok(hex::encode(digest.finalize())),
                Err(error) => {
                    if self.received > previously_received {
                        backoff.record_progress();
                    }
                    back_off(&mut backoff, error).await?;
                }
            }
        }
    }

    async fn stream_body(
        &mut self,
        chunks: &mpsc::Sender<Bytes>,
        digest: &mut Sha256,
    ) -> Result<(), DownloadError> {
        if self.body.is_none() {
            // The connection broke after the last byte but before the end of the stream. There's no range left to
            // request.
            if self.length == Some(self.received) {
                return Ok(());
            }
            self.send_request().await?;
        }
        let Some(PendingBody { response, mut skip }) = self.body.take() else { return Ok(()) };
        let mut body = response.bytes_stream();
        while let Some(chunk) = self.next_chunk(&mut body).await? {
            let skipped = skip.min(chunk.len() as u64);
            skip -= skipped;
            let new = chunk.slice(skipped as usize..);
            if new.is_empty() {
                continue;
            }
            digest.update(&new);
            self.received += new.len() as u64;
            chunks.send(new).await.map_err(|_| DownloadError::Abandoned)?;
            failpoint::trigger("update.downloading")?;
        }
        match self.length {
            Some(length) if self.received < length => {
                Err(DownloadError::Truncated { url: self.url(), received: self.received })
            }
            _ => Ok(()),
        }
    }

    async fn next_chunk(
        &self,
        body: &mut (impl Stream<Item = reqwest::Result<Bytes>> + Unpin),
    ) -> Result<Option<Bytes>, DownloadError> {
        let transport_error = |source: reqwest::Error| DownloadError::Transport {
            url: self.url(),
            source: source.without_url(),
        };
        body.next().await.transpose().map_err(transport_error)
    }
}

fn strong_etag(response: &reqwest::Response) -> Option<String> {
    let etag = response.headers().get(header::ETAG)?.to_str().ok()?;
    (!etag.starts_with("W/")).then(|| etag.to_owned())
}

/// Parses the first byte position in `Content-Range: bytes 5-9/10`.
fn parse_range_start(response: &reqwest::Response) -> Option<u64> {
    let range = response.headers().get(header::CONTENT_RANGE)?.to_str().ok()?;
    range.strip_prefix("bytes ")?.split('-').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use futures_util::stream;

    use super::*;

    #[tokio::test]
    async fn stream_to_succeeds_if_connection_breaks_after_last_byte() {
        // Another request would fail: this file doesn't exist.
        let source = BundleSource { url: Url::parse("file:///nonexistent").unwrap(), token: None };
        let parts = [Ok(Bytes::from_static(b"abc")), Err(std::io::Error::other("connection lost"))];
        let body = reqwest::Body::wrap_stream(stream::iter(parts));
        let download = Download {
            source: &source,
            client: client::build(Timeouts::DOWNLOAD).unwrap(),
            etag: None,
            length: Some(3),
            received: 0,
            body: Some(PendingBody { response: http::Response::new(body).into(), skip: 0 }),
        };
        let (sender, mut receiver) = mpsc::channel(4);
        assert_eq!(download.stream_to(sender).await.unwrap(), hex::encode(Sha256::digest(b"abc")));
        assert_eq!(receiver.recv().await, Some(Bytes::from_static(b"abc")));
        assert_eq!(receiver.recv().await, None);
    }
}
