//! Access to the slot's file-backup repository: the key, held by the platform, and the object store.

use std::num::NonZeroU64;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use http::StatusCode;
use secrecy::{ExposeSecret, SecretString};
use svc_base::applet::{Exit, Failure, OrExit};
use svc_base::error_chain::format_chain;
use svc_base::fsx::{self, FileError};
use svc_files::{Cache, FilesError, Id, Repository, RepositoryKey, SnapshotOrigin};
use svc_http::client::{self, Timeouts};
use svc_http::request_id;
use svc_machine::epoch::Epoch;
use svc_store::key::SlotPrefix;
use svc_store::{Bucket, StoreError, files_pointer};
use svc_wire::files::{FilesKey, FilesKeyRequest};

use crate::system::config::{self, Identity, PlatformAccess};
use crate::system::epoch;
use crate::system::layout::Layout;
use crate::system::platform_response::{ProblemBody, read_body};
use crate::system::store::HostStoreAccess;
use crate::system::vars;

const KEY_MODE: u32 = 0o600;

/// Errors from accessing the repository.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    #[error("cannot get the file-backup key from the platform: {0}")]
    KeyUnavailable(String),
    #[error("the platform refused to send the file-backup key to this machine: {0}")]
    KeyRefused(String),
    #[error(
        "the platform cannot send a key that opens the file backup; if it has lost the key, copy /var/lib/svc/files/key \
         from a machine that still has it ({0})"
    )]
    KeyLost(String),
    #[error(
        "the previous machine's files were not restored, so nothing is saved: a new snapshot without them would become \
         the latest; as root, run `svc-sync-agent restore-home --retry` to restore them"
    )]
    NotRestored,
    #[error(transparent)]
    Files(#[from] FilesError),
    #[error(transparent)]
    File(#[from] FileError),
}

impl AccessError {
    /// Describes the problem if this machine's key opens the repository but the platform's doesn't. Returns `None` for
    /// other errors.
    pub fn to_key_problem(&self) -> Option<String> {
        let Self::KeyLost(reason) = self else { return None };
        Some(format!(
            "the platform cannot open the file backup, so a later machine could not restore it; copy /var/lib/svc/files/key to a safe \
             place, and to the next machine before `svc-sync-agent restore-home --retry` ({reason})"
        ))
    }

    /// Whether a retry may succeed.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::KeyUnavailable(_) => true,
            Self::Files(error) => error.is_transient(),
            Self::KeyRefused(_) | Self::KeyLost(_) | Self::NotRestored | Self::File(_) => false,
        }
    }
}

/// The slot's repository and the key that opened it.
struct OpenedRepository {
    key: RepositoryKey,
    /// `None` if nothing has been saved yet.
    repository: Option<Repository>,
    /// Set if the platform didn't send its key.
    key_error: Option<AccessError>,
}

/// Everything `restic` needs to open the repository, except the store credentials.
pub struct ResticAccess {
    /// For example, `s3:https://store.example/bucket/user_1/primary/files`.
    pub repository: String,
    pub password: SecretString,
}

impl ResticAccess {
    /// Returns this machine's key and the repository location in `restic` format, or `None` if this machine doesn't
    /// have a valid key yet.
    ///
    /// # Errors
    /// If the machine settings are invalid, or the key file exists but can't be read.
    pub fn read(layout: &Layout) -> Result<Option<Self>, Failure> {
        let mut env = config::environment(layout);
        let identity = Identity::read(&mut env);
        let store = HostStoreAccess::read(&mut env, layout);
        let (identity, store) = env.finish(identity.zip(store))?;
        let key = read_key_file(layout).or_exit(Exit::Internal)?;
        let root = SlotPrefix::new(&identity.user, &identity.slot).files();
        let repository = store.restic_location(&root);
        Ok(key.map(|key| Self { repository, password: key.password().clone() }))
    }
}

/// Settings shared by the programs that save and restore files.
pub struct FilesSettings {
    pub layout: Layout,
    pub identity: Identity,
    pub slot: SlotPrefix,
    pub bucket: Bucket,
    /// Upload rate limit in bytes per second. `None` means unlimited.
    pub max_bytes_per_second: Option<NonZeroU64>,
    platform: PlatformAccess,
    client: reqwest::Client,
}

impl FilesSettings {
    pub fn read(layout: Layout) -> Result<Self, Failure> {
        let mut env = config::environment(&layout);
        let identity = Identity::read(&mut env);
        let platform = PlatformAccess::read(&mut env, &layout);
        let store = HostStoreAccess::read(&mut env, &layout);
        let kib_per_second: u64 = env.or_default(&vars::FILES_UPLOAD_KIB_PER_SECOND);
        let parts = identity.zip(platform).zip(store);
        let ((identity, platform), store) = env.finish(parts)?;
        Ok(Self {
            slot: SlotPrefix::new(&identity.user, &identity.slot),
            max_bytes_per_second: NonZeroU64::new(kib_per_second.saturating_mul(1024)),
            bucket: store.open().or_exit(Exit::Config)?,
            client: client::build(Timeouts::CALL).or_exit(Exit::Internal)?,
            layout,
            identity,
            platform,
        })
    }

    /// Returns the current epoch, possibly raised by a heartbeat.
    pub fn epoch(&self) -> Epoch {
        epoch::current(&self.layout, self.identity.epoch)
    }

    pub fn origin(&self) -> SnapshotOrigin {
        SnapshotOrigin { machine: self.identity.machine, epoch: self.epoch() }
    }

    /// Creates the state directory if missing. Returns whether this process runs as its owner: other users, such as
    /// root, must not create files there, since the service couldn't use them.
    fn ensure_owned_state_dir(&self) -> bool {
        let dir = self.layout.files_state();
        std::fs::create_dir_all(&dir).is_ok()
            && std::fs::metadata(&dir).is_ok_and(|meta| meta.uid() == nix::unistd::geteuid().as_raw())
    }

    /// Returns the id of the latest snapshot according to the pointer, or `None` if the pointer is missing or doesn't
    /// reference a snapshot.
    ///
    /// # Errors
    /// If the pointer can't be read from the store; `Corrupt` also if it contains an invalid id.
    pub async fn read_latest(&self) -> Result<Option<Id>, StoreError> {
        let pointer = files_pointer::read(&self.bucket, &self.slot).await?;
        let Some(snapshot) = pointer.and_then(|pointer| pointer.value.snapshot) else { return Ok(None) };
        let id = snapshot.id.parse().map_err(|_| StoreError::Corrupt {
            key: self.slot.files_pointer_paths().latest.to_string(),
            reason: "it names an invalid snapshot".to_owned(),
        })?;
        Ok(Some(id))
    }

    fn cache(&self) -> Cache {
        if self.ensure_owned_state_dir() {
            Cache::new(self.layout.files_state().join("cache"))
        } else {
            Cache::none()
        }
    }

    /// Opens the slot's repository with the platform's key, falling back to this machine's. Returns `None` if nothing
    /// has been saved yet.
    ///
    /// # Errors
    /// [`AccessError`] if no key is available, the platform refuses to send its key, or the repository or key file
    /// can't be read or written; `WrongKey` if neither the platform's key nor this machine's opens the repository.
    pub async fn open(&self) -> Result<Option<Repository>, AccessError> {
        Ok(self.open_with_known_keys(&self.cache()).await?.repository)
    }

    /// Opens the slot's repository with this machine's key. Requests the platform's key only if this machine's is
    /// missing or wrong, or if the repository appears to be missing.
    ///
    /// # Errors
    /// Same as [`Self::open`].
    pub async fn open_with_stored_key(&self) -> Result<Option<Repository>, AccessError> {
        self.open_with_cache(&self.cache()).await
    }

    /// Like [`Self::open_with_stored_key`], but without the local cache.
    ///
    /// # Errors
    /// Same as [`Self::open`].
    pub async fn open_uncached(&self) -> Result<Option<Repository>, AccessError> {
        self.open_with_cache(&Cache::none()).await
    }

    async fn open_with_cache(&self, cache: &Cache) -> Result<Option<Repository>, AccessError> {
        if let Some(key) = self.read_key()? {
            let (bucket, root) = (self.bucket.clone(), self.slot.files());
            match Repository::open(bucket, root, &key, cache.clone()).await {
                Ok(Some(repository)) => return Ok(Some(repository)),
                // The platform may have the right key. We also contact it before reporting a missing repository, since
                // it refuses machines that have been replaced.
                Ok(None) | Err(FilesError::WrongKey) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(self.open_with_known_keys(cache).await?.repository)
    }

    /// Opens the slot's repository, creating it or its key file if missing. Also returns an error if the platform
    /// didn't send its key.
    ///
    /// # Errors
    /// Same as [`Self::open`].
    pub async fn open_or_create(&self) -> Result<(Repository, Option<AccessError>), AccessError> {
        let cache = self.cache();
        let OpenedRepository { key, key_error, .. } = self.open_with_known_keys(&cache).await?;
        let (bucket, root) = (self.bucket.clone(), self.slot.files());
        let repository = Repository::open_or_create(bucket, root, &key, cache).await?;
        Ok((repository, key_error))
    }

    /// Opens the repository with the first key that works. The platform's key and the machine's differ only if the
    /// platform database was restored from a copy older than the machine's key.
    async fn open_with_known_keys(&self, cache: &Cache) -> Result<OpenedRepository, AccessError> {
        let stored = self.read_key()?;
        let mut key_error = None;
        let keys = match self.request_key(stored.as_ref()).await {
            Ok(key) => vec![key].into_iter().chain(stored).collect(),
            Err(error @ (AccessError::KeyUnavailable(_) | AccessError::KeyLost(_))) => match stored {
                Some(stored) => {
                    tracing::warn!(error = %format_chain(&error), "using the stored file-backup key");
                    key_error = Some(error);
                    vec![stored]
                }
                None => return Err(error),
            },
            Err(error) => return Err(error),
        };
        let mut wrong_key = None;
        for key in keys {
            let (bucket, root) = (self.bucket.clone(), self.slot.files());
            match Repository::open(bucket, root, &key, cache.clone()).await {
                Ok(repository) => {
                    self.store_key(&key)?;
                    return Ok(OpenedRepository { key, repository, key_error });
                }
                Err(error @ FilesError::WrongKey) => wrong_key = Some(error),
                Err(error) => return Err(error.into()),
            }
        }
        Err(wrong_key.unwrap_or(FilesError::WrongKey).into())
    }

    /// Sends this machine's key, if any, to the platform, in case the platform database was restored from a copy older
    /// than the key.
    ///
    /// # Errors
    /// [`AccessError`] if the key file can't be read, or the platform is unavailable or refuses the request.
    pub async fn offer_key(&self) -> Result<(), AccessError> {
        match self.read_key()? {
            Some(key) => self.request_key(Some(&key)).await.map(drop),
            None => Ok(()),
        }
    }

    fn read_key(&self) -> Result<Option<RepositoryKey>, FileError> {
        read_key_file(&self.layout)
    }

    fn store_key(&self, key: &RepositoryKey) -> Result<(), FileError> {
        let path = self.layout.files_key();
        let text = key.password().expose_secret();
        if !self.ensure_owned_state_dir() || fsx::read_if_exists(&path)?.as_deref() == Some(text.as_bytes()) {
            return Ok(());
        }
        fsx::write_atomic(&path, text.as_bytes(), KEY_MODE)
    }

    async fn request_key(&self, stored: Option<&RepositoryKey>) -> Result<RepositoryKey, AccessError> {
        let url = self.platform.url(&format!("/vps/{}/files-key", self.identity.machine));
        let body = FilesKeyRequest { key: stored.map(|key| SecretString::clone(key.password())) };
        let token = self.platform.upgrade_token.current();
        let request = self.client.post(url).bearer_auth(token.expose_secret()).json(&body);
        let response = request_id::attach(request).send().await.map_err(unavailable)?;
        let status = response.status();
        let body = read_body(response).await.map_err(unavailable)?;
        if !status.is_success() {
            let problem = ProblemBody::parse(&body);
            let text = format!("{status} {}: {}", problem.code, problem.detail);
            // Other rejections may come from a proxy between this machine and the platform.
            let is_final = status == StatusCode::FORBIDDEN && problem.code == "superseded";
            return Err(if is_final {
                AccessError::KeyRefused(text)
            } else if status == StatusCode::CONFLICT && problem.code == "conflict" {
                AccessError::KeyLost(text)
            } else {
                AccessError::KeyUnavailable(text)
            });
        }
        let invalid = || AccessError::KeyUnavailable("cannot parse the platform's response".to_owned());
        let key: FilesKey = serde_json::from_slice(&body).map_err(|_| invalid())?;
        key.key.expose_secret().parse().map_err(|_| invalid())
    }
}

fn read_key_file(layout: &Layout) -> Result<Option<RepositoryKey>, FileError> {
    let text = fsx::read_if_exists(&layout.files_key())?;
    // An invalid file is replaced by the platform's key.
    Ok(text.and_then(|text| std::str::from_utf8(&text).ok()?.trim().parse().ok()))
}

fn unavailable(error: impl std::error::Error + 'static) -> AccessError {
    AccessError::KeyUnavailable(format_chain(&error))
}

/// Retries a call until it succeeds, fails permanently, or `timeout` elapses.
///
/// # Errors
/// The error from the last call.
pub async fn retry<T, E>(
    timeout: Duration,
    is_transient: impl Fn(&E) -> bool,
    mut call: impl AsyncFnMut() -> Result<T, E>,
) -> Result<T, E>
where
    E: std::error::Error + 'static,
{
    let mut backoff = crate::system::backoff::Backoff::new(timeout);
    loop {
        match call().await {
            Ok(value) => return Ok(value),
            Err(error) if is_transient(&error) => {
                tracing::warn!(error = %format_chain(&error), "cannot reach the file backup; retrying");
                if backoff.pause().await.is_err() {
                    return Err(error);
                }
            }
            Err(error) => return Err(error),
        }
    }
}
