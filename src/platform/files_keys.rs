//! Manages the keys of file backups: one for each slot, sealed with the platform key.
//!
//! The platform creates a slot's key when a host of the slot first requests it, and never deletes it. Each host sends
//! the key that it has, so that the platform can recover a key that its database has lost.

use deadpool_postgres::GenericClient;
use secrecy::ExposeSecret;
use svc_base::error_chain::format_chain;
use svc_files::{Cache, FilesError, Repository, RepositoryKey};
use svc_machine::name::{IdpUserId, Slot};
use svc_store::key::SlotPrefix;

use super::context::Platform;
use super::db::DbError;
use super::db::files_keys::{self, SealedFilesKey};
use super::keys::{KeyError, Seal};

/// Maximum number of keys that one call reseals.
const BATCH_SIZE: i64 = 100;

/// Returns the name that binds a sealed key to its slot.
fn seal_name(user: &str, slot: &str) -> String {
    format!("files:{user}/{slot}")
}

/// The reason a slot's key cannot be sent to a host.
#[derive(Debug, thiserror::Error)]
pub enum FilesKeyError {
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error("cannot check the key for slot {slot} against its repository")]
    Repository {
        slot: String,
        #[source]
        source: FilesError,
    },
    #[error(
        "slot {0} has a repository, but the platform has no key that opens it: its database was restored from a copy older \
         than the key, or the repository's configuration was replaced. A machine that still has the key sends it within a day, \
         or immediately after `systemctl restart svc-files`; otherwise restore a newer copy of the database or of the \
         configuration"
    )]
    Lost(String),
    #[error(
        "the platform's key for slot {0} does not open its repository: the platform's database has a different key, or the \
         repository's configuration was replaced. First save the platform's key (`svcctl files key USER`): earlier snapshots \
         may need it. If the object `config` of the repository was replaced, restore it. If the platform's key is wrong, delete \
         the row of the slot from the table file_keys, and run `systemctl restart svc-files` on the machine that has the right key"
    )]
    Mismatch(String),
}

impl From<DbError> for FilesKeyError {
    fn from(error: DbError) -> Self {
        Self::Key(error.into())
    }
}

/// Returns the slot's key. Creates one if the slot has neither a key nor a repository.
///
/// If the platform's database has no key, for example because it was restored from a copy older than the key, the key
/// that the host offers is stored, unless the slot has a repository that this key does not open.
///
/// # Errors
/// [`FilesKeyError`]; `Mismatch` if the slot has a repository that the stored key does not open. If no key is stored,
/// `Lost` if the slot has a repository, and the host offers no key or a key that does not open it. The stored key is
/// not tested if the host offers the same key or none.
pub async fn load_or_create(
    platform: &Platform,
    (user, slot): (&IdpUserId, &Slot),
    offered: Option<RepositoryKey>,
) -> Result<RepositoryKey, FilesKeyError> {
    let (seal, session) = (&platform.seal, platform.host_db.session().await?);
    let stored = find(&session, seal, (user, slot)).await?;
    drop(session);
    let is_same = |key: &RepositoryKey, other: &RepositoryKey| {
        key.password().expose_secret() == other.password().expose_secret()
    };
    match (stored, offered) {
        (Some(stored), None) => Ok(stored),
        (Some(stored), Some(offered)) if is_same(&stored, &offered) => Ok(stored),
        (stored, offered) => {
            let slot_name = || format!("{user}/{slot}");
            let prefix = SlotPrefix::new(user, slot);
            let test = |key: RepositoryKey| async {
                match Repository::open(platform.bucket.clone(), prefix.files(), &key, Cache::none()).await {
                    Ok(_) => Ok(Some(key)),
                    Err(FilesError::WrongKey) => Ok(None),
                    Err(source) => Err(FilesKeyError::Repository { slot: slot_name(), source }),
                }
            };
            if let Some(stored) = stored {
                // The stored key is never replaced: a host could have replaced the repository's configuration with one
                // that only the offered key opens.
                return test(stored).await?.ok_or_else(|| FilesKeyError::Mismatch(slot_name()));
            }
            let key = match offered {
                Some(offered) => test(offered).await?,
                // A new key passes the test only if the slot has no repository.
                None => test(generate()?).await?,
            };
            let key = key.ok_or_else(|| FilesKeyError::Lost(slot_name()))?;
            store(platform, (user, slot), &key).await
        }
    }
}

fn generate() -> Result<RepositoryKey, KeyError> {
    RepositoryKey::generate().map_err(|_| KeyError::Randomness)
}

/// Stores a key unless the slot has one, and returns the stored key: a concurrent request may have stored another.
async fn store(
    platform: &Platform,
    (user, slot): (&IdpUserId, &Slot),
    key: &RepositoryKey,
) -> Result<RepositoryKey, FilesKeyError> {
    let seal = &platform.seal;
    let (user_text, slot_text) = (user.to_string(), slot.to_string());
    let name = seal_name(&user_text, &slot_text);
    let sealed = seal.seal(&name, key.password().expose_secret().as_bytes())?;
    let sealed = SealedFilesKey { user: user_text, slot: slot_text, sealed };
    let session = platform.host_db.session().await?;
    files_keys::insert_if_absent(&session, &sealed, seal.id()).await?;
    let stored = find(&session, seal, (user, slot)).await?;
    Ok(stored.ok_or(KeyError::Corrupt { kid: name })?)
}

/// Returns the slot's key; `None` if the database has none, because no host has requested it yet or the key was lost.
///
/// # Errors
/// [`KeyError`]; `CannotOpen` for a key that neither platform key opens, `Corrupt` if the opened key is invalid.
pub async fn find(
    client: &impl GenericClient,
    seal: &Seal,
    (user, slot): (&IdpUserId, &Slot),
) -> Result<Option<RepositoryKey>, KeyError> {
    let Some(stored) = files_keys::find(client, user.as_str(), slot.as_str()).await? else { return Ok(None) };
    let name = seal_name(&stored.user, &stored.slot);
    let opened = zeroize::Zeroizing::new(seal.open(&name, &stored.sealed)?);
    let key = std::str::from_utf8(&opened).ok().and_then(|text| text.parse().ok());
    key.map(Some).ok_or(KeyError::Corrupt { kid: name })
}

/// Reseals a batch of the keys that were sealed with the previous platform key, and skips those that cannot be opened.
/// Returns whether that was the last batch.
///
/// # Errors
/// [`KeyError`] if the database or the random number generator fails.
pub async fn reseal_batch(client: &impl GenericClient, seal: &Seal) -> Result<bool, KeyError> {
    let Some(previous) = seal.previous_id() else { return Ok(true) };
    let mut after = (String::new(), String::new());
    loop {
        let keys = files_keys::list_sealed_with(client, previous, &after, BATCH_SIZE).await?;
        let Some(last) = keys.last().filter(|_| keys.len() == BATCH_SIZE as usize) else {
            reseal_all(client, seal, keys).await?;
            return Ok(true);
        };
        after = (last.user.clone(), last.slot.clone());
        if reseal_all(client, seal, keys).await? {
            return Ok(false);
        }
    }
}

/// Reseals keys. Returns whether any could be opened.
async fn reseal_all(
    client: &impl GenericClient,
    seal: &Seal,
    keys: Vec<SealedFilesKey>,
) -> Result<bool, KeyError> {
    let mut has_resealed = false;
    for mut key in keys {
        let name = seal_name(&key.user, &key.slot);
        match seal.open(&name, &key.sealed) {
            Ok(opened) => {
                key.sealed = seal.seal(&name, &zeroize::Zeroizing::new(opened))?;
                files_keys::reseal(client, &key, seal.id()).await?;
                has_resealed = true;
            }
            // A key that cannot be opened must not stop the rotation of the others. It still counts as needing the
            // previous key.
            Err(error) => {
                tracing::error!(error = %format_chain(&error), "cannot reseal the key of a slot's file backups");
            }
        }
    }
    Ok(has_resealed)
}
