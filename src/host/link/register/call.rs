//! The calls that a machine makes with its registration token. The same text again is harmless at the platform, so
//! whatever left no answer is sent again until a deadline.

use std::time::Duration;

use http::{StatusCode, header};
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;
use url::Url;

use crate::host::system::backoff::Patience;
use crate::host::system::config::PlatformLink;
use crate::http::client::{self, Deadlines};
use crate::http::request_id;
use crate::machine::epoch::Epoch;
use crate::machine::id::MachineId;

/// What the platform answers to a registration.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Registered {
    pub status: String,
    pub epoch: Epoch,
}

/// Why a call did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    #[error("make the HTTP client")]
    Client(#[source] anyhow::Error),
    /// 401: the token is wrong, expired, or was used with another body.
    #[error("the platform does not accept this machine's registration token: {detail}")]
    Rejected { detail: String },
    #[error("the platform answered {status}: {detail}")]
    Refused { status: StatusCode, detail: String },
    #[error("the platform did not answer in time: {last}")]
    Unreachable { last: String },
}

pub struct Platform<'a> {
    client: reqwest::Client,
    link: &'a PlatformLink,
    token: &'a SecretString,
}

/// One try: done, or what to tell if there is no other.
enum Try<T> {
    Done(Result<T, CallError>),
    Again(String),
}

impl<'a> Platform<'a> {
    /// # Errors
    /// When no client can be made.
    pub fn new(link: &'a PlatformLink, token: &'a SecretString) -> Result<Self, CallError> {
        let client = client::build(Deadlines::CALL).map_err(CallError::Client)?;
        Ok(Self { client, link, token })
    }

    /// Sends this very text until there is an answer.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn register(&self, body: &str, deadline: Duration) -> Result<Registered, CallError> {
        let answer = self.post(self.link.url("/vps/register"), body, deadline).await?;
        serde_json::from_slice(&answer)
            .map_err(|error| CallError::Refused { status: StatusCode::OK, detail: error.to_string() })
    }

    /// Reports a boot that failed.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn boot_failure(
        &self,
        machine: MachineId,
        body: &str,
        deadline: Duration,
    ) -> Result<(), CallError> {
        self.post(self.link.url(&format!("/vps/{machine}/boot-failure")), body, deadline).await.map(|_| ())
    }

    /// Says that the boot has come to a stage.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn boot_stage(
        &self,
        machine: MachineId,
        body: &str,
        deadline: Duration,
    ) -> Result<(), CallError> {
        self.post(self.link.url(&format!("/vps/{machine}/boot-stage")), body, deadline).await.map(|_| ())
    }

    async fn post(&self, url: Url, body: &str, deadline: Duration) -> Result<bytes::Bytes, CallError> {
        let mut patience = Patience::new(deadline);
        loop {
            match self.try_post(&url, body).await {
                Try::Done(end) => return end,
                Try::Again(last) => {
                    tracing::warn!(why = last, "the platform did not answer");
                    patience.pause().await.map_err(|_| CallError::Unreachable { last })?;
                }
            }
        }
    }

    async fn try_post(&self, url: &Url, body: &str) -> Try<bytes::Bytes> {
        let request = self
            .client
            .post(url.clone())
            .bearer_auth(self.token.expose_secret())
            .header(header::CONTENT_TYPE, "application/json")
            .body(body.to_owned());
        let response = match request_id::onward(request).send().await {
            Ok(response) => response,
            Err(error) => return Try::Again(crate::http::problem::chain(&error)),
        };
        let status = response.status();
        let body = match response.bytes().await {
            Ok(body) => body,
            Err(error) => return Try::Again(crate::http::problem::chain(&error)),
        };
        match status {
            status if status.is_success() => Try::Done(Ok(body)),
            StatusCode::UNAUTHORIZED => Try::Done(Err(CallError::Rejected { detail: detail(&body) })),
            StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => Try::Again(status.to_string()),
            status if status.is_server_error() => Try::Again(status.to_string()),
            status => Try::Done(Err(CallError::Refused { status, detail: detail(&body) })),
        }
    }
}

/// The `detail` of a problem (RFC 9457), as far as there is one.
fn detail(body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Problem {
        detail: String,
    }
    serde_json::from_slice::<Problem>(body).map_or_else(|_| "no detail".to_owned(), |problem| problem.detail)
}
