//! Calls a host through the gateway's trusted socket, through the router with the owner's session, or directly with the
//! platform's proofs.

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderValue};
use http::{HeaderName, Method, StatusCode};
use secrecy::{ExposeSecret, SecretString};
use serde::de::DeserializeOwned;
use serde_json::Value;
use url::Url;

use svc_base::error_chain::format_chain;
use svc_http::body::{ResponseBodyError, read_response};
use svc_http::client::{self, Timeouts};

pub const TIMEOUTS: Timeouts = Timeouts {
    connect: Duration::from_secs(5),
    total: Some(Duration::from_secs(20)),
    idle: Duration::from_secs(10),
};
/// Maximum size of a response body that an operator's command reads.
const MAX_BODY_BYTES: usize = 32 << 20;
/// Maximum size of a response body that the platform reads: hosts may be hostile.
const MAX_PLATFORM_BODY_BYTES: usize = 4 << 20;

/// How requests are authenticated.
pub enum Credential {
    /// The trusted socket needs no credential.
    None,
    Header(HeaderName, HeaderValue),
    /// Each request gets a new value, because values expire soon.
    Signed(HeaderName, Box<dyn Fn() -> HeaderValue + Send + Sync>),
}

impl Credential {
    fn header(&self) -> Option<(HeaderName, HeaderValue)> {
        match self {
            Self::None => None,
            Self::Header(name, value) => Some((name.clone(), value.clone())),
            Self::Signed(name, sign) => Some((name.clone(), sign())),
        }
    }
}

/// Sends requests to one host, with its credential.
pub struct HostClient {
    client: reqwest::Client,
    base: Url,
    credential: Credential,
    max_body_bytes: usize,
}

/// A response with its whole body.
pub struct HostResponse {
    pub status: StatusCode,
    pub content_type: String,
    pub body: Bytes,
}

impl HostResponse {
    pub fn text(&self) -> std::borrow::Cow<'_, str> {
        String::from_utf8_lossy(&self.body)
    }

    /// # Errors
    /// The reason the body is not JSON of this type.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, String> {
        serde_json::from_slice(&self.body).map_err(|error| error.to_string())
    }
}

impl HostClient {
    pub fn over_socket(socket: &Path) -> anyhow::Result<Self> {
        let base = Url::parse("http://gateway/")?;
        let client = client::build_for_socket(TIMEOUTS, socket)?;
        Ok(Self { client, base, credential: Credential::None, max_body_bytes: MAX_BODY_BYTES })
    }

    /// Creates a client that calls the host directly. `client` verifies the host's key.
    pub fn direct(client: reqwest::Client, base: Url, credential: Credential) -> Self {
        Self { client, base, credential, max_body_bytes: MAX_PLATFORM_BODY_BYTES }
    }

    /// Creates a client that calls the host through the router. `token` is the identity provider's session JWT, or the
    /// value of a browser's `svc_session` cookie.
    pub fn through_router(base: Url, token: &SecretString) -> anyhow::Result<Self> {
        let token = token.expose_secret();
        let is_session = token.starts_with("svcs_");
        let (name, text) = if !is_session && token.split('.').count() == 3 {
            (header::AUTHORIZATION, format!("Bearer {token}"))
        } else {
            (header::COOKIE, format!("svc_session={token}"))
        };
        let mut value = HeaderValue::from_str(&text)?;
        value.set_sensitive(true);
        let credential = Credential::Header(name, value);
        Ok(Self { client: client::build(TIMEOUTS)?, base, credential, max_body_bytes: MAX_BODY_BYTES })
    }

    pub fn base(&self) -> &Url {
        &self.base
    }

    /// Returns the URL of a path on this host; the base URL if the path is invalid.
    pub fn url(&self, path: &str) -> Url {
        self.base.join(path).unwrap_or_else(|_| self.base.clone())
    }

    pub async fn get(&self, url: &Url, accept: &'static str) -> Result<HostResponse, String> {
        self.request(Method::GET, url, accept, None).await
    }

    pub async fn post(&self, url: &Url, body: &Value) -> Result<HostResponse, String> {
        self.request(Method::POST, url, "application/json", Some(body)).await
    }

    async fn request(
        &self,
        method: Method,
        url: &Url,
        accept: &'static str,
        body: Option<&Value>,
    ) -> Result<HostResponse, String> {
        // The credential must not be sent to another host.
        if url.origin() != self.base.origin() {
            return Err(format!("{url} has a different origin"));
        }
        let describe =
            |error: reqwest::Error| format!("{}: {}", url.path(), format_chain(&error.without_url()));
        let mut request = self.client.request(method.clone(), url.clone()).header(header::ACCEPT, accept);
        if let Some((name, value)) = self.credential.header() {
            request = request.header(name, value);
        }
        if method != Method::GET {
            // A browser sends the same header for a page from this host.
            request = request.header(header::ORIGIN, self.base.origin().ascii_serialization());
        }
        if let Some(body) = body {
            request = request.json(body);
        }
        let mut response = request.send().await.map_err(describe)?;
        let status = response.status();
        let content_type = response.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let content_type = content_type.unwrap_or_default().to_owned();
        let mut body = Vec::new();
        read_response(&mut response, self.max_body_bytes, &mut body).await.map_err(|error| match error {
            ResponseBodyError::TooLarge(max) => {
                format!("{}: the response is larger than {} MiB", url.path(), max >> 20)
            }
            ResponseBodyError::Http(error) => describe(error),
        })?;
        Ok(HostResponse { status, content_type, body: body.into() })
    }
}
