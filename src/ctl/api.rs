//! Platform API client. Mutating calls send the same `Idempotency-Key` on every attempt, so a retry after a lost
//! response has no second effect.

use std::time::Duration;

use backon::{ExponentialBuilder, Retryable};
use http::header::{self, HeaderValue};
use http::{Method, StatusCode};
use secrecy::{ExposeSecret, SecretString};
use serde::de::DeserializeOwned;
use serde_json::Value;
use url::Url;
use uuid::Uuid;

use super::api_problem::ApiProblem;
pub use super::api_problem::CallError;
use svc_base::untrusted_text;
use svc_http::client::{self, Timeouts};
use svc_http::{problem, request_id};

const MAX_ATTEMPTS: usize = 5;
/// Give up instead of retrying if `Retry-After` exceeds this.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(10);

/// A successful response with its raw body.
#[derive(Debug)]
pub struct ApiResponse {
    pub text: String,
    /// Method and path, for error messages.
    request: String,
}

impl ApiResponse {
    /// Parses the body and sanitizes all strings in it, since some of them come from hosts.
    ///
    /// # Errors
    /// [`CallError::InvalidResponse`] if the body isn't valid JSON for this type.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, CallError> {
        let invalid = |error: serde_json::Error| CallError::InvalidResponse {
            request: self.request.clone(),
            reason: error.to_string(),
        };
        let mut value: Value = serde_json::from_str(&self.text).map_err(invalid)?;
        untrusted_text::make_printable(&mut value);
        serde_json::from_value(value).map_err(invalid)
    }
}

/// Client for the platform API.
pub struct ApiClient {
    client: reqwest::Client,
    base: Url,
    bearer: HeaderValue,
    timeout: Duration,
}

/// Whether to report retries on stderr.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RetryMessages {
    Shown,
    /// The caller reports what it's waiting for.
    Hidden,
}

impl ApiClient {
    /// # Errors
    /// If the secret isn't a valid header value, or the TLS roots can't be read.
    pub fn new(base: Url, secret: &SecretString, timeout: Duration) -> anyhow::Result<Self> {
        let mut bearer = HeaderValue::from_str(&format!("Bearer {}", secret.expose_secret()))?;
        bearer.set_sensitive(true);
        let client = client::build(Timeouts { total: Some(timeout), idle: timeout, ..Timeouts::CALL })?;
        Ok(Self { client, base, bearer, timeout })
    }

    /// # Errors
    /// [`CallError`] if the call is rejected or gets no valid response, after retrying transient failures.
    pub async fn get(&self, path: &[&str], query: &[(&str, String)]) -> Result<ApiResponse, CallError> {
        self.call_with_retries(&Method::GET, &self.url_with(path, query), None, RetryMessages::Shown).await
    }

    /// Like [`Self::get`], but for polling callers that report what they're waiting for.
    ///
    /// # Errors
    /// Same as [`Self::get`].
    pub async fn poll(&self, path: &[&str], query: &[(&str, String)]) -> Result<ApiResponse, CallError> {
        self.call_with_retries(&Method::GET, &self.url_with(path, query), None, RetryMessages::Hidden).await
    }

    /// # Errors
    /// [`CallError`] if the call is rejected or gets no valid response, after retrying transient failures with the same
    /// idempotency key.
    pub async fn send(
        &self,
        method: Method,
        path: &[&str],
        body: Option<&Value>,
    ) -> Result<ApiResponse, CallError> {
        self.call_with_retries(&method, &self.url(path), body, RetryMessages::Shown).await
    }

    /// Like [`Self::send`], but with a query instead of a body.
    ///
    /// # Errors
    /// Same as [`Self::send`].
    pub async fn send_with_query(
        &self,
        method: Method,
        path: &[&str],
        query: &[(&str, String)],
    ) -> Result<ApiResponse, CallError> {
        self.call_with_retries(&method, &self.url_with(path, query), None, RetryMessages::Shown).await
    }

    /// Sends a GET without retries, returning any status along with its body.
    ///
    /// # Errors
    /// [`CallError::TimedOut`] if the response times out; [`CallError::Unreachable`] if there's no response for any
    /// other reason.
    pub async fn get_once(&self, path: &[&str]) -> Result<(StatusCode, String), CallError> {
        let request = self.client.get(self.url(path)).header(header::AUTHORIZATION, self.bearer.clone());
        let response =
            request_id::attach(request).send().await.map_err(|error| self.no_response_error(error))?;
        let status = response.status();
        Ok((status, response.text().await.map_err(|error| self.no_response_error(error))?))
    }

    /// Starts downloading a file from an offset, without retries or an overall timeout.
    ///
    /// # Errors
    /// [`CallError::Unreachable`] if the client can't be built or there's no response; [`CallError::Problem`] if the
    /// status isn't 200, or 206 with an offset.
    pub async fn open_download(&self, path: &[&str], offset: u64) -> Result<reqwest::Response, CallError> {
        let unreachable = |reason: String| CallError::Unreachable { base: self.base.clone(), reason };
        let client = client::build(Timeouts::DOWNLOAD).map_err(|error| unreachable(format!("{error:#}")))?;
        let mut request = client.get(self.url(path)).header(header::AUTHORIZATION, self.bearer.clone());
        if offset > 0 {
            request = request.header(header::RANGE, format!("bytes={offset}-"));
        }
        let result = request_id::attach(request).send().await;
        let response = result.map_err(|error| unreachable(problem::format_chain(&error.without_url())))?;
        let expected = if offset > 0 { StatusCode::PARTIAL_CONTENT } else { StatusCode::OK };
        match response.status() {
            status if status == expected => Ok(response),
            status => {
                let retry_after = retry_after(&response);
                let text = response.text().await.unwrap_or_default();
                Err(ApiProblem::parse(status, &text, retry_after).into())
            }
        }
    }

    fn url(&self, path: &[&str]) -> Url {
        let mut url = self.base.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(path);
        }
        url
    }

    fn url_with(&self, path: &[&str], query: &[(&str, String)]) -> Url {
        let mut url = self.url(path);
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        url
    }

    /// Returns the error for a missing or incomplete response.
    fn no_response_error(&self, error: reqwest::Error) -> CallError {
        let base = self.base.clone();
        if error.is_timeout() && !error.is_connect() {
            return CallError::TimedOut { base, seconds: self.timeout.as_secs() };
        }
        CallError::Unreachable { base, reason: problem::format_chain(&error.without_url()) }
    }

    async fn call_with_retries(
        &self,
        method: &Method,
        url: &Url,
        body: Option<&Value>,
        messages: RetryMessages,
    ) -> Result<ApiResponse, CallError> {
        let key = (*method != Method::GET).then(|| Uuid::now_v7().to_string());
        let backoff = ExponentialBuilder::default()
            .with_min_delay(Duration::from_millis(200))
            .with_max_delay(Duration::from_secs(3))
            .with_max_times(MAX_ATTEMPTS - 1)
            .with_jitter();
        let mut attempts = 1;
        (|| self.try_call(method, url, body, key.as_deref()))
            .retry(backoff)
            .when(CallError::is_transient)
            .adjust(|error, planned| match (planned, error.retry_after()) {
                (Some(_), Some(requested)) if requested > MAX_RETRY_AFTER => None,
                (Some(planned), Some(requested)) => Some(planned.max(requested)),
                (planned, _) => planned,
            })
            .notify(|error, delay| {
                attempts += 1;
                if messages == RetryMessages::Shown {
                    eprintln!(
                        "{}; retrying in {:.1} s (attempt {attempts} of {MAX_ATTEMPTS})",
                        error.brief(),
                        delay.as_secs_f64()
                    );
                }
            })
            .await
    }

    async fn try_call(
        &self,
        method: &Method,
        url: &Url,
        body: Option<&Value>,
        key: Option<&str>,
    ) -> Result<ApiResponse, CallError> {
        let mut call = self
            .client
            .request(method.clone(), url.clone())
            .header(header::AUTHORIZATION, self.bearer.clone())
            .header(header::ACCEPT, "application/json");
        if let Some(key) = key {
            call = call.header("idempotency-key", key);
        }
        if let Some(body) = body {
            call = call.json(body);
        }
        let response =
            request_id::attach(call).send().await.map_err(|error| self.no_response_error(error))?;
        let (status, retry_after) = (response.status(), retry_after(&response));
        let text = response.text().await.map_err(|error| self.no_response_error(error))?;
        let request = format!("{method} {}", url.path());
        match status {
            status if status.is_success() => Ok(ApiResponse { text, request }),
            StatusCode::PERMANENT_REDIRECT | StatusCode::TEMPORARY_REDIRECT | StatusCode::FOUND => {
                Err(CallError::InvalidResponse {
                    request,
                    reason: format!("{status}; check that the platform's URL is correct"),
                })
            }
            status => Err(ApiProblem::parse(status, &text, retry_after).into()),
        }
    }
}

fn retry_after(response: &reqwest::Response) -> Option<Duration> {
    let seconds = response.headers().get(header::RETRY_AFTER)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_sanitizes_strings_and_keeps_raw_body() {
        let text = r#"{"detail": "\u001b[2J\u202e ok"}"#.to_owned();
        let response = ApiResponse { text: text.clone(), request: "GET /".to_owned() };
        let parsed: Value = response.parse().unwrap();
        assert_eq!(parsed["detail"], "\u{FFFD}[2J\u{FFFD} ok");
        assert_eq!(response.text, text);
    }
}
