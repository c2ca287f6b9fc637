//! An incoming API call. Its checks run in this order: size, credential, JSON, schema, state.

use std::net::{IpAddr, SocketAddr};

use axum::extract::{ConnectInfo, Request};
use http::header;
use jiff::Timestamp;
use sha2::{Digest, Sha256};

use super::access::{self, Access, unauthorized};
use super::rejected_host_tokens;
use crate::context::Platform;
use crate::db;
use crate::db::machine_row::MachineRow;
use crate::operators::Operator;
use crate::token_rotation::TokenStatus;
use crate::tokens::{self, Purpose};
use svc_http::buffered_request::BufferedRequest;
use svc_http::fields::Fields;
use svc_http::problem::{Code, Problem};
use svc_machine::id::MachineId;

const MAX_WAIT_SECONDS: u64 = 60;

pub struct ApiCall {
    pub request: BufferedRequest,
    /// The access rule that the route declares.
    access: Access,
    /// The IP address of the connection's peer; `None` if the request did not arrive over a connection.
    client: Option<IpAddr>,
}

/// A host's accepted token and its machine.
pub struct AuthenticatedHost {
    pub machine: MachineRow,
    pub token_status: TokenStatus,
    pub token_hash: Vec<u8>,
}

impl ApiCall {
    /// Reads the body.
    ///
    /// # Errors
    /// Same as [`BufferedRequest::read`].
    pub async fn read(request: Request) -> Result<Self, Problem> {
        let access = request.extensions().get().copied().unwrap_or(Access::Open);
        let client = request.extensions().get().map(|ConnectInfo(peer): &ConnectInfo<SocketAddr>| peer.ip());
        Ok(Self { request: BufferedRequest::read(request).await?, access, client })
    }

    fn bearer(&self) -> Result<&str, Problem> {
        let value = self.request.headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
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
        access::authorize(platform, self.access, &self.request.method, token).await
    }

    /// Authenticates a host by its `UPGRADE_TOKEN`. The host's machine may have left its slot.
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
            TokenStatus::Rejected => {
                drop(session);
                platform.rate_limits.forget_accepted(token);
                rejected_host_tokens::report_rejected_token(platform, &machine, token, claim).await;
                Err(unauthorized())
            }
            token_status => {
                platform.rate_limits.record_accepted(token);
                platform.rate_limits.admit_host(machine.id)?;
                Ok(AuthenticatedHost { machine, token_status, token_hash: tokens::hash(token) })
            }
        }
    }

    /// Authenticates an operator, or the host of a slot's current machine.
    pub async fn authenticate_operator_or_host(&self, platform: &Platform) -> Result<(), Problem> {
        // `svcu_` is the prefix of hosts' upgrade tokens.
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
    pub fn parse_registration_claim(&self, platform: &Platform) -> Result<(MachineId, &str), Problem> {
        let token = self.bearer().map_err(|_| registration_rejected())?;
        platform.rate_limits.admit_unverified_token(self.client, token)?;
        let claim = tokens::parse_claim(token, Purpose::Registration);
        claim.map(|claim| (claim.machine, token)).ok_or_else(registration_rejected)
    }

    /// Parses the fields of a host's JSON body. Unknown fields are ignored, because the host's release may be newer.
    pub fn host_fields(&self) -> Result<Fields, Problem> {
        Ok(self.request.json_fields()?.ignoring_unknown())
    }

    /// Accepts an operator's request without a body or with an empty JSON object.
    pub fn ensure_empty_body(&self) -> Result<(), Problem> {
        if self.request.body.is_empty() { Ok(()) } else { self.request.json_fields()?.finish(Some(())) }
    }

    /// Accepts a host's request with or without a body, because a newer release may send one.
    pub fn validate_optional_body(&self) -> Result<(), Problem> {
        if self.request.body.is_empty() { Ok(()) } else { self.host_fields()?.finish(Some(())) }
    }

    /// Returns the SHA-256 hash of the body.
    pub fn body_hash(&self) -> Vec<u8> {
        Sha256::digest(&self.request.body).to_vec()
    }

    /// Returns N from `Prefer: wait=N` (RFC 7240), capped at `MAX_WAIT_SECONDS`.
    pub fn wait_seconds(&self) -> Option<u64> {
        let values = self.request.headers.get_all("prefer").iter().filter_map(|value| value.to_str().ok());
        let mut preferences = values.flat_map(|value| value.split(',')).map(str::trim);
        let wait = preferences.find_map(|preference| {
            let (name, seconds) = preference.split_once('=')?;
            name.trim_end().eq_ignore_ascii_case("wait").then_some(seconds)
        })?;
        let seconds = wait.trim_start().trim_matches('"').parse::<u64>().ok()?;
        Some(seconds.min(MAX_WAIT_SECONDS))
    }
}

/// Parses an id from the path. `name` identifies the id in the error.
pub fn path_id<T: std::str::FromStr>(name: &str, text: &str) -> Result<T, Problem> {
    text.parse().map_err(|_| Problem::field(name, "must be a UUID"))
}

pub fn registration_rejected() -> Problem {
    Problem::new(Code::RegistrationRejected, "The registration token is invalid or has expired.")
}
