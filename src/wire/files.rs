//! A slot's file backups: their key, pruning and status, earlier versions of files, and restores.

use std::fmt;

use schemars::JsonSchema;
use secrecy::SecretString;
use serde::{Deserialize, Serialize};

use crate::secret;
use crate::text::{Time, WireString};
use svc_base::quantity::{format_bytes, pluralize};
use svc_machine::name::{IdpUserId, Slot};

/// The body of `POST /vps/:id/files-key`, as a host sends it.
#[derive(Debug, Clone, Serialize)]
pub struct FilesKeyRequest {
    /// The key that the host already has. The platform stores this key if it has none for the slot.
    #[serde(serialize_with = "secret::expose_option", skip_serializing_if = "Option::is_none")]
    pub key: Option<SecretString>,
}

/// The key of a slot's file backups.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub struct FilesKey {
    /// 43 characters of base64url: the password of the repository, for `restic`.
    #[serde(serialize_with = "secret::expose")]
    #[schemars(with = "String")]
    pub key: SecretString,
}

/// The expected effect of pruning a slot's file backups.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(inline)]
pub struct FilesPrunePlan {
    pub kept_snapshots: u64,
    pub removed_snapshots: u64,
    /// Number of packs that would be marked for deletion, including those that would be rewritten.
    pub marked_packs: u64,
    /// Unused bytes in the packs that this prune or a later one would mark.
    pub reclaimable_bytes: u64,
    /// Number of packs that would be deleted, because their grace period has ended or no index lists them.
    pub deleted_packs: u64,
}

/// The storage that a slot's file backups use, and the result of their last prune.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(inline)]
pub struct FilesUsage {
    pub snapshots: u64,
    pub oldest_snapshot_at: Option<Time>,
    pub newest_snapshot_at: Option<Time>,
    /// Number of packs, which contain the files and directories of all snapshots.
    pub packs: u64,
    pub pack_bytes: u64,
    pub total_bytes: u64,
    /// When the last prune started or, if it failed, ended. `null` before the first prune, and while a requested one
    /// has not started.
    pub pruned_at: Option<Time>,
    /// Why the last prune failed.
    pub prune_error: Option<String>,
}

/// An accepted request to prune a slot's file backups.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(inline)]
pub struct FilesPruneAccepted {
    pub idp_user_id: WireString<IdpUserId>,
    pub slot: WireString<Slot>,
}

/// The key of a slot's file backups and the location of their repository, for an operator.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct FilesAccess {
    #[serde(default)]
    pub idp_user_id: WireString<IdpUserId>,
    #[serde(default)]
    pub slot: WireString<Slot>,
    #[serde(flatten)]
    pub key: FilesKey,
    /// The repository's location, in the format that `restic` expects.
    pub repository: String,
}

/// The state of a machine's file backup: saved and excluded files, and the results of its checks.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(inline)]
pub struct FileBackupStatus {
    /// Everything that was written before this time is saved. `null` until the first save.
    pub saved_until: Option<Time>,
    /// When the oldest unsaved change was detected; `null` if there is none.
    pub changed_since: Option<Time>,
    /// Estimated number of unsaved bytes; `null` if there are none, or if the number is unknown.
    pub pending_bytes: Option<u64>,
    /// Why the last save failed.
    pub error: Option<String>,
    /// The number of files, and their total size, when the whole home directory was last saved.
    pub files: u64,
    pub bytes: u64,
    /// Number of entries that the last save could not read, and the first of them.
    pub unreadable: u64,
    pub first_unreadable: Option<String>,
    /// Number of files that the last save could not read consistently, because they changed during every attempt.
    pub unstable: u64,
    /// Invalid lines in `.svcignore`, which exclude nothing.
    pub invalid_rules: Vec<String>,
    /// `null` until it has been measured.
    pub excluded: Option<ExcludedFiles>,
    /// When part of the backup was last verified.
    pub verified_at: Option<Time>,
    /// When a sample was last restored and compared with the current files.
    pub drilled_at: Option<Time>,
    /// The most serious known problem, such as a latest snapshot that cannot be restored completely, damaged packs and
    /// the files that need them, a failed or differing sample, or a key that the platform does not have; `null` if
    /// there is none.
    pub damage: Option<String>,
}

/// The files and directories that a backup excludes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(inline)]
pub struct ExcludedFiles {
    pub measured_at: Time,
    /// The number of entries, including everything in excluded directories, and the total size of the files.
    pub entries: u64,
    pub bytes: u64,
    /// Whether everything was counted: a measurement stops after a million entries, and skips unreadable ones.
    pub complete: bool,
    /// The largest excluded files and directories, largest first.
    pub largest: Vec<ExcludedFile>,
}

/// An excluded file or directory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(inline)]
pub struct ExcludedFile {
    pub path: String,
    /// The number of entries, including everything in an excluded directory.
    pub entries: u64,
    pub bytes: u64,
}

impl fmt::Display for ExcludedFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.complete {
            f.write_str("at least ")?;
        }
        write!(f, "{}, {}", pluralize(self.entries, "item"), format_bytes(self.bytes))
    }
}

impl fmt::Display for ExcludedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, entries, bytes } = self;
        write!(f, "{path}: {}, {}", pluralize(*entries, "item"), format_bytes(*bytes))
    }
}

/// Maximum number of characters in a path.
pub const MAX_PATH_CHARS: usize = 4096;
/// Default and maximum number of versions in a page.
pub const DEFAULT_VERSIONS: usize = 50;
pub const MAX_VERSIONS: usize = 500;
/// Default and maximum number of directory entries in a page.
pub const DEFAULT_ENTRIES: usize = 1000;
pub const MAX_ENTRIES: usize = 10_000;

/// A kind of directory entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, strum::Display)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
#[schemars(inline)]
pub enum FileKind {
    File,
    Directory,
    #[serde(rename = "link")]
    #[strum(serialize = "link")]
    Symlink,
    /// A device, FIFO or socket, which only other programs save.
    Special,
    /// A kind from a newer host that this release does not know.
    #[serde(other)]
    Unknown,
}

/// A file or directory as it was saved.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct FileEntry {
    /// Empty for the home directory itself. Bytes that are not UTF-8 are replaced.
    pub name: String,
    pub kind: FileKind,
    /// The number of bytes in a file; 0 for other kinds.
    #[serde(default)]
    pub size_bytes: u64,
    /// The Unix mode, in octal.
    #[serde(default)]
    pub mode: String,
    #[serde(default)]
    pub modified_at: Time,
    /// The target of a symbolic link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub target: Option<String>,
}

/// The state of a file or directory between two points in time.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct FileVersion {
    /// The times of the first and the last snapshot with this state.
    #[serde(default)]
    pub first_saved_at: Time,
    #[serde(default)]
    pub last_saved_at: Time,
    /// The last snapshot with this state.
    #[serde(default)]
    pub snapshot: String,
    /// `null` if there was no such entry.
    pub entry: Option<FileEntry>,
}

/// A page of versions, newest first.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct FileVersions {
    pub path: String,
    pub versions: Vec<FileVersion>,
    /// The `before` parameter for the next page, which may begin with an earlier part of the last version on this page.
    pub next_before: Option<Time>,
    /// Number of snapshots that could not be searched, because they are damaged.
    #[serde(default)]
    pub damaged_snapshots: u64,
}

/// A file or directory at a point in time.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct FileListing {
    pub path: String,
    #[serde(default)]
    pub snapshot: String,
    /// When the snapshot was taken.
    #[serde(default)]
    pub saved_at: Time,
    pub entry: FileEntry,
    /// The entries of a directory, by name.
    pub entries: Vec<FileEntry>,
    /// The `cursor` parameter for the next page. Set `time` to `savedAt` to get it from the same snapshot.
    pub next_cursor: Option<u64>,
}

/// The state of a restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, strum::Display)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
#[schemars(inline)]
pub enum FileRestoreStatus {
    Pending,
    Running,
    Done,
    Failed,
    /// A state from a newer host that this release does not know.
    #[serde(other)]
    Unknown,
}

impl FileRestoreStatus {
    pub fn has_ended(self) -> bool {
        matches!(self, Self::Done | Self::Failed)
    }
}

/// A host's response with its current or last restore.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FileRestoreResponse {
    /// The current restore, or else the last one; `None` if there was none.
    pub restore: Option<FileRestore>,
}

/// A restore of a file or directory into the home directory on a running machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct FileRestore {
    pub request_id: String,
    pub status: FileRestoreStatus,
    pub path: String,
    #[serde(default)]
    pub requested_at: Time,
    /// When the restored snapshot was taken.
    pub saved_at: Option<Time>,
    /// The path of the restored entry.
    pub restored_to: Option<String>,
    /// The new path of the entry that the restore replaced; `null` if it replaced none.
    pub kept_as: Option<String>,
    #[serde(default)]
    pub files: u64,
    #[serde(default)]
    pub total_bytes: u64,
    #[serde(default)]
    pub written_bytes: u64,
    /// Number of entries whose owner, mode, times or attributes could not be set.
    #[serde(default)]
    pub incomplete: u64,
    /// Why the restore failed or, if it is done, which damaged entries it left out.
    pub error: Option<String>,
    #[serde(default)]
    pub updated_at: Time,
}

/// An accepted request for a restore.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct FileRestoreAccepted {
    pub request_id: String,
    #[serde(default)]
    pub requested_at: Time,
}
