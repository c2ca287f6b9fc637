//! `store-credentials.json`: the object store sessions last issued by the platform, for applets that start later, even
//! after a reboot.

use std::path::Path;

use jiff::{SignedDuration, Timestamp};
use object_store::aws::AwsCredential;
use serde::{Deserialize, Serialize};

use svc_base::clock;
use svc_base::fsx::{self, FileError};
use svc_machine::id::MachineId;

const FORMAT_VERSION: u32 = 1;

/// File contents. Deliberately not `Debug`: it holds secrets.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StoredSessions {
    version: u32,
    machine_id: MachineId,
    /// The working session.
    #[serde(flatten)]
    pub session: StoredSession,
    /// Time from the renewal until `session` expires.
    #[serde(rename = "lifeSeconds")]
    lifetime_seconds: i64,
    /// Renewal time by the local clock. Missing in files written by older releases.
    #[serde(default, with = "clock::wire_option", skip_serializing_if = "Option::is_none")]
    pub renewed_at: Option<Timestamp>,
    /// Session to use while the platform is unreachable; `None` if the platform didn't issue one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outage: Option<StoredSession>,
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StoredSession {
    pub access_key_id: String,
    pub secret_access_key: String,
    pub session_token: Option<String>,
    /// Expiry by the local clock.
    #[serde(with = "clock::wire")]
    pub expires_at: Timestamp,
}

impl StoredSession {
    pub fn to_aws_credential(&self) -> AwsCredential {
        AwsCredential {
            key_id: self.access_key_id.clone(),
            secret_key: self.secret_access_key.clone(),
            token: self.session_token.clone(),
        }
    }
}

impl StoredSessions {
    pub fn new(
        machine_id: MachineId,
        session: StoredSession,
        outage: Option<StoredSession>,
        renewed_at: Timestamp,
    ) -> Self {
        let lifetime_seconds = session.expires_at.duration_since(renewed_at).as_secs();
        Self {
            version: FORMAT_VERSION,
            machine_id,
            session,
            lifetime_seconds,
            renewed_at: Some(renewed_at),
            outage,
        }
    }

    /// Returns the lifetime of `session` at renewal.
    pub fn lifetime(&self) -> SignedDuration {
        SignedDuration::from_secs(self.lifetime_seconds)
    }

    /// Reads this machine's stored sessions. Returns `None` if the file is missing, unparsable, in a different format,
    /// or for another machine.
    pub fn read(file: &Path, machine: MachineId) -> Result<Option<Self>, FileError> {
        let Some(text) = fsx::read_if_exists(file)? else { return Ok(None) };
        let stored = serde_json::from_slice::<Self>(&text).ok();
        Ok(stored.filter(|stored| stored.version == FORMAT_VERSION && stored.machine_id == machine))
    }

    pub fn write(&self, file: &Path) -> Result<(), FileError> {
        let text = serde_json::to_vec(self).expect("plain fields serialize to JSON");
        fsx::write_atomic(file, &text, 0o600)
    }
}
