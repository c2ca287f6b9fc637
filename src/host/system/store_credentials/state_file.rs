//! `store-credentials.json`: the sessions that the platform gave last, for the next applet and the next boot.

use std::path::Path;

use jiff::{SignedDuration, Timestamp};
use object_store::aws::AwsCredential;
use serde::{Deserialize, Serialize};

use crate::clock;
use crate::fsx::{self, FileError};
use crate::machine::id::MachineId;

const FORMAT: u32 = 1;

/// The file's content. It holds secrets and has no Debug.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KeptSessions {
    version: u32,
    machine_id: MachineId,
    /// The session that the host works with.
    #[serde(flatten)]
    pub session: KeptSession,
    life_seconds: i64,
    /// When the platform gave them, by this machine's clock. Not known to an earlier release.
    #[serde(default, with = "clock::wire_option", skip_serializing_if = "Option::is_none")]
    pub renewed_at: Option<Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outage: Option<KeptSession>,
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KeptSession {
    pub access_key_id: String,
    pub secret_access_key: String,
    pub session_token: Option<String>,
    /// By this machine's clock.
    #[serde(with = "clock::wire")]
    pub expires_at: Timestamp,
}

impl KeptSession {
    pub fn signing(&self) -> AwsCredential {
        AwsCredential {
            key_id: self.access_key_id.clone(),
            secret_key: self.secret_access_key.clone(),
            token: self.session_token.clone(),
        }
    }
}

impl KeptSessions {
    pub fn new(
        machine_id: MachineId,
        session: KeptSession,
        outage: Option<KeptSession>,
        renewed_at: Timestamp,
    ) -> Self {
        let life_seconds = session.expires_at.duration_since(renewed_at).as_secs();
        Self { version: FORMAT, machine_id, session, life_seconds, renewed_at: Some(renewed_at), outage }
    }

    pub fn life(&self) -> SignedDuration {
        SignedDuration::from_secs(self.life_seconds)
    }

    /// What is kept for this machine; a file of another format or machine is none.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn read(file: &Path, machine: MachineId) -> Result<Option<Self>, FileError> {
        let Some(text) = fsx::read_if_there(file)? else { return Ok(None) };
        let kept = serde_json::from_slice::<Self>(&text).ok();
        Ok(kept.filter(|kept| kept.version == FORMAT && kept.machine_id == machine))
    }

    /// # Errors
    /// [`FileError`].
    pub fn write(&self, file: &Path) -> Result<(), FileError> {
        let text = serde_json::to_vec(self).expect("plain fields are JSON");
        fsx::write_atomic(file, &text, 0o600)
    }
}
