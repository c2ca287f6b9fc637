//! Heartbeat client. Also detects when this machine has been replaced or deleted.

use http::StatusCode;
use secrecy::{ExposeSecret, SecretString};

use super::code_probe::CodeProbe;
use super::config::SyncConfig;
use super::vitals;
use crate::system::certificate;
use crate::system::platform_response::{ProblemBody, read_body};
use crate::system::registration;
use crate::system::release;
use crate::system::upgrade_token::Tokens;
use crate::update::trusted_keys;
use svc_http::body::ResponseBodyError;
use svc_http::client::{self, Timeouts};
use svc_http::request_id;
use svc_machine::name::ImageVersion;
use svc_wire::heartbeat::{Heartbeat, HeartbeatResponse};

/// A heartbeat response, and the token it was accepted with.
pub struct HeartbeatReply {
    pub response: HeartbeatResponse,
    /// `None` if the heartbeat was rejected because this machine has been replaced.
    pub accepted: Option<AcceptedToken>,
}

#[derive(Debug)]
pub struct AcceptedToken {
    pub token: SecretString,
    /// The token rejected before this one, if any.
    pub rejected: Option<SecretString>,
}

/// Errors from sending a heartbeat.
#[derive(Debug, thiserror::Error)]
pub enum HeartbeatError {
    #[error("cannot send heartbeat")]
    Transport(#[from] reqwest::Error),
    #[error("cannot read heartbeat response")]
    Body(#[from] ResponseBodyError),
    #[error("platform responded to heartbeat with {0}")]
    Status(StatusCode),
    #[error("malformed heartbeat response")]
    Malformed(#[from] serde_json::Error),
}

impl HeartbeatError {
    /// Whether the platform rejected this machine's token.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Status(StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN))
    }
}

pub struct HeartbeatClient<'a> {
    config: &'a SyncConfig,
    client: reqwest::Client,
    code_probe: CodeProbe,
}

impl<'a> HeartbeatClient<'a> {
    /// # Errors
    /// If the HTTP client can't be created.
    pub fn new(config: &'a SyncConfig) -> anyhow::Result<Self> {
        Ok(Self { config, client: client::build(Timeouts::CALL)?, code_probe: CodeProbe::default() })
    }

    pub async fn send_heartbeat(&self) -> Result<HeartbeatReply, HeartbeatError> {
        let config = self.config;
        let (mut health, attention) = vitals::check_health(config).await;
        health.code = self.code_probe.check(&config.layout).await.map(Into::into);
        let mut request = Heartbeat {
            image_version: current_image_version(config),
            epoch: config.epoch(),
            health,
            last_backup: vitals::read_last_backup(config),
            last_update: vitals::read_last_update(config),
            checks: vitals::read_checks(config),
            updating: config.layout.update_journal().exists(),
            disk: vitals::measure_disk(config),
            proof_kids: vitals::read_proof_kids(config),
            registration: registration::read_accepted(&config.layout, config.identity.machine),
            files: vitals::read_file_backup(config),
            attention,
            certificate: certificate::read(&config.layout),
            trusted_keys: trusted_keys::read(&config.layout),
        };
        let Tokens { current, previous } = config.platform.upgrade_token.tokens();
        let mut accepted = AcceptedToken { token: current, rejected: None };
        let (mut status, mut body) = self.send(&request, &accepted.token).await?;
        if let (StatusCode::UNAUTHORIZED, Some(previous)) = (status, previous) {
            // A platform restored with an older key doesn't recognize tokens issued with a newer one.
            accepted = AcceptedToken { token: previous, rejected: Some(accepted.token) };
            (status, body) = self.send(&request, &accepted.token).await?;
        }
        let has_optional_fields = request.registration.is_some()
            || !request.attention.is_empty()
            || request.trusted_keys.is_some()
            || request.certificate.is_some()
            || request.files.is_some();
        if status == StatusCode::BAD_REQUEST && has_optional_fields {
            // Older platforms reject unknown fields, but still need the heartbeat.
            request.attention.clear();
            request.registration = None;
            request.trusted_keys = None;
            request.certificate = None;
            request.files = None;
            (status, body) = self.send(&request, &accepted.token).await?;
        }
        if status == StatusCode::FORBIDDEN && ProblemBody::parse(&body).code == "superseded" {
            let response = HeartbeatResponse { superseded: true, ..HeartbeatResponse::default() };
            return Ok(HeartbeatReply { response, accepted: None });
        }
        if !status.is_success() {
            return Err(HeartbeatError::Status(status));
        }
        Ok(HeartbeatReply { response: serde_json::from_slice(&body)?, accepted: Some(accepted) })
    }

    async fn send(
        &self,
        request: &Heartbeat,
        token: &SecretString,
    ) -> Result<(StatusCode, Vec<u8>), HeartbeatError> {
        let config = self.config;
        let url = config.platform.url(&format!("/vps/{}/heartbeat", config.identity.machine));
        let call = self.client.post(url).bearer_auth(token.expose_secret()).json(request);
        let call = request_id::attach(call);
        let response = call.send().await?;
        let status = response.status();
        Ok((status, read_body(response).await?))
    }
}

/// Returns the current release version, or the one from user-data until a release is installed.
pub fn current_image_version(config: &SyncConfig) -> ImageVersion {
    release::current_version(&config.layout).unwrap_or_else(|| config.image_version.clone())
}
