//! An incoming API call. Its checks run in this order: size, credential, JSON, schema, state.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use axum::extract::{ConnectInfo, Request};
use bytes::Bytes;
use http::{HeaderMap, Method, Uri, header};
use jiff::Timestamp;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::access::{self, Access, unauthorized};
use super::refused_hosts;
use crate::context::Platform;
use crate::db;
use crate::db::machine_row::MachineRow;
use crate::operators::Operator;
use crate::token_rotation::TokenStatus;
use crate::tokens::{self, Purpose};
use svc_http::body::{BodyLimits, RequestBodyError, declares_more_than};
use svc_http::fields::Fields;
use svc_http::problem::{Code, Problem};
use svc_machine::id::MachineId;

/// Maximum body size of the platform's API.
pub const MAX_BODY_BYTES: usize = 64 << 10;
pub const BODY_LIMITS: BodyLimits = BodyLimits {
    read_timeout: Duration::from_secs(15),
    max_drained_bytes: 1 << 20,
    drain_timeout: Duration::from_secs(2),
};
const MAX_WAIT_SECONDS: u64 = 60;

pub struct ApiCall {
    pub method: Method,
    pub uri: Uri,
    pub headers: HeaderMap,
    /// The access that the route declares.
    access: Access,
    /// The address of the connection's peer; `None` in a request without a connection.
    client: Option<IpAddr>,
    body: Bytes,
}

/// A host's accepted token and its machine.
pub struct AuthenticatedHost {
    pub machine: MachineRow,
    pub status: TokenStatus,
    /// The hash of the token.
    pub hash: Vec<u8>,
}

impl ApiCall {
    /// Reads the body within size and time limits.
    ///
    /// # Errors
    /// `request_too_large` if the body is larger than [`MAX_BODY_BYTES`]; `invalid_request` if it is not received
    /// completely in time.
    pub async fn read(request: Request) -> Result<Self, Problem> {
        let (parts, mut body) = request.into_parts();
        let too_large = || {
            Problem::new(Code::RequestTooLarge, format!("The body is larger than {MAX_BODY_BYTES} bytes."))
        };
        if declares_more_than(&parts.headers, MAX_BODY_BYTES) {
            BODY_LIMITS.drain(body).await;
            return Err(too_large());
        }
        let body = match BODY_LIMITS.read(&mut body, MAX_BODY_BYTES).await {
            Ok(body) => body,
            Err(RequestBodyError::TooLarge) => {
                BODY_LIMITS.drain(body).await;
                return Err(too_large());
            }
            Err(RequestBodyError::Timeout | RequestBodyError::Incomplete) => {
                return Err(Problem::field("", "was not received completely in time"));
            }
        };
        let access = parts.extensions.get().copied().unwrap_or(Access::Open);
        let client = parts.extensions.get().map(|ConnectInfo(peer): &ConnectInfo<SocketAddr>| peer.ip());
        Ok(Self { method: parts.method, uri: parts.uri, headers: parts.headers, access, client, body })
    }

    fn bearer(&self) -> Result<&str, Problem> {
        let value = self.headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let (scheme, token) = value.and_then(|value| value.split_once(' ')).ok_or_else(unauthorized)?;
        if scheme.eq_ignore_ascii_case("bearer") { Ok(token.trim()) } else { Err(unauthorized()) }
    }

    /// Returns the bearer token, unless the client's address has exceeded its rate limit for token checks.
    fn rate_limited_bearer(&self, platform: &Platform) -> Result<&str, Problem> {
        let token = self.bearer()?;
        platform.rate_limits.admit_unverified_token(self.client, token)?;
        Ok(token)
    }

    /// Authenticates the operator and checks the route's scopes.
    ///
    /// # Errors
    /// `unauthorized` if there is no bearer token; `rate_limited` if the client's address has exceeded its rate limit
    /// for token checks; otherwise, same as [`access::authorize`].
    pub async fn authenticate_operator(&self, platform: &Platform) -> Result<Operator, Problem> {
        let token = self.rate_limited_bearer(platform)?;
        access::authorize(platform, self.access, &self.method, token).await
    }

    /// Authenticates a host by its `UPGRADE_TOKEN`. Its machine may have left its slot.
    pub async fn authenticate_host(&self, platform: &Platform) -> Result<MachineRow, Problem> {
        Ok(self.authenticate_host_token(platform).await?.machine)
    }

    /// Like [`Self::authenticate_host`], but also returns the token's status.
    pub async fn authenticate_host_token(&self, platform: &Platform) -> Result<AuthenticatedHost, Problem> {
        let token = self.rate_limited_bearer(platform)?;
        let claim = tokens::parse_claim(token, Purpose::Upgrade).ok_or_else(unauthorized)?;
        let session = platform.host_db.session().await?;
        let machine = db::machines::get(&session, claim.machine).await?.ok_or_else(unauthorized)?;
        match machine.upgrade_token.check_token(token, claim, &platform.mint, Timestamp::now()) {
            TokenStatus::Refused => {
                drop(session);
                refused_hosts::report_rejected_token(platform, &machine, token, claim).await;
                Err(unauthorized())
            }
            status => {
                platform.rate_limits.record_accepted(token);
                platform.rate_limits.admit_host(machine.id)?;
                Ok(AuthenticatedHost { machine, status, hash: tokens::hash(token) })
            }
        }
    }

    /// Authenticates an operator, or the host of a slot's current machine.
    pub async fn authenticate_operator_or_host(&self, platform: &Platform) -> Result<(), Problem> {
        // The prefix of hosts' upgrade tokens.
        if !self.bearer()?.starts_with("svcu_") {
            return self.authenticate_operator(platform).await.map(drop);
        }
        let machine = self.authenticate_host(platform).await?;
        if machine.deleted_at.is_some() {
            return Err(unauthorized());
        }
        if machine.retired_at.is_some() {
            return Err(Problem::new(Code::Superseded, "Another machine has replaced this one."));
        }
        Ok(())
    }

    /// Returns the machine that a registration token claims, and the token, which has not been verified yet.
    pub fn claimed_registration(&self, platform: &Platform) -> Result<(MachineId, &str), Problem> {
        let token = self.bearer().map_err(|_| registration_rejected())?;
        platform.rate_limits.admit_unverified_token(self.client, token)?;
        let claim = tokens::parse_claim(token, Purpose::Registration);
        claim.map(|claim| (claim.machine, token)).ok_or_else(registration_rejected)
    }

    fn media_type(&self) -> &str {
        let content_type = self.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        content_type.and_then(|value| value.split(';').next()).map(str::trim).unwrap_or_default()
    }

    /// Returns whether the body is an HTML form.
    pub fn is_form(&self) -> bool {
        self.media_type().eq_ignore_ascii_case("application/x-www-form-urlencoded")
    }

    /// Parses the fields of a form body.
    pub fn form_fields(&self) -> Result<Fields, Problem> {
        let text = std::str::from_utf8(&self.body).map_err(|_| Problem::field("", "is not a valid form"))?;
        Ok(Fields::from_form(text))
    }

    /// Parses the fields of a JSON body.
    pub fn json_fields(&self) -> Result<Fields, Problem> {
        if !self.media_type().eq_ignore_ascii_case("application/json") {
            return Err(Problem::new(Code::UnsupportedMediaType, "Send the body as application/json."));
        }
        match serde_json::from_slice(&self.body) {
            Ok(Value::Object(map)) => Ok(Fields::from_body(map)),
            Ok(_) => Err(Problem::field("", "must be a JSON object")),
            Err(error) => Err(Problem::field("", format!("is not valid JSON: {error}"))),
        }
    }

    /// Parses the fields of a host's JSON body. Unknown fields are ignored, because the host's release may be newer.
    pub fn host_fields(&self) -> Result<Fields, Problem> {
        Ok(self.json_fields()?.ignoring_unknown())
    }

    /// Accepts an operator's request without a body or with an empty JSON object.
    pub fn ensure_no_body(&self) -> Result<(), Problem> {
        if self.body.is_empty() { Ok(()) } else { self.json_fields()?.finish(Some(())) }
    }

    /// Accepts a host's request with or without a body, because a newer release may send one.
    pub fn validate_optional_body(&self) -> Result<(), Problem> {
        if self.body.is_empty() { Ok(()) } else { self.host_fields()?.finish(Some(())) }
    }

    pub fn query_fields(&self) -> Fields {
        Fields::from_query(self.uri.query().unwrap_or_default())
    }

    /// Returns the SHA-256 hash of the body.
    pub fn body_hash(&self) -> Vec<u8> {
        Sha256::digest(&self.body).to_vec()
    }

    /// Returns N from `Prefer: wait=N` (RFC 7240), capped at `MAX_WAIT_SECONDS`.
    pub fn wait_seconds(&self) -> Option<u64> {
        let values = self.headers.get_all("prefer").iter().filter_map(|value| value.to_str().ok());
        let mut preferences = values.flat_map(|value| value.split(',')).map(str::trim);
        let wait = preferences.find_map(|preference| {
            let (name, seconds) = preference.split_once('=')?;
            name.trim_end().eq_ignore_ascii_case("wait").then_some(seconds)
        })?;
        let seconds = wait.trim_start().trim_matches('"').parse::<u64>().ok()?;
        Some(seconds.min(MAX_WAIT_SECONDS))
    }
}

/// Parses an id from the path. `name` identifies it in the error.
pub fn path_id<T: std::str::FromStr>(name: &str, text: &str) -> Result<T, Problem> {
    text.parse().map_err(|_| Problem::field(name, "must be a UUID"))
}

pub fn registration_rejected() -> Problem {
    Problem::new(Code::RegistrationRejected, "The registration token is invalid or has expired.")
}
