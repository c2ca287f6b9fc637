//! One heartbeat: what is sent, what is answered, and how the answer of a replaced machine is recognised.

use std::collections::BTreeMap;

use bytes::Bytes;
use http::StatusCode;
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::Settings;
use super::vitals::{self, Attention, Disk, Health, LastBackup, LastCheck};
use crate::host::system::registration;
use crate::host::system::release;
use crate::host::system::upgrade_token::Tokens;
use crate::host::update::protocol;
use crate::host::update::protocol::Outcome;
use crate::host::update::trusted_keys::TrustedKeyIds;
use crate::http::client::{self, Deadlines};
use crate::http::proof::ProofKeys;
use crate::http::request_id;
use crate::machine::epoch::Epoch;
use crate::machine::name::ImageVersion;

/// The request of `POST /vps/:id/heartbeat`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Beat {
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
    /// As the platform accepted it once: a database that was restored from an older copy may not know it. Left out before,
    /// and for a platform that refuses the field.
    #[serde(skip_serializing_if = "Option::is_none")]
    registration: Option<Box<RawValue>>,
    /// Left out where there is nothing to say, and for a platform that refuses the field.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    attention: Vec<Attention>,
    /// Left out before the updater has reported it, and for a platform that refuses the field.
    #[serde(skip_serializing_if = "Option::is_none")]
    trusted_keys: Option<TrustedKeyIds>,
}

/// Its answer. What we do not know is ignored: the platform may be newer.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Answer {
    pub desired_image_version: Option<ImageVersion>,
    /// The request that it is desired for, where there is one.
    pub desired_request_id: Option<String>,
    pub epoch: Option<Epoch>,
    pub superseded: bool,
    pub proof_keys: Option<ProofKeys>,
    /// The operation for which writers stay stopped.
    pub quiesce: Option<String>,
    /// The token to use from now on.
    pub next_token: Option<SecretString>,
    /// The token that this answer was given to.
    #[serde(skip)]
    pub accepted: Option<Accepted>,
}

/// Which of its tokens the platform accepted.
#[derive(Debug)]
pub struct Accepted {
    pub token: SecretString,
    /// The one that it refused before that.
    pub refused: Option<SecretString>,
}

/// Why the platform did not take a heartbeat.
#[derive(Debug, thiserror::Error)]
pub enum BeatError {
    #[error("send the heartbeat")]
    Transport(#[from] reqwest::Error),
    #[error("the platform answered {0} to the heartbeat")]
    Status(StatusCode),
    #[error("the platform's answer to the heartbeat is not readable")]
    Unreadable(#[from] serde_json::Error),
}

pub struct Heart<'a> {
    settings: &'a Settings,
    client: reqwest::Client,
}

impl<'a> Heart<'a> {
    /// # Errors
    /// When no client can be made.
    pub fn new(settings: &'a Settings) -> anyhow::Result<Self> {
        Ok(Self { settings, client: client::build(Deadlines::CALL)? })
    }

    /// # Errors
    /// [`BeatError`].
    pub async fn beat(&self) -> Result<Answer, BeatError> {
        let settings = self.settings;
        let (health, attention) = vitals::health(settings).await;
        let mut beat = Beat {
            image_version: image_version(settings),
            epoch: settings.epoch(),
            health,
            last_backup: vitals::last_backup(settings),
            last_update: protocol::last(&settings.layout).ok().flatten().map(|last| last.outcome),
            checks: vitals::checks(settings),
            updating: settings.layout.update_journal().exists(),
            disk: vitals::disk(settings),
            proof_kids: vitals::proof_kids(settings),
            registration: registration::accepted(&settings.layout, settings.identity.machine),
            attention,
            trusted_keys: TrustedKeyIds::read(&settings.layout),
        };
        let Tokens { current, before } = settings.platform.upgrade_token.tokens();
        let mut accepted = Accepted { token: current, refused: None };
        let (mut status, mut body) = self.send(&beat, &accepted.token).await?;
        if let (StatusCode::UNAUTHORIZED, Some(before)) = (status, before) {
            // A platform that went back to an earlier key does not know the token that it handed out since.
            accepted = Accepted { token: before, refused: Some(accepted.token) };
            (status, body) = self.send(&beat, &accepted.token).await?;
        }
        let says_more =
            beat.registration.is_some() || !beat.attention.is_empty() || beat.trusted_keys.is_some();
        if status == StatusCode::BAD_REQUEST && says_more {
            // An earlier platform refuses what it does not know; that this machine lives, it has to hear all the same.
            beat.attention.clear();
            beat.registration = None;
            beat.trusted_keys = None;
            (status, body) = self.send(&beat, &accepted.token).await?;
        }
        if status == StatusCode::FORBIDDEN && code(&body).as_deref() == Some("superseded") {
            return Ok(Answer { superseded: true, ..Answer::default() });
        }
        if !status.is_success() {
            return Err(BeatError::Status(status));
        }
        let answer: Answer = serde_json::from_slice(&body)?;
        Ok(Answer { accepted: Some(accepted), ..answer })
    }

    async fn send(&self, beat: &Beat, token: &SecretString) -> Result<(StatusCode, Bytes), BeatError> {
        let settings = self.settings;
        let url = settings.platform.url(&format!("/vps/{}/heartbeat", settings.identity.machine));
        let call = self.client.post(url).bearer_auth(token.expose_secret()).json(beat);
        let call = request_id::onward(call);
        let response = call.send().await?;
        let status = response.status();
        Ok((status, response.bytes().await?))
    }
}

/// What runs here, or what user-data asked for while nothing is unpacked.
pub fn image_version(settings: &Settings) -> ImageVersion {
    release::current(&settings.layout).unwrap_or_else(|| settings.image_version.clone())
}

/// The `code` of a problem (RFC 9457 with the contract's member).
fn code(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Problem {
        code: String,
    }
    serde_json::from_slice::<Problem>(body).ok().map(|problem| problem.code)
}
