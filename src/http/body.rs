//! Reads request and response bodies, within size and time limits.

use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures_util::StreamExt;
use http::{HeaderMap, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};

/// A server's limits for request bodies.
#[derive(Debug, Clone, Copy)]
pub struct BodyLimits {
    /// Timeout for reading a whole request body.
    pub read_timeout: Duration,
    /// Maximum number of bytes of a rejected body to read and discard: a client that is still sending when the
    /// connection closes may not receive the response.
    pub max_drained_bytes: usize,
    /// Timeout for reading and discarding a rejected body.
    pub drain_timeout: Duration,
}

/// The reason a request body was not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RequestBodyError {
    #[error("the body is too large")]
    TooLarge,
    #[error("the body was not received within the read timeout")]
    Timeout,
    #[error("the body is incomplete")]
    Incomplete,
}

impl BodyLimits {
    /// Reads a body of at most `max_bytes`. After an error, `body` holds the unread remainder.
    ///
    /// # Errors
    /// See [`RequestBodyError`].
    pub async fn read(&self, body: &mut Body, max_bytes: usize) -> Result<Bytes, RequestBodyError> {
        let collecting = Limited::new(body, max_bytes).collect();
        match tokio::time::timeout(self.read_timeout, collecting).await {
            Ok(Ok(whole)) => Ok(whole.to_bytes()),
            Ok(Err(error)) if error.is::<LengthLimitError>() => Err(RequestBodyError::TooLarge),
            Ok(Err(_)) => Err(RequestBodyError::Incomplete),
            Err(_) => Err(RequestBodyError::Timeout),
        }
    }

    /// Reads and discards the rest of a rejected body, within the limits.
    pub async fn drain(&self, body: Body) {
        let mut chunks = body.into_data_stream();
        let draining = async {
            let mut drained = 0;
            while let Some(Ok(chunk)) = chunks.next().await {
                drained += chunk.len();
                if drained > self.max_drained_bytes {
                    break;
                }
            }
        };
        // A client that is still sending when a limit is reached may not receive the response.
        let _ = tokio::time::timeout(self.drain_timeout, draining).await;
    }
}

/// Returns whether the Content-Type names this media type, regardless of case and parameters.
pub fn has_media_type(headers: &HeaderMap, media_type: &str) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let declared = content_type.and_then(|value| value.split(';').next());
    declared.is_some_and(|declared| declared.trim().eq_ignore_ascii_case(media_type))
}

/// Returns whether a request's Content-Length is more than `max_bytes`. A body without a declared length is limited
/// while it is read.
pub fn content_length_exceeds(headers: &HeaderMap, max_bytes: usize) -> bool {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok());
    let length: Option<u64> = length.and_then(|text| text.parse().ok());
    length.is_some_and(|length| length > max_bytes as u64)
}

/// The reason a response body was not read to its end.
#[derive(Debug, thiserror::Error)]
pub enum ResponseBodyError {
    #[error("the response is larger than {0} bytes")]
    TooLarge(usize),
    #[error(transparent)]
    Http(#[from] reqwest::Error),
}

/// Appends the rest of a response to `body`, up to a total of `max_bytes`.
///
/// # Errors
/// See [`ResponseBodyError`]; `body` holds what was appended before the error.
pub async fn read_response(
    response: &mut reqwest::Response,
    max_bytes: usize,
    body: &mut Vec<u8>,
) -> Result<(), ResponseBodyError> {
    while let Some(chunk) = response.chunk().await? {
        if body.len() + chunk.len() > max_bytes {
            return Err(ResponseBodyError::TooLarge(max_bytes));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use futures_util::stream;

    use super::*;

    const LIMITS: BodyLimits = BodyLimits {
        read_timeout: Duration::from_millis(50),
        max_drained_bytes: 8,
        drain_timeout: Duration::from_millis(50),
    };

    fn chunks(parts: &'static [&'static str]) -> Body {
        Body::from_stream(stream::iter(parts.iter().map(|part| Ok::<_, std::io::Error>(*part))))
    }

    #[tokio::test]
    async fn read_limits_size_and_time() {
        assert_eq!(LIMITS.read(&mut chunks(&["ab", "cd"]), 4).await.unwrap(), "abcd");
        assert_eq!(LIMITS.read(&mut chunks(&["ab", "cde"]), 4).await, Err(RequestBodyError::TooLarge));
        let mut silent = Body::from_stream(stream::pending::<Result<Bytes, std::io::Error>>());
        assert_eq!(LIMITS.read(&mut silent, 4).await, Err(RequestBodyError::Timeout));
        let broken = stream::iter([Ok("ab"), Err(std::io::Error::other("closed"))]);
        assert_eq!(LIMITS.read(&mut Body::from_stream(broken), 4).await, Err(RequestBodyError::Incomplete));
    }

    #[tokio::test]
    async fn drain_stops_at_each_limit() {
        LIMITS.drain(Body::from_stream(stream::repeat_with(|| Ok::<_, std::io::Error>("abc")))).await;
        let start = tokio::time::Instant::now();
        LIMITS.drain(Body::from_stream(stream::pending::<Result<Bytes, std::io::Error>>())).await;
        assert!(start.elapsed() >= LIMITS.drain_timeout);
    }

    #[test]
    fn content_length_exceeds_compares_declared_length() {
        let declared = |text: &str| {
            let headers = HeaderMap::from_iter([(header::CONTENT_LENGTH, text.parse().unwrap())]);
            content_length_exceeds(&headers, 4)
        };
        assert!(!declared("4") && declared("5") && !declared("x"));
        assert!(!content_length_exceeds(&HeaderMap::new(), 4));
    }
}
