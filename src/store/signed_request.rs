//! Sends signed requests that object_store's client does not support.

use http::{HeaderName, HeaderValue, Method, StatusCode};
use object_store::aws::AwsAuthorizer;
use object_store::client::{HttpClient, HttpRequest};
use svc_http::client::{self, Timeouts};

use super::config::S3Config;

/// The reason there is no response.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    #[error("cannot create an HTTP client: {0}")]
    Client(String),
    #[error("the URL or a header of the request is invalid")]
    InvalidRequest,
    #[error("cannot sign the request")]
    Sign(#[source] object_store::Error),
    #[error("the store did not respond: {0}")]
    NoResponse(String),
}

/// A response from the store.
#[derive(Debug)]
pub(super) struct StoreResponse {
    pub(super) status: StatusCode,
    pub(super) text: String,
}

/// Sends requests signed with the configured credentials.
pub(super) struct SignedClient<'a> {
    client: HttpClient,
    s3: &'a S3Config,
}

impl<'a> SignedClient<'a> {
    pub(super) fn new(s3: &'a S3Config) -> Result<Self, RequestError> {
        let client =
            client::build(Timeouts::CALL).map_err(|error| RequestError::Client(format!("{error:#}")))?;
        Ok(Self { client: HttpClient::new(client), s3 })
    }

    /// Sends a request, and returns the response regardless of its status. `target` is an object's key with an
    /// optional query, or only a query.
    pub(super) async fn send(
        &self,
        method: Method,
        target: &str,
        headers: &[(&'static str, &str)],
        body: &'static [u8],
    ) -> Result<StoreResponse, RequestError> {
        let base = match &self.s3.endpoint {
            Some(endpoint) => format!("{}/{}", endpoint.trim_end_matches('/'), self.s3.bucket),
            None => format!("https://{}.s3.{}.amazonaws.com", self.s3.bucket, self.s3.region),
        };
        let slash = if target.starts_with('?') && self.s3.endpoint.is_some() { "" } else { "/" };
        let mut request = HttpRequest::new(bytes::Bytes::from_static(body).into());
        *request.method_mut() = method;
        *request.uri_mut() =
            format!("{base}{slash}{target}").parse().map_err(|_| RequestError::InvalidRequest)?;
        for (name, value) in headers {
            let value = HeaderValue::from_str(value).map_err(|_| RequestError::InvalidRequest)?;
            request.headers_mut().insert(HeaderName::from_static(name), value);
        }
        let credential = self.s3.credential();
        AwsAuthorizer::new(&credential, "s3", &self.s3.region)
            .try_authorize(&mut request, None)
            .map_err(RequestError::Sign)?;
        let no_response = |error: object_store::client::HttpError| {
            RequestError::NoResponse(svc_http::problem::format_chain(&error))
        };
        let response = self.client.execute(request).await.map_err(no_response)?;
        let status = response.status();
        let body = response.into_body().bytes().await.map_err(no_response)?;
        Ok(StoreResponse { status, text: String::from_utf8_lossy(&body).into_owned() })
    }
}
