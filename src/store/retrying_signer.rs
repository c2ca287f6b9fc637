//! An HTTP layer below object_store. If the store rejects a request because its credentials have expired, the layer
//! signs the request with new credentials and retries it once.
//!
//! Normally, a host renews its credentials before they expire by its own clock; this layer is needed if that clock is
//! wrong.

use std::sync::Arc;

use async_trait::async_trait;
use http::header::AUTHORIZATION;
use http::{HeaderName, Method, StatusCode};
use object_store::aws::{AwsAuthorizer, AwsCredential};
use object_store::client::{
    HttpClient, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody, HttpService,
};

use super::credentials::{CredentialError, CredentialSource};

const CONTENT_SHA256: HeaderName = HeaderName::from_static("x-amz-content-sha256");
const DATE: HeaderName = HeaderName::from_static("x-amz-date");
const TOKEN: HeaderName = HeaderName::from_static("x-amz-security-token");
/// Error codes of S3 and compatible servers for expired credentials.
const EXPIRED_CODES: [&str; 4] = [
    "<Code>ExpiredToken</Code>",
    "<Code>InvalidTokenId</Code>",
    "<Code>ExpiredTokenException</Code>",
    "<Code>TokenRefreshRequired</Code>",
];

#[derive(Debug)]
pub(super) struct RetryingSigner {
    pub(super) inner: HttpClient,
    pub(super) source: Arc<dyn CredentialSource>,
    pub(super) region: String,
}

#[async_trait]
impl HttpService for RetryingSigner {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let request = self.sign_with_current(request).await;
        let retry = request.clone();
        let response = self.inner.execute(request).await?;
        if !matches!(
            response.status(),
            StatusCode::BAD_REQUEST | StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN
        ) {
            return Ok(response);
        }
        let (parts, body) = response.into_parts();
        let body = body.bytes().await?;
        // The response to a HEAD has no body; with expired credentials its status is 400.
        let may_be_expired = retry.method() == Method::HEAD && parts.status == StatusCode::BAD_REQUEST;
        let is_expired = || {
            let text = String::from_utf8_lossy(&body);
            EXPIRED_CODES.iter().any(|code| text.contains(code))
        };
        if may_be_expired || is_expired() {
            match self.source.replacement_for(access_key_of(&retry).unwrap_or_default()).await {
                Ok(renewed) => {
                    if let Some(signed) = self.sign(retry, &renewed) {
                        return self.inner.execute(signed).await;
                    }
                }
                Err(error @ CredentialError::Withdrawn) => {
                    return Err(HttpError::new(HttpErrorKind::Unknown, error));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot renew the credentials that the store rejected as expired");
                }
            }
        }
        Ok(HttpResponse::from_parts(parts, HttpResponseBody::from(body)))
    }
}

impl RetryingSigner {
    /// Signs the request again if the credentials have changed since object_store signed it: object_store signs a
    /// request once, and its own retries send it unchanged.
    async fn sign_with_current(&self, request: HttpRequest) -> HttpRequest {
        match self.source.current().await {
            Ok(current) if access_key_of(&request).is_some_and(|key| key != current.key_id) => {
                self.sign(request.clone(), &current).unwrap_or(request)
            }
            // Without current credentials, the request is sent unchanged, and the caller gets the store's error.
            _ => request,
        }
    }

    /// Replaces the signature; `None` if the request was not signed by object_store, or cannot be signed.
    fn sign(&self, mut request: HttpRequest, credential: &AwsCredential) -> Option<HttpRequest> {
        let payload = request.headers().get(CONTENT_SHA256)?.to_str().ok()?.to_owned();
        let digest = hex::decode(&payload).ok();
        for name in [AUTHORIZATION, DATE, TOKEN] {
            request.headers_mut().remove(name);
        }
        let signer = AwsAuthorizer::new(credential, "s3", &self.region)
            .with_sign_payload(payload != "UNSIGNED-PAYLOAD");
        signer.try_authorize(&mut request, digest.as_deref()).ok()?;
        Some(request)
    }
}

/// Returns the id of the access key with which a request was signed.
fn access_key_of(request: &HttpRequest) -> Option<&str> {
    let text = request.headers().get(AUTHORIZATION)?.to_str().ok()?;
    text.split_once("Credential=")?.1.split('/').next()
}
