//! An HTTP layer below object_store: completes a snapshot upload only if no object with its key exists. If the store
//! does not support this condition, the upload is completed without it.
//!
//! object_store completes uploads unconditionally. The added header is not part of the signature; S3 does not require
//! it to be.

use async_trait::async_trait;
use http::header::{HeaderValue, IF_NONE_MATCH};
use http::{Method, StatusCode};
use object_store::client::{HttpClient, HttpError, HttpRequest, HttpResponse, HttpService};

use super::key::SNAPSHOTS_DIR;

#[derive(Debug)]
pub(super) struct WriteOnce {
    pub(super) inner: HttpClient,
}

#[async_trait]
impl HttpService for WriteOnce {
    async fn call(&self, mut request: HttpRequest) -> Result<HttpResponse, HttpError> {
        if !completes_snapshot(&request) {
            return self.inner.execute(request).await;
        }
        let unconditional = request.clone();
        request.headers_mut().insert(IF_NONE_MATCH, HeaderValue::from_static("*"));
        let response = self.inner.execute(request).await?;
        if response.status() != StatusCode::NOT_IMPLEMENTED {
            return Ok(response);
        }
        tracing::debug!(
            "the store does not support conditional completion of uploads; completing without the condition"
        );
        self.inner.execute(unconditional).await
    }
}

fn completes_snapshot(request: &HttpRequest) -> bool {
    let uri = request.uri();
    let is_completion =
        || uri.query().is_some_and(|query| query.split('&').any(|pair| pair.starts_with("uploadId=")));
    request.method() == Method::POST && uri.path().contains(SNAPSHOTS_DIR) && is_completion()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn empty_request(method: Method, uri: &str) -> HttpRequest {
        let mut request = HttpRequest::new(Vec::new().into());
        *request.method_mut() = method;
        *request.uri_mut() = uri.parse().unwrap();
        request
    }

    #[test]
    fn completes_snapshot_matches_only_completions() {
        let dump = "http://store/b/user_1/primary/system/db/snapshots/x.dump";
        assert!(completes_snapshot(&empty_request(Method::POST, &format!("{dump}?uploadId=1"))));
        for (method, uri) in [
            (Method::POST, format!("{dump}?uploads")),
            (Method::PUT, format!("{dump}?partNumber=1&uploadId=1")),
            (Method::DELETE, format!("{dump}?uploadId=1")),
            (Method::POST, "http://store/b/system-bundles/v1/x.tar.gz?uploadId=1".to_owned()),
        ] {
            assert!(!completes_snapshot(&empty_request(method.clone(), &uri)), "{method} {uri}");
        }
    }
}
