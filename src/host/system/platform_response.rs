//! Reads platform responses: their bodies, which are small, and their dates.

use http::{HeaderMap, header};
use jiff::Timestamp;
use serde::Deserialize;

use svc_http::body::{ResponseBodyError, read_response};

/// Maximum response body size, well above the largest response: a heartbeat response with many proof keys.
pub const MAX_RESPONSE_BYTES: usize = 256 << 10;

/// Reads a response body.
///
/// # Errors
/// If the body is longer than [`MAX_RESPONSE_BYTES`], or is incomplete.
pub async fn read_body(mut response: reqwest::Response) -> Result<Vec<u8>, ResponseBodyError> {
    let mut body = Vec::new();
    read_response(&mut response, MAX_RESPONSE_BYTES, &mut body).await?;
    Ok(body)
}

/// Returns the time of a response by the sender's clock (`Date`).
pub fn response_date(headers: &HeaderMap) -> Option<Timestamp> {
    let text = headers.get(header::DATE)?.to_str().ok()?;
    Some(jiff::fmt::rfc2822::parse(text).ok()?.timestamp())
}

/// Problem members (RFC 9457) used by hosts; empty if absent from the body.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ProblemBody {
    pub code: String,
    pub detail: String,
}

impl ProblemBody {
    pub fn parse(body: &[u8]) -> Self {
        serde_json::from_slice(body).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response(bytes: usize) -> reqwest::Response {
        http::Response::new(vec![b'x'; bytes]).into()
    }

    #[tokio::test]
    async fn read_body_rejects_body_over_limit() {
        assert_eq!(read_body(response(MAX_RESPONSE_BYTES)).await.unwrap().len(), MAX_RESPONSE_BYTES);
        let error = read_body(response(MAX_RESPONSE_BYTES + 1)).await.unwrap_err();
        assert_eq!(error.to_string(), "the response is larger than 262144 bytes");
    }

    #[test]
    fn parse_accepts_any_body() {
        let problem = ProblemBody::parse(br#"{"code":"superseded","status":403}"#);
        assert_eq!((problem.code.as_str(), problem.detail.as_str()), ("superseded", ""));
        assert_eq!(ProblemBody::parse(b"<html>").code, "");
    }
}
