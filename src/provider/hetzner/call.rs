//! Makes one call to the provider: applies the timeout, classifies failures, and retries where that is safe.
//!
//! Invariant: a call that creates something is repeated only after a response that confirms that nothing was done.

use std::time::{Duration, Instant};

use backon::{ExponentialBuilder, Retryable};
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use serde::de::DeserializeOwned;
use url::Url;

use super::super::error::{Cause, ErrorKind, ProviderError};
use super::budget::Budget;
use super::wire::ErrorBody;
use svc_base::error_chain::format_chain;
use svc_base::metrics::{PROVIDER_CALLS, PROVIDER_DURATION};
use svc_http::body::{ResponseBodyError, read_response};
use svc_http::request_id;

/// A page of fifty servers is about 150 KiB long.
const MAX_RESPONSE_BYTES: usize = 8 << 20;

/// Timeouts and retries of the adapter.
#[derive(Debug, Clone, Copy)]
pub struct CallLimits {
    /// Timeout of one exchange, including the time to connect; the wait for the rate budget does not count.
    pub timeout: Duration,
    pub initial_backoff: Duration,
    pub max_backoff: Duration,
    /// Maximum time that an exchange waits for the rate budget, including the wait for an in-flight permit.
    pub max_rate_wait: Duration,
    /// Maximum number of retries after the first exchange.
    pub max_retries: usize,
    /// A call that is not idempotent is retried only within this time after its start. Its callers need a definite
    /// outcome in a bounded time, and can repeat the call themselves.
    pub retry_window: Duration,
}

impl Default for CallLimits {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(10),
            initial_backoff: Duration::from_millis(250),
            max_backoff: Duration::from_secs(5),
            max_rate_wait: Duration::from_secs(30),
            max_retries: 4,
            retry_window: Duration::from_secs(5),
        }
    }
}

/// Whether the call is idempotent at the provider.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Idempotence {
    Idempotent,
    /// Each call creates or changes something again.
    NotIdempotent,
}

/// A request. `name` identifies the call in errors and metrics.
pub(super) struct Call<'a> {
    pub(super) name: &'static str,
    pub(super) method: Method,
    pub(super) path: &'a str,
    pub(super) query: &'a [(&'a str, &'a str)],
    pub(super) body: Option<Vec<u8>>,
    pub(super) idempotence: Idempotence,
}

impl<'a> Call<'a> {
    pub(super) fn get(name: &'static str, path: &'a str, query: &'a [(&'a str, &'a str)]) -> Self {
        Self { name, method: Method::GET, path, query, body: None, idempotence: Idempotence::Idempotent }
    }

    pub(super) fn delete(name: &'static str, path: &'a str) -> Self {
        Self {
            name,
            method: Method::DELETE,
            path,
            query: &[],
            body: None,
            idempotence: Idempotence::Idempotent,
        }
    }

    pub(super) fn post(name: &'static str, path: &'a str, body: Vec<u8>, idempotence: Idempotence) -> Self {
        Self { name, method: Method::POST, path, query: &[], body: Some(body), idempotence }
    }
}

/// A failed exchange, and whether it may be retried.
struct FailedExchange {
    error: ProviderError,
    retry: Retry,
}

#[derive(Clone, Copy)]
enum Retry {
    Never,
    AfterBackoff,
    /// After a 429: retry after at least this delay, during which the budget suspends all calls.
    After(Duration),
}

/// The connection to the provider: address, credential and limits.
#[derive(Clone)]
pub(super) struct Connection {
    pub(super) client: reqwest::Client,
    pub(super) base: Url,
    /// Marked sensitive, so that it is never printed.
    pub(super) authorization: HeaderValue,
    pub(super) budget: Budget,
    pub(super) limits: CallLimits,
}

impl Connection {
    /// Makes the call, with retries where they are safe, and parses the response's JSON.
    pub(super) async fn request_json<A: DeserializeOwned>(&self, call: Call<'_>) -> Result<A, ProviderError> {
        let response = self.exchange_with_retries(&call).await?;
        serde_json::from_slice(&response.body).map_err(|source| {
            let kind = kind_if_effect_unknown(call.idempotence);
            ProviderError::new(
                call.name,
                kind,
                Cause::InvalidResponse { status: response.status.as_u16(), source },
            )
        })
    }

    async fn exchange_with_retries(&self, call: &Call<'_>) -> Result<Response, ProviderError> {
        let backoff = ExponentialBuilder::new()
            .with_jitter()
            .with_min_delay(self.limits.initial_backoff)
            .with_max_delay(self.limits.max_backoff)
            .with_max_times(self.limits.max_retries);
        let start = Instant::now();
        (|| self.exchange(call))
            .retry(backoff)
            .sleep(tokio::time::sleep)
            .when(|failed: &FailedExchange| !matches!(failed.retry, Retry::Never))
            .adjust(|failed, backoff| {
                let delay = match failed.retry {
                    Retry::After(delay) => backoff.map(|backoff| backoff.max(delay)),
                    Retry::Never | Retry::AfterBackoff => backoff,
                };
                delay.filter(|delay| {
                    call.idempotence == Idempotence::Idempotent
                        || start.elapsed() + *delay <= self.limits.retry_window
                })
            })
            .notify(|failed, wait| {
                let cause = &failed.error.cause;
                tracing::debug!(call = call.name, cause = %format_chain(cause), wait_ms = wait.as_millis(), "retrying a provider call");
            })
            .await
            .map_err(|failed| failed.error)
    }

    async fn exchange(&self, call: &Call<'_>) -> Result<Response, FailedExchange> {
        let result = self.exchange_once(call).await;
        let outcome = result.as_ref().map_or_else(|failed| failed.error.kind().as_str(), |_| "ok");
        PROVIDER_CALLS.add_one([call.name, outcome]);
        result
    }

    async fn exchange_once(&self, call: &Call<'_>) -> Result<Response, FailedExchange> {
        let Ok(_permit) = self.budget.acquire().await else {
            let cause = Cause::Exhausted { after: self.limits.max_rate_wait };
            let error = ProviderError::new(call.name, ErrorKind::Transient, cause);
            return Err(FailedExchange { error, retry: Retry::Never });
        };
        let timeout = self.limits.timeout;
        let start = Instant::now();
        let result = tokio::time::timeout(timeout, self.send(call)).await;
        PROVIDER_DURATION.record([call.name], start.elapsed());
        let response = match result {
            Ok(Ok(response)) => response,
            Ok(Err(cause)) => {
                let kind = match &cause {
                    // Nothing was sent.
                    Cause::Connect(_) => ErrorKind::Transient,
                    _ => kind_if_effect_unknown(call.idempotence),
                };
                return Err(FailedExchange {
                    error: ProviderError::new(call.name, kind, cause),
                    retry: Retry::Never,
                });
            }
            Err(_) => {
                let error = ProviderError::new(
                    call.name,
                    kind_if_effect_unknown(call.idempotence),
                    Cause::Timeout { after: timeout },
                );
                return Err(FailedExchange { error, retry: Retry::Never });
            }
        };
        self.budget.update(&response.headers, start.elapsed());
        if response.status.is_success() {
            return Ok(response);
        }
        let failed = self.classify_failure(call, &response);
        if let Retry::After(wait) = failed.retry {
            self.budget.report_rate_limit(wait).await;
        }
        Err(failed)
    }

    async fn send(&self, call: &Call<'_>) -> Result<Response, Cause> {
        let request = self.client.request(call.method.clone(), self.url(call));
        let mut request = request_id::attach(request).header(AUTHORIZATION, self.authorization.clone());
        if let Some(body) = &call.body {
            request = request.header(CONTENT_TYPE, "application/json").body(body.clone());
        }
        let mut response = request.send().await.map_err(|error| {
            if error.is_connect() { Cause::Connect(error) } else { Cause::Disconnected(error) }
        })?;
        let (status, headers) = (response.status(), response.headers().clone());
        let mut body = Vec::new();
        read_response(&mut response, MAX_RESPONSE_BYTES, &mut body).await.map_err(|error| match error {
            ResponseBodyError::TooLarge(limit) => Cause::TooLarge { limit },
            ResponseBodyError::Http(error) => Cause::Disconnected(error),
        })?;
        Ok(Response { status, headers, body })
    }

    fn url(&self, call: &Call<'_>) -> Url {
        let mut url = self.base.clone();
        url.set_path(&format!("{}{}", self.base.path().trim_end_matches('/'), call.path));
        if !call.query.is_empty() {
            url.query_pairs_mut().extend_pairs(call.query);
        }
        url
    }

    /// Classifies an unsuccessful response. A 429 also suspends all calls.
    fn classify_failure(&self, call: &Call<'_>, response: &Response) -> FailedExchange {
        let (code, message) = match serde_json::from_slice::<ErrorBody>(&response.body) {
            Ok(body) => (body.error.code, body.error.message),
            Err(_) => (String::new(), String::new()),
        };
        let (kind, mut retry) = classify(response.status, &code, call.idempotence);
        if response.status == StatusCode::TOO_MANY_REQUESTS {
            retry = Retry::After(
                self.budget.suspend_after_rate_limit(&response.headers, self.limits.initial_backoff),
            );
        }
        let status = response.status.as_u16();
        FailedExchange {
            error: ProviderError::new(call.name, kind, Cause::Response { status, code, message }),
            retry,
        }
    }
}

struct Response {
    status: StatusCode,
    headers: HeaderMap,
    body: Vec<u8>,
}

/// Returns the kind of a failure after which it is unknown whether the call had an effect.
fn kind_if_effect_unknown(idempotence: Idempotence) -> ErrorKind {
    match idempotence {
        Idempotence::Idempotent => ErrorKind::Transient,
        Idempotence::NotIdempotent => ErrorKind::Ambiguous,
    }
}

/// Classifies an unsuccessful response by the provider's error code or, if the code is unknown, by the status.
fn classify(status: StatusCode, code: &str, idempotence: Idempotence) -> (ErrorKind, Retry) {
    match code {
        "rate_limit_exceeded" | "conflict" | "locked" => return (ErrorKind::Transient, Retry::AfterBackoff),
        "uniqueness_error" => return (ErrorKind::Conflict, Retry::Never),
        "not_found" => return (ErrorKind::NotFound, Retry::Never),
        // Nothing was done, and the provider reports a temporary condition.
        "maintenance" => return (ErrorKind::Transient, Retry::Never),
        "resource_limit_exceeded"
        | "resource_unavailable"
        | "placement_error"
        | "unauthorized"
        | "token_readonly"
        | "forbidden" => return (ErrorKind::Account, Retry::Never),
        _ => {}
    }
    match status {
        StatusCode::TOO_MANY_REQUESTS => (ErrorKind::Transient, Retry::AfterBackoff),
        StatusCode::NOT_FOUND => (ErrorKind::NotFound, Retry::Never),
        StatusCode::BAD_GATEWAY | StatusCode::GATEWAY_TIMEOUT if idempotence == Idempotence::Idempotent => {
            (ErrorKind::Transient, Retry::AfterBackoff)
        }
        StatusCode::UNAUTHORIZED | StatusCode::PAYMENT_REQUIRED | StatusCode::FORBIDDEN => {
            (ErrorKind::Account, Retry::Never)
        }
        status if status.is_client_error() => (ErrorKind::Refused, Retry::Never),
        _ => (kind_if_effect_unknown(idempotence), Retry::Never),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classify_maps_codes_and_statuses_to_kinds() {
        use ErrorKind::{Account, Ambiguous, Conflict, NotFound, Refused, Transient};
        let cases = [
            (429, "rate_limit_exceeded", Transient, Transient),
            (409, "conflict", Transient, Transient),
            (423, "locked", Transient, Transient),
            (409, "uniqueness_error", Conflict, Conflict),
            (404, "not_found", NotFound, NotFound),
            (422, "invalid_input", Refused, Refused),
            (403, "resource_limit_exceeded", Account, Account),
            (401, "unauthorized", Account, Account),
            (401, "", Account, Account),
            (403, "token_readonly", Account, Account),
            (503, "placement_error", Account, Account),
            (412, "resource_unavailable", Account, Account),
            (500, "server_error", Transient, Ambiguous),
            (502, "", Transient, Ambiguous),
            (503, "unavailable", Transient, Ambiguous),
            (504, "timeout", Transient, Ambiguous),
            (418, "teapot", Refused, Refused),
            (302, "", Transient, Ambiguous),
        ];
        for (status, code, idempotent, not_idempotent) in cases {
            let status = StatusCode::from_u16(status).unwrap();
            assert_eq!(classify(status, code, Idempotence::Idempotent).0, idempotent, "{status} {code}");
            assert_eq!(
                classify(status, code, Idempotence::NotIdempotent).0,
                not_idempotent,
                "{status} {code}"
            );
        }
    }
}
