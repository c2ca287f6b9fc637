//! Conditional headers for reads and writes.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::HeaderMap;
use s3s::dto::{ETagCondition, IfMatch, IfModifiedSince, IfNoneMatch, IfUnmodifiedSince, Timestamp};
use s3s::{S3Result, s3_error};

use super::store::Object;

/// `If-Match` and `If-None-Match` for a write.
#[derive(Clone, Debug, Default)]
pub(super) struct WriteCondition {
    pub(super) if_match: Option<ETagCondition>,
    pub(super) if_none_match: Option<ETagCondition>,
}

impl WriteCondition {
    /// Parses the headers of a `CopyObject` request, for which s3s does not parse them.
    pub(super) fn from_headers(headers: &HeaderMap) -> S3Result<Self> {
        let parse = |name: &str| {
            let value = headers.get(name).map(|value| ETagCondition::parse_http_header(value.as_bytes()));
            value.transpose().map_err(|error| s3_error!(InvalidArgument, "{name}: {error}"))
        };
        Ok(Self { if_match: parse("if-match")?, if_none_match: parse("if-none-match")? })
    }

    /// Checks the object that the write would replace. As in R2 and RFC 9110, `If-Match` on a missing object is a 412.
    pub(super) fn check(&self, current: Option<&Arc<Object>>) -> S3Result<()> {
        let matches = |condition: &ETagCondition| {
            current.is_some_and(|object| condition.as_etag().is_none_or(|etag| etag.strong_cmp(&object.etag)))
        };
        if self.if_match.as_ref().is_some_and(|c| !matches(c)) {
            return Err(s3_error!(PreconditionFailed, "the object does not match If-Match"));
        }
        if self.if_none_match.as_ref().is_some_and(matches) {
            return Err(s3_error!(PreconditionFailed, "the object matches If-None-Match"));
        }
        Ok(())
    }
}

/// The conditional headers for a read, which are checked in RFC 9110's order of precedence.
pub(super) struct ReadCondition {
    pub(super) if_match: Option<IfMatch>,
    pub(super) if_none_match: Option<IfNoneMatch>,
    pub(super) if_modified_since: Option<IfModifiedSince>,
    pub(super) if_unmodified_since: Option<IfUnmodifiedSince>,
}

impl ReadCondition {
    pub(super) fn check(&self, object: &Object) -> S3Result<()> {
        // Headers have one-second resolution.
        let since_epoch = object.modified.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let modified = &Timestamp::from(SystemTime::UNIX_EPOCH + Duration::from_secs(since_epoch.as_secs()));
        match (&self.if_match, &self.if_unmodified_since) {
            (Some(condition), _)
                if condition.as_etag().is_some_and(|etag| !etag.strong_cmp(&object.etag)) =>
            {
                return Err(s3_error!(PreconditionFailed));
            }
            (None, Some(since)) if modified > since => return Err(s3_error!(PreconditionFailed)),
            _ => {}
        }
        match (&self.if_none_match, &self.if_modified_since) {
            (Some(condition), _) if condition.as_etag().is_none_or(|etag| etag.weak_cmp(&object.etag)) => {
                Err(s3_error!(NotModified))
            }
            (None, Some(since)) if modified <= since => Err(s3_error!(NotModified)),
            _ => Ok(()),
        }
    }
}

/// Extracts the conditions from a `GetObject` or `HeadObject` input.
macro_rules! read_condition {
    ($input:expr) => {
        $crate::s3::condition::ReadCondition {
            if_match: $input.if_match,
            if_none_match: $input.if_none_match,
            if_modified_since: $input.if_modified_since,
            if_unmodified_since: $input.if_unmodified_since,
        }
    };
}

pub(super) use read_condition;
