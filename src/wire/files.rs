//! A slot's file backups: their key, their pruning, and earlier states of files.

use schemars::JsonSchema;
use secrecy::SecretString;
use serde::{Deserialize, Serialize};

use crate::secret;
use crate::text::{Text, Time};
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

/// What a slot's file backups take in the store, and the result of their last pruning.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(inline)]
pub struct FilesUsage {
    pub snapshots: u64,
    pub oldest_snapshot_at: Option<Time>,
    pub newest_snapshot_at: Option<Time>,
    /// Packs have the content and the directories of all snapshots.
    pub packs: u64,
    pub pack_bytes: u64,
    pub total_bytes: u64,
    /// `null` before the first pruning, and while one is requested.
    pub pruned_at: Option<Time>,
    /// Why the last pruning failed.
    pub prune_error: Option<String>,
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

/// What the backup of a machine's files has saved, what it leaves out, and what its checks have found.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(inline)]
pub struct FileBackupStatus {
    /// Everything that was written before this time is saved. `null` until the first save.
    pub saved_until: Option<Time>,
    /// When the first change was seen that is not saved yet; `null` if there is none.
    pub changed_since: Option<Time>,
    /// An estimate of the bytes that are not saved yet; `null` if there are none, or if it is not known.
    pub pending_bytes: Option<u64>,
    /// Why the last save failed.
    pub error: Option<String>,
    /// The number of files, and their sizes together, when the whole home was last saved.
    pub files: u64,
    pub bytes: u64,
    /// Entries that the last save could not read, and the first of them.
    pub unreadable: u64,
    pub first_unreadable: Option<String>,
    /// Files of the last save that changed whenever they were read.
    pub unstable: u64,
    /// Lines of `.svcignore` that are invalid, so that they exclude nothing.
    pub invalid_rules: Vec<String>,
    /// `null` until it has been measured.
    pub excluded: Option<ExcludedFiles>,
    /// When a share of the backup was last read again.
    pub verified_at: Option<Time>,
    /// When a sample was last restored and compared with the present files.
    pub drilled_at: Option<Time>,
    /// What the checks have found: damaged packs with the files that need them, or files that differ from those on the
    /// machine; `null` if all is intact.
    pub damage: Option<String>,
}

/// What a backup leaves out.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(inline)]
pub struct ExcludedFiles {
    pub measured_at: Time,
    /// The number of entries, including everything in excluded directories, and the total size of the files.
    pub entries: u64,
    pub bytes: u64,
    /// Whether everything was counted: a measurement stops after a million entries, and skips what it cannot read.
    pub complete: bool,
    /// The largest excluded files and directories, the largest first.
    pub largest: Vec<ExcludedFile>,
}

/// An excluded file or directory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(inline)]
pub struct ExcludedFile {
    pub path: String,
    /// The number of entries, including everything in the directory.
    pub entries: u64,
    pub bytes: u64,
}

/// Maximum number of characters in a path.
pub const MAX_PATH_CHARS: usize = 4096;
/// Default and maximum number of versions in a page.
pub const DEFAULT_VERSIONS: usize = 50;
pub const MAX_VERSIONS: usize = 500;
/// Default and maximum number of a directory's entries in a page.
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
    Link,
    /// A device, FIFO or socket, of which nothing is saved.
    Special,
    /// A kind that only newer hosts know.
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

/// The state of a file or directory between two moments.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct FileVersion {
    /// The times of the first and the last snapshot with this state.
    #[serde(default)]
    pub first_saved_at: Time,
    #[serde(default)]
    pub last_saved_at: Time,
    /// The last of these snapshots.
    #[serde(default)]
    pub snapshot: String,
    /// `null` if there was no such entry.
    pub entry: Option<FileEntry>,
}

/// A page of versions, the newest first.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct FileVersions {
    pub path: String,
    pub versions: Vec<FileVersion>,
    /// The `before` of the next page. The last version of a page may continue there.
    pub next_before: Option<Time>,
    /// Snapshots that are damaged, so that they were not searched.
    #[serde(default)]
    pub damaged_snapshots: u64,
}

/// A file or directory at a moment.
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
    /// The `cursor` of the next page. Further pages are of the same snapshot if `time` is `savedAt`.
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
    /// A state that only newer hosts know.
    #[serde(other)]
    Unknown,
}

impl FileRestoreStatus {
    pub fn has_ended(self) -> bool {
        matches!(self, Self::Done | Self::Failed)
    }
}

/// The response about restores.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FileRestoreResponse {
    /// The pending restore, or else the last one; `None` if there was none.
    pub restore: Option<FileRestore>,
}

/// A restore of a file or directory to the home of a running machine.
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
    /// Where the entry now is.
    pub restored_to: Option<String>,
    /// Where the entry is that was there before, if it was replaced.
    pub kept_as: Option<String>,
    #[serde(default)]
    pub files: u64,
    #[serde(default)]
    pub total_bytes: u64,
    #[serde(default)]
    pub written_bytes: u64,
    /// Entries whose owner, mode, times or attributes could not be set.
    #[serde(default)]
    pub incomplete: u64,
    /// Why it failed.
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
