//! A failed call to the provider: a kind for the code that decides, and the provider's own words for the log.
//!
//! The error's own text never holds the provider's words; they are its source. A token is in neither.

use std::time::Duration;

/// What a failure means for the caller; nothing else of the error drives a retry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// What the call is about does not exist.
    NotFound,
    /// The name is taken.
    Conflict,
    /// Asking again will be refused again: for what was asked, not for who asks.
    Refused,
    /// The account, its token or its limits, or the provider's capacity: no failure of the one server that was asked for,
    /// and over when somebody or the provider has put it right. Nothing was done.
    Account,
    /// It did not happen, or asking again does no harm.
    Transient,
    /// It may have happened; look before asking again.
    Ambiguous,
}

impl ErrorKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotFound => "not_found",
            Self::Conflict => "conflict",
            Self::Refused => "refused",
            Self::Account => "account",
            Self::Transient => "transient",
            Self::Ambiguous => "ambiguous",
        }
    }
}

/// A provider call that failed after its own retries.
#[derive(Debug, thiserror::Error)]
#[error("the provider call `{call}` failed ({kind:?})")]
pub struct ProviderError {
    pub(super) call: &'static str,
    pub(super) kind: ErrorKind,
    #[source]
    pub(super) cause: Cause,
}

impl ProviderError {
    /// For the adapter, and for tests that stand in for one.
    pub fn new(call: &'static str, kind: ErrorKind, cause: Cause) -> Self {
        Self { call, kind, cause }
    }

    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The provider's own code; empty where it gave none.
    pub fn code(&self) -> &str {
        match &self.cause {
            Cause::Answer { code, .. } => code,
            _ => "",
        }
    }

    /// Whether the provider has no capacity for the type in the location: another location may have it.
    pub fn is_without_capacity(&self) -> bool {
        matches!(self.code(), "resource_unavailable" | "placement_error")
    }

    /// Whether the same call may be made again as it is.
    pub fn is_transient(&self) -> bool {
        self.kind == ErrorKind::Transient
    }
}

/// What happened on the wire.
#[derive(Debug, thiserror::Error)]
pub enum Cause {
    #[error("the provider answered {status}: {code}: {message}")]
    Answer { status: u16, code: String, message: String },
    #[error("no answer within {} ms", .after.as_millis())]
    Deadline { after: Duration },
    #[error("the provider could not be reached")]
    Connect(#[source] reqwest::Error),
    #[error("the exchange with the provider broke off")]
    BrokenOff(#[source] reqwest::Error),
    #[error("the provider's answer ({status}) cannot be read")]
    Unreadable {
        status: u16,
        #[source]
        source: serde_json::Error,
    },
    #[error("the provider's answer is larger than {limit} bytes")]
    TooLarge { limit: usize },
    #[error("no call was left in the rate budget within {} ms", .after.as_millis())]
    Exhausted { after: Duration },
}
