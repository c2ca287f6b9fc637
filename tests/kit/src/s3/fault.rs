//! What goes wrong between a client and an object store, on demand.
//!
//! ```no_run
//! # use std::time::Duration;
//! # fn f(store: &kit::s3::S3Server) {
//! use kit::s3::{Fault, Rule};
//! let lost = store.fault(Rule::new(Fault::LostReply).method("PUT").key("current.json"));
//! store.fault(Rule::new(Fault::Status(503)).query("partNumber=2").times(3));
//! store.fault(Rule::new(Fault::Delay(Duration::from_millis(20))).always());
//! // … the client does its work …
//! assert_eq!(lost.hits(), 1);
//! store.heal();
//! # }
//! ```

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::Uri;

/// What happens to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing is done, and the answer has this status (5xx, 429, 403…).
    Status(u16),
    /// Nothing is done, and the answer is an error of S3 with this status and code (`403`, `RequestTimeTooSkewed`).
    Code(u16, &'static str),
    /// All is done, and the answer's ETag is another.
    WrongEtag,
    /// It takes this much longer; further faults still apply.
    Delay(Duration),
    /// All is done, and the connection is cut before a word of the answer.
    LostReply,
    /// All is done, and the answer has this status all the same.
    StatusAfterCommit(u16),
    /// The answer's body breaks off after so many bytes.
    TruncateBody(u64),
    /// One byte in the middle of the answer's body is another.
    CorruptBody,
    /// A read sees what was there before the last write to the key.
    StaleRead,
    /// Nothing is done, and the connection is cut.
    Refuse,
}

/// Which requests a [`Fault`] happens to: unless said otherwise, the next one of any kind, once.
#[derive(Clone, Debug)]
pub struct Rule {
    fault: Fault,
    method: Option<String>,
    key: Option<String>,
    key_end: Option<String>,
    query: Option<String>,
    is_sts: bool,
    after: usize,
    times: usize,
}

impl Rule {
    pub fn new(fault: Fault) -> Self {
        Self { fault, method: None, key: None, key_end: None, query: None, is_sts: false, after: 0, times: 1 }
    }

    /// Only requests with this method.
    pub fn method(mut self, method: &str) -> Self {
        self.method = Some(method.to_ascii_uppercase());
        self
    }

    /// Only requests whose path, `/bucket/key` as it stands in the URL, contains this.
    pub fn key(mut self, contained: &str) -> Self {
        self.key = Some(contained.to_owned());
        self
    }

    /// Only requests whose path ends so.
    pub fn key_ending(mut self, end: &str) -> Self {
        self.key_end = Some(end.to_owned());
        self
    }

    /// Only requests to STS, whose path is the root.
    pub fn sts(mut self) -> Self {
        self.is_sts = true;
        self
    }

    /// Only requests whose query contains this: `uploads` creates a multipart upload, `partNumber=2` brings a part,
    /// `list-type=2` lists.
    pub fn query(mut self, contained: &str) -> Self {
        self.query = Some(contained.to_owned());
        self
    }

    /// Lets so many matching requests pass first.
    pub fn after(mut self, passed: usize) -> Self {
        self.after = passed;
        self
    }

    pub fn times(mut self, times: usize) -> Self {
        self.times = times;
        self
    }

    pub fn always(self) -> Self {
        self.times(usize::MAX)
    }

    fn concerns(&self, method: &str, uri: &Uri) -> bool {
        self.method.as_ref().is_none_or(|m| m == method)
            && (!self.is_sts || (method == "POST" && uri.path() == "/"))
            && self.key.as_ref().is_none_or(|key| uri.path().contains(key.as_str()))
            && self.key_end.as_ref().is_none_or(|end| uri.path().ends_with(end.as_str()))
            && self
                .query
                .as_ref()
                .is_none_or(|query| uri.query().unwrap_or_default().contains(query.as_str()))
    }
}

/// Counts how often a rule's fault has happened.
#[derive(Clone, Debug)]
pub struct Hits(Arc<AtomicUsize>);

impl Hits {
    pub fn hits(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

/// The rules in force.
#[derive(Debug, Default)]
pub(super) struct Faults(Mutex<Vec<Active>>);

#[derive(Debug)]
struct Active {
    rule: Rule,
    seen: usize,
    hits: Arc<AtomicUsize>,
}

impl Faults {
    pub(super) fn add(&self, rule: Rule) -> Hits {
        let hits = Hits(Arc::default());
        let active = Active { rule, seen: 0, hits: Arc::clone(&hits.0) };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(active);
        hits
    }

    pub(super) fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// What happens to this request: all the delays that concern it, and the first other fault.
    pub(super) fn of(&self, method: &str, uri: &Uri) -> (Duration, Option<Fault>) {
        let (mut delay, mut fault) = (Duration::ZERO, None);
        for active in self.0.lock().unwrap_or_else(PoisonError::into_inner).iter_mut() {
            let is_delay = matches!(active.rule.fault, Fault::Delay(_));
            if !active.rule.concerns(method, uri) || (fault.is_some() && !is_delay) {
                continue;
            }
            active.seen += 1;
            let nth = active.seen - active.rule.after.min(active.seen);
            if nth == 0 || nth > active.rule.times {
                continue;
            }
            active.hits.fetch_add(1, Ordering::SeqCst);
            match active.rule.fault {
                Fault::Delay(more) => delay += more,
                ref other => fault = Some(other.clone()),
            }
        }
        (delay, fault)
    }
}
