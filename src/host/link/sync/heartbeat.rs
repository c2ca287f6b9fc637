//! One heartbeat: its request, its response, and the detection of a replaced machine.

use std::collections::BTreeMap;

use bytes::Bytes;
use http::StatusCode;
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::config::SyncConfig;
use super::vitals::{self, Attention, Disk, Health, LastBackup, LastCheck};
use crate::system::registration;
use crate::system::release;
use crate::system::upgrade_token::Tokens;
use crate::update::protocol;
use crate::update::protocol::Outcome;
use crate::update::trusted_keys::TrustedKeyIds;
use svc_http::client::{self, Deadlines};
use svc_http::proof::ProofKeys;
use svc_http::request_id;
use svc_machine::epoch::Epoch;
use svc_machine::name::ImageVersion;

/// The request of `POST /vps/:id/heartbeat`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct HeartbeatRequest {
    image_version: ImageVersion,
    epoch: Epoch,
    health: Health,
    last_backup: Option<LastBackup>,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_update: Option<Outcome>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    checks: BTreeMap<&'static str, LastCheck>,
    updating: bool,
    disk: Option<Disk>,
    proof_kids: Vec<String>,
    /// The registration that the platform accepted; a database restored from an older copy may not have it. Omitted
    /// before the registration, and for a platform that rejects the field.
    #[serde(skip_serializing_if = "Option::is_none")]
    registration: Option<Box<RawValue>>,
    /// Omitted if empty, and for a platform that rejects the field.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    attention: Vec<Attention>,
    /// Omitted before the updater has written it, and for a platform that rejects the field.
    #[serde(skip_serializing_if = "Option::is_none")]
    trusted_keys: Option<TrustedKeyIds>,
}

/// The response to a heartbeat. Unknown fields are ignored, because the platform may be newer.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HeartbeatResponse {
    pub desired_image_version: Option<ImageVersion>,
    /// The id of the update request, if any.
    pub desired_request_id: Option<String>,
    pub epoch: Option<Epoch>,
    pub superseded: bool,
    pub proof_keys: Option<ProofKeys>,
    /// The operation for which the writers stay stopped.
    pub quiesce: Option<String>,
    /// The token for later calls.
    pub next_token: Option<SecretString>,
    /// The token that the platform accepted for this heartbeat.
    #[serde(skip)]
    pub accepted: Option<AcceptedToken>,
}

/// The token that the platform accepted.
#[derive(Debug)]
pub struct AcceptedToken {
    pub token: SecretString,
    /// The token that it rejected first.
    pub refused: Option<SecretString>,
}

/// Reason for a failed heartbeat.
#[derive(Debug, thiserror::Error)]
pub enum HeartbeatError {
    #[error("send the heartbeat")]
    Transport(#[from] reqwest::Error),
    #[error("heartbeat failed: the platform answered {0}")]
    Status(StatusCode),
    #[error("cannot parse the response to the heartbeat")]
    Unreadable(#[from] serde_json::Error),
}

pub struct HeartbeatClient<'a> {
    config: &'a SyncConfig,
    client: reqwest::Client,
}

impl<'a> HeartbeatClient<'a> {
    /// # Errors
    /// If the HTTP client cannot be created.
    pub fn new(config: &'a SyncConfig) -> anyhow::Result<Self> {
        Ok(Self { config, client: client::build(Deadlines::CALL)? })
    }

    pub async fn send_heartbeat(&self) -> Result<HeartbeatResponse, HeartbeatError> {
        let config = self.config;
        let (health, attention) = vitals::health(config).await;
        let mut request = HeartbeatRequest {
            image_version: image_version(config),
            epoch: config.epoch(),
            health,
            last_backup: vitals::last_backup(config),
            last_update: protocol::last(&config.layout).ok().flatten().map(|last| last.outcome),
            checks: vitals::checks(config),
            updating: config.layout.update_journal().exists(),
            disk: vitals::disk(config),
            proof_kids: vitals::proof_kids(config),
            registration: registration::accepted(&config.layout, config.identity.machine),
            attention,
            trusted_keys: TrustedKeyIds::read(&config.layout),
        };
        let Tokens { current, before } = config.platform.upgrade_token.tokens();
        let mut accepted = AcceptedToken { token: current, refused: None };
        let (mut status, mut body) = self.send(&request, &accepted.token).await?;
        if let (StatusCode::UNAUTHORIZED, Some(before)) = (status, before) {
            // A platform restored to an earlier key does not know the token that it issued since.
            accepted = AcceptedToken { token: before, refused: Some(accepted.token) };
            (status, body) = self.send(&request, &accepted.token).await?;
        }
        let has_optional_fields =
            request.registration.is_some() || !request.attention.is_empty() || request.trusted_keys.is_some();
        if status == StatusCode::BAD_REQUEST && has_optional_fields {
            // An older platform rejects unknown fields, but must receive the heartbeat.
            request.attention.clear();
            request.registration = None;
            request.trusted_keys = None;
            (status, body) = self.send(&request, &accepted.token).await?;
        }
        if status == StatusCode::FORBIDDEN && problem_code(&body).as_deref() == Some("superseded") {
            return Ok(HeartbeatResponse { superseded: true, ..HeartbeatResponse::default() });
        }
        if !status.is_success() {
            return Err(HeartbeatError::Status(status));
        }
        let response: HeartbeatResponse = serde_json::from_slice(&body)?;
        Ok(HeartbeatResponse { accepted: Some(accepted), ..response })
    }

    async fn send(
        &self,
        request: &HeartbeatRequest,
        token: &SecretString,
    ) -> Result<(StatusCode, Bytes), HeartbeatError> {
        let config = self.config;
        let url = config.platform.url(&format!("/vps/{}/heartbeat", config.identity.machine));
        let call = self.client.post(url).bearer_auth(token.expose_secret()).json(request);
        let call = request_id::onward(call);
        let response = call.send().await?;
        let status = response.status();
        Ok((status, response.bytes().await?))
    }
}

/// The current release, or that of user-data while none is installed.
pub fn image_version(config: &SyncConfig) -> ImageVersion {
    release::current(&config.layout).unwrap_or_else(|| config.image_version.clone())
}

/// The `code` of a problem (RFC 9457 with the contract's member).
fn problem_code(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Problem {
        code: String,
    }
    serde_json::from_slice::<Problem>(body).ok().map(|problem| problem.code)
}
