//! A failed call to the provider: the error's kind, which callers act on, and the provider's text for the log.
//!
//! The error's message never contains the provider's text, which is in the error's source. Neither contains a token.

use std::time::Duration;

/// The meaning of a failure for the caller. Only the kind determines whether to retry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum ErrorKind {
    /// The call's target does not exist.
    NotFound,
    /// The name is taken.
    Conflict,
    /// The provider rejects this request from any caller, and would reject a retry too.
    Refused,
    /// A problem with the account, its token, its limits or the provider's capacity, not with the requested server. It
    /// lasts until an operator or the provider fixes it. The call had no effect.
    Account,
    /// The call had no effect, or repeating it is harmless.
    Transient,
    /// The call may have had an effect: check before repeating it.
    Ambiguous,
}

impl ErrorKind {
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// A provider call that failed, after any retries that were safe.
#[derive(Debug, thiserror::Error)]
#[error("the provider call `{call}` failed ({kind:?})")]
pub struct ProviderError {
    pub(super) call: &'static str,
    pub(super) kind: ErrorKind,
    #[source]
    pub(super) cause: Cause,
}

impl ProviderError {
    /// Creates an error; used by the adapter, and by fakes in tests.
    pub fn new(call: &'static str, kind: ErrorKind, cause: Cause) -> Self {
        Self { call, kind, cause }
    }

    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Returns the provider's error code; empty if it sent none.
    pub fn code(&self) -> &str {
        match &self.cause {
            Cause::Response { code, .. } => code,
            _ => "",
        }
    }

    /// Whether the provider lacks capacity for the type in the location. Another location may have it.
    pub fn is_capacity_error(&self) -> bool {
        matches!(self.code(), "resource_unavailable" | "placement_error")
    }

    /// Whether the same call may be repeated unchanged.
    pub fn is_transient(&self) -> bool {
        self.kind == ErrorKind::Transient
    }
}

/// The cause of a failure.
#[derive(Debug, thiserror::Error)]
pub enum Cause {
    #[error("the provider returned {status}: {code}: {message}")]
    Response { status: u16, code: String, message: String },
    #[error("no response within {} ms", .after.as_millis())]
    Timeout { after: Duration },
    #[error("the provider could not be reached")]
    Connect(#[source] reqwest::Error),
    #[error("the connection to the provider was lost")]
    Disconnected(#[source] reqwest::Error),
    #[error("cannot parse the provider's response ({status})")]
    InvalidResponse {
        status: u16,
        #[source]
        source: serde_json::Error,
    },
    #[error("the provider's response is larger than {limit} bytes")]
    TooLarge { limit: usize },
    #[error("no call was possible within {} ms: the rate limit is exhausted, or too many calls are in flight", .after.as_millis())]
    Exhausted { after: Duration },
}
