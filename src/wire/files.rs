//! The key of a slot's file backups.

use schemars::JsonSchema;
use secrecy::SecretString;
use serde::{Deserialize, Serialize};

use crate::secret;
use crate::text::Text;
use svc_machine::name::{IdpUserId, Slot};

/// The body of `POST /vps/:id/files-key`, as a host sends it.
#[derive(Debug, Clone, Serialize)]
pub struct FilesKeyRequest {
    /// The key that the host has; the platform stores it if it has none.
    #[serde(serialize_with = "secret::expose_option", skip_serializing_if = "Option::is_none")]
    pub key: Option<SecretString>,
}

/// The slot's key.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub struct FilesKey {
    /// 43 characters of base64url: the password of the repository, for `restic`.
    #[serde(serialize_with = "secret::expose")]
    #[schemars(with = "String")]
    pub key: SecretString,
}

/// What a pruning of a slot's file backups would do.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(inline)]
pub struct FilesPrunePlan {
    pub kept_snapshots: u64,
    pub removed_snapshots: u64,
    /// Packs that would be marked for deletion, and the bytes that this would free after the grace period.
    pub marked_packs: u64,
    pub reclaimable_bytes: u64,
    /// Packs whose grace period has ended.
    pub deleted_packs: u64,
}

/// A pruning was requested.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(inline)]
pub struct FilesPruneRequest {
    pub idp_user_id: Text<IdpUserId>,
    pub slot: Text<Slot>,
}

/// The slot's key and the location of its repository, for an operator.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct FilesAccess {
    #[serde(default)]
    pub idp_user_id: Text<IdpUserId>,
    #[serde(default)]
    pub slot: Text<Slot>,
    #[serde(flatten)]
    pub key: FilesKey,
    /// The repository's location, as `restic` takes it.
    pub repository: String,
}
