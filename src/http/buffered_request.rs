//! A request whose body has been read into memory, with parsers for JSON, HTML forms and the query.

use std::time::Duration;

use axum::extract::Request;
use bytes::Bytes;
use http::{HeaderMap, Method, Uri};
use serde_json::Value;

use crate::body::{BodyLimits, RequestBodyError, content_length_exceeds, has_media_type};
use crate::fields::Fields;
use crate::problem::{Code, Problem};

/// Maximum size of a [`BufferedRequest`]'s body.
const MAX_BODY_BYTES: usize = 64 << 10;
/// Limits for reading a [`BufferedRequest`]'s body, and for draining the body of a rejected request.
pub const BODY_LIMITS: BodyLimits = BodyLimits {
    read_timeout: Duration::from_secs(15),
    max_drained_bytes: 1 << 20,
    drain_timeout: Duration::from_secs(2),
};

/// A request with its whole body, of at most 64 KiB.
pub struct BufferedRequest {
    pub method: Method,
    pub uri: Uri,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl BufferedRequest {
    /// Reads the body within size and time limits.
    ///
    /// # Errors
    /// `request_too_large` if the body is larger than 64 KiB; `invalid_request` if it is incomplete or not received
    /// within the read timeout.
    pub async fn read(request: Request) -> Result<Self, Problem> {
        let (parts, mut body) = request.into_parts();
        let too_large = || {
            Problem::new(Code::RequestTooLarge, format!("The body is larger than {MAX_BODY_BYTES} bytes."))
        };
        if content_length_exceeds(&parts.headers, MAX_BODY_BYTES) {
            BODY_LIMITS.drain(body).await;
            return Err(too_large());
        }
        let body = match BODY_LIMITS.read(&mut body, MAX_BODY_BYTES).await {
            Ok(body) => body,
            Err(RequestBodyError::TooLarge) => {
                BODY_LIMITS.drain(body).await;
                return Err(too_large());
            }
            Err(RequestBodyError::Timeout) => {
                return Err(Problem::field("", "was not received within the read timeout"));
            }
            Err(RequestBodyError::Incomplete) => {
                return Err(Problem::field("", "could not be read completely"));
            }
        };
        Ok(Self { method: parts.method, uri: parts.uri, headers: parts.headers, body })
    }

    /// Returns whether the body is an HTML form.
    pub fn is_form(&self) -> bool {
        has_media_type(&self.headers, "application/x-www-form-urlencoded")
    }

    /// Parses the fields of a form body.
    ///
    /// # Errors
    /// `invalid_request` if the body is not UTF-8.
    pub fn form_fields(&self) -> Result<Fields, Problem> {
        let text = std::str::from_utf8(&self.body).map_err(|_| Problem::field("", "is not a valid form"))?;
        Ok(Fields::from_form(text))
    }

    /// Parses the fields of a JSON body.
    ///
    /// # Errors
    /// `unsupported_media_type` if the body is not declared as JSON; `invalid_request` if it is not a JSON object.
    pub fn json_fields(&self) -> Result<Fields, Problem> {
        if !has_media_type(&self.headers, "application/json") {
            return Err(Problem::new(Code::UnsupportedMediaType, "Send the body as application/json."));
        }
        match serde_json::from_slice(&self.body) {
            Ok(Value::Object(map)) => Ok(Fields::from_body(map)),
            Ok(_) => Err(Problem::field("", "must be a JSON object")),
            Err(error) => Err(Problem::field("", format!("is not valid JSON: {error}"))),
        }
    }

    /// Parses the fields of the query.
    pub fn query_fields(&self) -> Fields {
        Fields::from_query(self.uri.query().unwrap_or_default())
    }
}
