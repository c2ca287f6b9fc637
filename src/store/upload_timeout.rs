//! An HTTP layer below object_store: sets each upload's timeout in proportion to its size.
//!
//! The client's idle timeout starts with the request and is not reset while the body is sent, so over a slow connection
//! it would end an upload that still makes progress.

use std::time::Duration;

use async_trait::async_trait;
use http::Method;
use object_store::client::{HttpClient, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService};

use svc_http::client::Timeouts;

/// The slowest connection over which uploads succeed: 0.5 Mbit/s.
const MIN_BYTES_PER_SECOND: u64 = 62_500;
/// Maximum number of uploads that share the connection: four parts of a snapshot, including the one just filled, and
/// two packs of files.
const MAX_CONCURRENT_UPLOADS: u64 = 6;
/// Requests with a body of at most this size have the same timeouts as requests without a body.
const MAX_SMALL_BODY_BYTES: usize = 64 << 10;

/// The timeouts of [`UploadTimeout::uploads`]. The idle timeout is longer than any upload's timeout: a part of a
/// snapshot is at most 20 MiB, and a pack of files at most 16 MiB.
pub(super) const UPLOAD_TIMEOUTS: Timeouts =
    Timeouts { idle: Duration::from_secs(2400), ..Timeouts::DOWNLOAD };

#[derive(Debug)]
pub(super) struct UploadTimeout {
    pub(super) uploads: HttpClient,
    /// For all other requests, and for uploads with a small body.
    pub(super) others: HttpClient,
}

#[async_trait]
impl HttpService for UploadTimeout {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let body_bytes = request.body().content_length();
        // The POST that completes an upload can have a larger body, but must also have the short idle timeout while its
        // response is read.
        if body_bytes <= MAX_SMALL_BODY_BYTES || request.method() != Method::PUT {
            return self.others.execute(request).await;
        }
        let response = tokio::time::timeout(upload_timeout(body_bytes), self.uploads.execute(request)).await;
        response.unwrap_or_else(|elapsed| Err(HttpError::new(HttpErrorKind::Timeout, elapsed)))
    }
}

fn upload_timeout(body_bytes: usize) -> Duration {
    let seconds = body_bytes as u64 * MAX_CONCURRENT_UPLOADS / MIN_BYTES_PER_SECOND;
    Timeouts::DOWNLOAD.idle + Duration::from_secs(seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A store that never responds.
    #[derive(Debug)]
    struct SilentStore;

    #[async_trait]
    impl HttpService for SilentStore {
        async fn call(&self, _: HttpRequest) -> Result<HttpResponse, HttpError> {
            std::future::pending().await
        }
    }

    #[tokio::test(start_paused = true)]
    async fn upload_without_response_ends_after_its_timeout() {
        let layer =
            UploadTimeout { uploads: HttpClient::new(SilentStore), others: HttpClient::new(SilentStore) };
        for (mib, seconds) in [(1, 130), (5, 533), (16, 1640), (20, 2043)] {
            let started = tokio::time::Instant::now();
            let mut request = HttpRequest::new(vec![0_u8; mib << 20].into());
            *request.method_mut() = Method::PUT;
            let error = layer.call(request).await.err().map(|error| error.kind());
            assert!(matches!(error, Some(HttpErrorKind::Timeout)), "{error:?}");
            assert_eq!(started.elapsed().as_secs(), seconds, "{mib}");
            assert!(started.elapsed() < UPLOAD_TIMEOUTS.idle);
        }
    }
}
