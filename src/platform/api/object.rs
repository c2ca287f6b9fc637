//! Streams an object from the store for GET and HEAD, with support for range requests (RFC 9110).

use std::ops::Range;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, StatusCode};
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectMeta, ObjectStore};

use super::call::ApiCall;
use svc_http::openapi::{Content, DocumentedResponse};
use svc_http::problem::{Code, Problem, format_chain};
use svc_store::{Bucket, StoreError};

/// The responses from a route that serves an object.
pub const RESPONSES: [DocumentedResponse; 3] = [
    DocumentedResponse {
        status: 200,
        description: "The file.",
        content: Content::Other("application/octet-stream"),
    },
    DocumentedResponse {
        status: 206,
        description: "A range of the file.",
        content: Content::Other("application/octet-stream"),
    },
    DocumentedResponse { status: 304, description: "The file has not changed.", content: Content::Nothing },
];

/// Responds with the object, or with its requested range.
///
/// # Errors
/// The problem from `not_found` if there is no such object; `range_not_satisfiable` if the requested range is outside
/// the object; `store_unavailable` if a request to the store fails.
pub async fn serve(
    bucket: &Bucket,
    object: &Path,
    media_type: &'static str,
    call: &ApiCall,
    not_found: impl FnOnce() -> Problem,
) -> Result<Response, Problem> {
    let meta = bucket.head(object).await?.ok_or_else(not_found)?;
    let mut headers = base_headers(&meta, media_type);
    if is_unchanged(&call.request.headers, &meta) {
        return Ok((StatusCode::NOT_MODIFIED, headers).into_response());
    }
    let whole = 0..meta.size;
    let (status, range) = match requested_range(&call.request.method, &call.request.headers, &meta) {
        RequestedRange::Whole => (StatusCode::OK, whole),
        RequestedRange::Partial(range) => (StatusCode::PARTIAL_CONTENT, range),
        RequestedRange::Unsatisfiable => return Err(range_not_satisfiable(&meta)),
    };
    if status == StatusCode::PARTIAL_CONTENT {
        let content_range = format!("bytes {}-{}/{}", range.start, range.end - 1, meta.size);
        insert_header(&mut headers, header::CONTENT_RANGE, &content_range);
    }
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(range.end - range.start));
    if call.request.method == Method::HEAD || range.is_empty() {
        return Ok((status, headers).into_response());
    }
    // The headers describe this version of the object: if it has been overwritten since, the read fails.
    let options = GetOptions {
        range: Some(GetRange::Bounded(range)),
        if_match: meta.e_tag.clone(),
        ..GetOptions::default()
    };
    let read = Box::pin(async {
        let response = bucket.raw().get_opts(object, options).await;
        response.map_err(|error| StoreError::classify(object, error))
    });
    // The timeout does not cover the content, which a slow client may read for a long time.
    let content = bucket.run_with_call_timeout(object, read).await.map_err(|error| {
        tracing::warn!(error = %format_chain(&error), key = %object, "cannot read an object");
        svc_store::problem::unavailable()
    })?;
    Ok((status, headers, Body::from_stream(content.into_stream())).into_response())
}

fn base_headers(meta: &ObjectMeta, media_type: &'static str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(media_type));
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("private, no-cache"));
    if let Some(etag) = &meta.e_tag {
        insert_header(&mut headers, header::ETAG, &quote_etag(etag));
    }
    headers
}

fn insert_header(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}

fn quote_etag(etag: &str) -> String {
    if etag.ends_with('"') { etag.to_owned() } else { format!("\"{etag}\"") }
}

/// Returns whether `If-None-Match` matches this version, by weak comparison (RFC 9110, section 13.1.2).
fn is_unchanged(headers: &HeaderMap, meta: &ObjectMeta) -> bool {
    let Some(etag) = meta.e_tag.as_deref().map(quote_etag) else { return false };
    let values = headers.get_all(header::IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    let mut candidates = values.flat_map(|value| value.split(',')).map(str::trim);
    candidates.any(|candidate| candidate == "*" || candidate.strip_prefix("W/").unwrap_or(candidate) == etag)
}

/// Returns whether `If-Range`, if present, matches this version, by strong comparison (RFC 9110, section 13.1.5).
fn permits_range(headers: &HeaderMap, meta: &ObjectMeta) -> bool {
    let Some(value) = headers.get(header::IF_RANGE) else { return true };
    meta.e_tag.as_deref().is_some_and(|etag| value.as_bytes() == quote_etag(etag).as_bytes())
}

#[derive(Debug, PartialEq, Eq)]
enum RequestedRange {
    Whole,
    Partial(Range<u64>),
    Unsatisfiable,
}

/// Returns the requested range (RFC 9110, sections 13.1.5 and 14.2). A request for several ranges, or with a method
/// other than GET, receives the whole object.
fn requested_range(method: &Method, headers: &HeaderMap, meta: &ObjectMeta) -> RequestedRange {
    if method != Method::GET {
        return RequestedRange::Whole;
    }
    let Some(text) = headers.get(header::RANGE).and_then(|value| value.to_str().ok()) else {
        return RequestedRange::Whole;
    };
    if !permits_range(headers, meta) {
        return RequestedRange::Whole;
    }
    parse_range(text, meta.size)
}

fn parse_range(text: &str, size: u64) -> RequestedRange {
    let Some((first, last)) = text.strip_prefix("bytes=").and_then(|range| range.split_once('-')) else {
        return RequestedRange::Whole;
    };
    let (first, last) = (first.trim(), last.trim());
    // `u64::from_str` accepts a leading plus sign, which RFC 9110 does not allow.
    if first.starts_with('+') || last.starts_with('+') {
        return RequestedRange::Whole;
    }
    let range = match (first.parse::<u64>(), last.parse::<u64>()) {
        (Ok(first), Ok(last)) if first <= last => first..last.saturating_add(1).min(size),
        (Ok(first), Err(_)) if last.is_empty() => first..size,
        (Err(_), Ok(0)) if first.is_empty() => return RequestedRange::Unsatisfiable,
        (Err(_), Ok(suffix)) if first.is_empty() => size.saturating_sub(suffix)..size,
        _ => return RequestedRange::Whole,
    };
    if range.start < range.end { RequestedRange::Partial(range) } else { RequestedRange::Unsatisfiable }
}

fn range_not_satisfiable(meta: &ObjectMeta) -> Problem {
    Problem::new(Code::RangeNotSatisfiable, format!("The file is {} bytes long.", meta.size))
        .with("sizeBytes", meta.size.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requested_range_ignores_range_of_head_request() {
        let mut headers = HeaderMap::new();
        headers.insert(header::RANGE, HeaderValue::from_static("bytes=10-"));
        let meta = ObjectMeta {
            location: Path::from("a"),
            last_modified: std::time::SystemTime::UNIX_EPOCH.into(),
            size: 10,
            e_tag: None,
            version: None,
        };
        assert_eq!(requested_range(&Method::GET, &headers, &meta), RequestedRange::Unsatisfiable);
        assert_eq!(requested_range(&Method::HEAD, &headers, &meta), RequestedRange::Whole);
    }

    #[test]
    fn parse_range_follows_rfc_9110() {
        assert_eq!(parse_range("bytes=0-4", 10), RequestedRange::Partial(0..5));
        assert_eq!(parse_range("bytes=5-", 10), RequestedRange::Partial(5..10));
        assert_eq!(parse_range("bytes=-3", 10), RequestedRange::Partial(7..10));
        assert_eq!(parse_range("bytes=5-99", 10), RequestedRange::Partial(5..10));
        assert_eq!(parse_range("bytes=10-", 10), RequestedRange::Unsatisfiable);
        assert_eq!(parse_range("bytes=-0", 10), RequestedRange::Unsatisfiable);
        for whole in [
            "bytes=4-2",
            "bytes=0-1,3-4",
            "lines=1-2",
            "bytes=a-b",
            "bytes=-",
            "bytes=+5-",
            "bytes=0-+4",
            "bytes=-+3",
        ] {
            assert_eq!(parse_range(whole, 10), RequestedRange::Whole, "{whole}");
        }
    }
}
