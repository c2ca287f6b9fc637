//! Client for calls authenticated with the machine's registration token. All calls are idempotent, so they are retried
//! without a complete response or after a transient error, until their timeout.

use std::time::Duration;

use http::{StatusCode, header};
use secrecy::{ExposeSecret, SecretString};
use serde::Serialize;
use url::Url;

use crate::system::backoff::Backoff;
use crate::system::config::PlatformAccess;
use crate::system::platform_response::{ProblemBody, read_body};
use svc_http::body::ResponseBodyError;
use svc_http::client::{self, Timeouts};
use svc_http::request_id;
use svc_machine::id::MachineId;
use svc_wire::registration::{BootFailureReport, BootStageReport, RegistrationResponse};

/// Errors from calls to the platform.
#[derive(Debug, thiserror::Error)]
pub enum RegistrationError {
    #[error("could not create the HTTP client")]
    Client(#[source] anyhow::Error),
    /// 401: the token is invalid, expired, or was already used with a different body.
    #[error("platform rejected the registration token: {detail}")]
    TokenRejected { detail: String },
    #[error("platform responded with {status}: {detail}")]
    UnexpectedResponse { status: StatusCode, detail: String },
    #[error("platform still unavailable at the timeout: {last}")]
    Unavailable { last: String },
}

pub struct RegistrationClient<'a> {
    client: reqwest::Client,
    platform: &'a PlatformAccess,
    token: &'a SecretString,
}

/// Outcome of a single attempt: either final, or a transient error to retry.
enum PostAttempt<T> {
    Done(Result<T, RegistrationError>),
    Retry(String),
}

impl<'a> RegistrationClient<'a> {
    /// # Errors
    /// If the HTTP client can't be created.
    pub fn new(platform: &'a PlatformAccess, token: &'a SecretString) -> Result<Self, RegistrationError> {
        let client = client::build(Timeouts::CALL).map_err(RegistrationError::Client)?;
        Ok(Self { client, platform, token })
    }

    /// Registers the machine, retrying until the platform accepts or rejects it or `timeout` elapses.
    pub async fn register(
        &self,
        body: &str,
        timeout: Duration,
    ) -> Result<RegistrationResponse, RegistrationError> {
        let response = self.post(self.platform.url("/vps/register"), body, timeout).await?;
        serde_json::from_slice(&response).map_err(|error| RegistrationError::UnexpectedResponse {
            status: StatusCode::OK,
            detail: error.to_string(),
        })
    }

    pub async fn report_boot_failure(
        &self,
        machine: MachineId,
        report: &BootFailureReport,
        timeout: Duration,
    ) -> Result<(), RegistrationError> {
        let url = self.platform.url(&format!("/vps/{machine}/boot-failure"));
        self.post(url, &to_json(report), timeout).await.map(drop)
    }

    pub async fn report_boot_stage(
        &self,
        machine: MachineId,
        report: &BootStageReport,
        timeout: Duration,
    ) -> Result<(), RegistrationError> {
        let url = self.platform.url(&format!("/vps/{machine}/boot-stage"));
        self.post(url, &to_json(report), timeout).await.map(drop)
    }

    async fn post(&self, url: Url, body: &str, timeout: Duration) -> Result<Vec<u8>, RegistrationError> {
        let mut backoff = Backoff::new(timeout);
        loop {
            match self.try_post(&url, body).await {
                PostAttempt::Done(result) => return result,
                PostAttempt::Retry(last) => {
                    tracing::warn!(error = last, "platform call failed; retrying");
                    backoff.pause().await.map_err(|_| RegistrationError::Unavailable { last })?;
                }
            }
        }
    }

    async fn try_post(&self, url: &Url, body: &str) -> PostAttempt<Vec<u8>> {
        let request = self
            .client
            .post(url.clone())
            .bearer_auth(self.token.expose_secret())
            .header(header::CONTENT_TYPE, "application/json")
            .body(body.to_owned());
        let response = match request_id::attach(request).send().await {
            Ok(response) => response,
            Err(error) => return PostAttempt::Retry(svc_http::problem::format_chain(&error)),
        };
        let status = response.status();
        // Don't read the body: the status alone makes the error transient, and a proxy's error page can exceed the
        // limit.
        if is_transient(status) {
            return PostAttempt::Retry(status.to_string());
        }
        let body = match read_body(response).await {
            Ok(body) => body,
            // A retry would get the same response.
            Err(error @ ResponseBodyError::TooLarge(_)) => {
                return PostAttempt::Done(Err(RegistrationError::UnexpectedResponse {
                    status,
                    detail: error.to_string(),
                }));
            }
            Err(ResponseBodyError::Http(error)) => {
                return PostAttempt::Retry(svc_http::problem::format_chain(&error));
            }
        };
        match status {
            status if status.is_success() => PostAttempt::Done(Ok(body)),
            StatusCode::UNAUTHORIZED => {
                PostAttempt::Done(Err(RegistrationError::TokenRejected { detail: problem_detail(&body) }))
            }
            status => PostAttempt::Done(Err(RegistrationError::UnexpectedResponse {
                status,
                detail: problem_detail(&body),
            })),
        }
    }
}

fn is_transient(status: StatusCode) -> bool {
    status.is_server_error() || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT)
}

fn to_json(report: &impl Serialize) -> String {
    serde_json::to_string(report).expect("plain fields serialize to JSON")
}

/// Returns the problem's `detail`, or "no detail" if it's empty.
fn problem_detail(body: &[u8]) -> String {
    let detail = ProblemBody::parse(body).detail;
    if detail.is_empty() { "no detail".to_owned() } else { detail }
}
