//! `POST /vps/:id/storage-credentials`: a host's credentials for its slot in the object store.

use jiff::Timestamp;
use schemars::JsonSchema;
use secrecy::SecretString;
use serde::{Deserialize, Serialize};

use crate::secret;
use crate::text::Time;
use svc_base::clock;

/// The working session, the slot's location in the store, and the outage session. The request has no body.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub struct StorageCredentials {
    #[serde(flatten)]
    pub session: StoreSession,
    #[serde(flatten)]
    pub location: StoreLocation,
    /// For storing snapshots while the platform is unreachable. `null` if the platform grants no such session; older
    /// platforms omit it.
    #[serde(default)]
    pub outage: Option<StoreSession>,
}

/// Credentials for one session.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct StoreSession {
    pub access_key_id: String,
    #[serde(serialize_with = "secret::expose")]
    #[schemars(with = "String")]
    pub secret_access_key: SecretString,
    #[serde(serialize_with = "secret::expose_option")]
    #[schemars(with = "Option<String>")]
    pub session_token: Option<SecretString>,
    /// The expiry, by the platform's clock; the response's `Date` header contains that clock's time.
    #[serde(with = "clock::wire")]
    #[schemars(with = "Time")]
    pub expires_at: Timestamp,
}

/// The slot's location in the object store. A host reads the location from its user-data, and ignores these fields.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(inline)]
pub struct StoreLocation {
    pub region: String,
    /// `null` for AWS's own endpoint.
    pub endpoint: Option<String>,
    pub bucket: String,
    /// The slot's prefix, with a trailing slash.
    pub prefix: String,
}
