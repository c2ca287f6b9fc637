//! The request id, which correlates a request's response, log lines and outgoing calls.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use tracing::Instrument;

pub const HEADER: &str = "x-request-id";
/// [`HEADER`] as a [`HeaderName`]. Inserting a header by its `&str` would copy the name each time.
pub static HEADER_NAME: HeaderName = HeaderName::from_static(HEADER);

tokio::task_local! {
    static CURRENT: RequestId;
}

/// The id of a request, stored as a [`HeaderValue`]: most ids arrive in a header and are returned in one, and a header
/// value is cheap to clone.
#[derive(Debug, Clone)]
pub struct RequestId(HeaderValue);

impl RequestId {
    /// Returns the client's request id if it is well formed, or a new one.
    pub fn from_headers_or_new(headers: &HeaderMap) -> Self {
        let id = headers.get(&HEADER_NAME).filter(|value| value.to_str().is_ok_and(is_well_formed));
        id.map_or_else(|| Self::from(generate()), |id| Self(id.clone()))
    }

    pub fn as_str(&self) -> &str {
        self.0.to_str().unwrap_or_default()
    }

    pub fn header_value(&self) -> HeaderValue {
        self.0.clone()
    }
}

/// Text that cannot be a header value becomes an empty id.
impl From<String> for RequestId {
    fn from(id: String) -> Self {
        let value = HeaderValue::from_maybe_shared(Bytes::from(id));
        Self(value.unwrap_or_else(|_| HeaderValue::from_static("")))
    }
}

/// Returns the id of the request that this task is serving; empty outside a request.
pub fn current() -> String {
    CURRENT.try_with(|id| id.as_str().to_owned()).unwrap_or_default()
}

/// Runs `work` with this id as its request id.
pub async fn scope<T>(id: RequestId, work: impl Future<Output = T>) -> T {
    CURRENT.scope(id, work).await
}

/// Runs work that belongs to no request, under a new id that its log lines and outgoing calls carry.
pub async fn run_with_new_id<T>(work: impl Future<Output = T>) -> T {
    run_with_id(generate(), work).await
}

/// Runs a request's deferred work under that request's id.
pub async fn run_with_id<T>(id: String, work: impl Future<Output = T>) -> T {
    let span = tracing::info_span!("run", svc_request_id = %id);
    scope(id.into(), work).instrument(span).await
}

/// Generates an id; ids sort by time. An id must be unique but may be predictable: it contains per-process random bytes
/// and a counter, so that no new randomness is needed for each request.
pub fn generate() -> String {
    static PROCESS_BYTES: LazyLock<[u8; 6]> = LazyLock::new(|| {
        let random = *uuid::Uuid::new_v4().as_bytes();
        [random[0], random[1], random[2], random[3], random[4], random[5]]
    });
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    let mut bytes = [0; 10];
    bytes[..6].copy_from_slice(&*PROCESS_BYTES);
    bytes[6..].copy_from_slice(&COUNTER.fetch_add(1, Ordering::Relaxed).to_be_bytes());
    let now = jiff::Timestamp::now().as_millisecond();
    let id = uuid::Builder::from_unix_timestamp_millis(u64::try_from(now).unwrap_or(0), &bytes).into_uuid();
    id.simple().to_string()
}

/// Adds the current request's id to an outgoing call, or a new id outside a request.
pub fn attach(call: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
    let current = current();
    call.header(HEADER, if current.is_empty() { generate() } else { current })
}

pub fn is_well_formed(id: &str) -> bool {
    (8..=64).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn generated_ids_are_well_formed_and_unique() {
        let ids: Vec<String> = (0..10_000).map(|_| generate()).collect();
        assert!(ids.iter().all(|id| is_well_formed(id) && id.len() == 32));
        assert_eq!(ids.iter().collect::<HashSet<_>>().len(), ids.len());
        assert!(uuid::Uuid::parse_str(&ids[0]).is_ok_and(|id| id.get_version_num() == 7));
    }
}
