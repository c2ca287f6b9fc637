//! Faults between a client and an object store, on demand.
//!
//! ```no_run
//! # use std::time::Duration;
//! # fn f(store: &kit::s3::S3Server) {
//! use kit::s3::{Fault, FaultRule};
//! let lost = store.add_fault(FaultRule::new(Fault::LostReply).method("PUT").key("current.json"));
//! store.add_fault(FaultRule::new(Fault::Status(503)).query("partNumber=2").times(3));
//! store.add_fault(FaultRule::new(Fault::Delay(Duration::from_millis(20))).always());
//! // … the client does its work …
//! assert_eq!(lost.hits(), 1);
//! store.heal();
//! # }
//! ```

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::Uri;

/// A fault injected into a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The request is not executed; the response has this status (5xx, 429, 403…).
    Status(u16),
    /// The request is not executed; the response is an S3 error with this status and code (`403`,
    /// `RequestTimeTooSkewed`).
    Code(u16, &'static str),
    /// The request is executed; the response has a wrong ETag.
    WrongEtag,
    /// The request is delayed by this duration; other faults still apply.
    Delay(Duration),
    /// The request is executed; the connection is cut before the response.
    LostReply,
    /// The request is executed; the response has this status regardless of the result.
    StatusAfterCommit(u16),
    /// The response body is truncated after this many bytes.
    TruncateBody(u64),
    /// One byte in the middle of the response body is changed.
    CorruptBody,
    /// A read returns the content that the key's last write replaced. Has no effect with a third-party server.
    StaleRead,
    /// The request is not executed; the connection is cut.
    Disconnect,
}

/// Selects the requests that a [`Fault`] affects: by default, only the next request of any kind.
#[derive(Clone, Debug)]
pub struct FaultRule {
    fault: Fault,
    method: Option<String>,
    key: Option<String>,
    key_suffix: Option<String>,
    query: Option<String>,
    is_sts: bool,
    after: usize,
    times: usize,
}

impl FaultRule {
    pub fn new(fault: Fault) -> Self {
        Self {
            fault,
            method: None,
            key: None,
            key_suffix: None,
            query: None,
            is_sts: false,
            after: 0,
            times: 1,
        }
    }

    /// Selects only requests with this method.
    pub fn method(mut self, method: &str) -> Self {
        self.method = Some(method.to_ascii_uppercase());
        self
    }

    /// Selects only requests whose path, `/bucket/key` as in the URL, contains `substring`.
    pub fn key(mut self, substring: &str) -> Self {
        self.key = Some(substring.to_owned());
        self
    }

    /// Selects only requests whose path ends with `suffix`.
    pub fn key_suffix(mut self, suffix: &str) -> Self {
        self.key_suffix = Some(suffix.to_owned());
        self
    }

    /// Selects only requests to STS, whose path is the root.
    pub fn sts(mut self) -> Self {
        self.is_sts = true;
        self
    }

    /// Selects only requests whose query contains `substring`: for example, `uploads` for the start of a multipart
    /// upload, `partNumber=2` for a part, or `list-type=2` for a listing.
    pub fn query(mut self, substring: &str) -> Self {
        self.query = Some(substring.to_owned());
        self
    }

    /// Skips this many matching requests before the first fault.
    pub fn after(mut self, skipped: usize) -> Self {
        self.after = skipped;
        self
    }

    pub fn times(mut self, times: usize) -> Self {
        self.times = times;
        self
    }

    pub fn always(self) -> Self {
        self.times(usize::MAX)
    }

    fn matches(&self, method: &str, uri: &Uri) -> bool {
        self.method.as_ref().is_none_or(|m| m == method)
            && (!self.is_sts || (method == "POST" && uri.path() == "/"))
            && self.key.as_ref().is_none_or(|key| uri.path().contains(key.as_str()))
            && self.key_suffix.as_ref().is_none_or(|suffix| uri.path().ends_with(suffix.as_str()))
            && self
                .query
                .as_ref()
                .is_none_or(|query| uri.query().unwrap_or_default().contains(query.as_str()))
    }
}

/// Counts how many times a rule's fault was injected.
#[derive(Clone, Debug)]
pub struct HitCounter(Arc<AtomicUsize>);

impl HitCounter {
    pub fn hits(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

/// The active rules.
#[derive(Debug, Default)]
pub(super) struct Faults(Mutex<Vec<ActiveRule>>);

#[derive(Debug)]
struct ActiveRule {
    rule: FaultRule,
    match_count: usize,
    hits: Arc<AtomicUsize>,
}

impl Faults {
    pub(super) fn add(&self, rule: FaultRule) -> HitCounter {
        let hits = HitCounter(Arc::default());
        let active = ActiveRule { rule, match_count: 0, hits: Arc::clone(&hits.0) };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(active);
        hits
    }

    pub(super) fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Returns and counts the faults for this request: the sum of all matching delays, and the first other fault.
    pub(super) fn take_faults(&self, method: &str, uri: &Uri) -> (Duration, Option<Fault>) {
        let (mut delay, mut fault) = (Duration::ZERO, None);
        for active in self.0.lock().unwrap_or_else(PoisonError::into_inner).iter_mut() {
            let is_delay = matches!(active.rule.fault, Fault::Delay(_));
            if !active.rule.matches(method, uri) || (fault.is_some() && !is_delay) {
                continue;
            }
            active.match_count += 1;
            let nth = active.match_count.saturating_sub(active.rule.after);
            if nth == 0 || nth > active.rule.times {
                continue;
            }
            active.hits.fetch_add(1, Ordering::SeqCst);
            match active.rule.fault {
                Fault::Delay(extra) => delay += extra,
                ref other => fault = Some(other.clone()),
            }
        }
        (delay, fault)
    }
}
