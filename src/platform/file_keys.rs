//! The keys of file backups: one for each slot, sealed with the platform key.
//!
//! The platform creates a slot's key when a host of the slot first asks for it, and keeps it for ever. A host sends the
//! key that it has: if the platform has none, because its database is older than the key, it takes the host's.

use deadpool_postgres::GenericClient;
use secrecy::ExposeSecret;
use svc_files::RepositoryKey;
use svc_machine::name::{IdpUserId, Slot};

use super::db::Db;
use super::db::file_keys::{self, SealedFileKey};
use super::keys::{KeyError, Seal};

/// Maximum number of keys that one call reseals.
const BATCH_SIZE: i64 = 100;

/// The name that binds a sealed key to its slot.
fn seal_name(user: &str, slot: &str) -> String {
    format!("files:{user}/{slot}")
}

/// Returns the slot's key. Creates it if there is none: from `offered`, or at random.
///
/// # Errors
/// [`KeyError`]; `Sealed` for a key that neither platform key opens.
pub async fn load_or_create(
    db: &Db,
    seal: &Seal,
    (user, slot): (&IdpUserId, &Slot),
    offered: Option<RepositoryKey>,
) -> Result<RepositoryKey, KeyError> {
    let session = db.session().await?;
    if let Some(key) = find(&session, seal, (user, slot)).await? {
        return Ok(key);
    }
    let key = match offered {
        Some(key) => key,
        None => RepositoryKey::generate().map_err(|_| KeyError::Randomness)?,
    };
    let (user_text, slot_text) = (user.to_string(), slot.to_string());
    let secret = key.password().expose_secret().as_bytes();
    let sealed = seal.seal(&seal_name(&user_text, &slot_text), secret)?;
    let sealed = SealedFileKey { user: user_text, slot: slot_text, sealed };
    file_keys::insert_if_absent(&session, &sealed, seal.id()).await?;
    // A concurrent request may have created the key first.
    let stored = find(&session, seal, (user, slot)).await?;
    stored.ok_or_else(|| KeyError::Damaged { kid: seal_name(user.as_str(), slot.as_str()) })
}

/// Returns the slot's key; `None` if no host has asked for it yet.
///
/// # Errors
/// [`KeyError`]; `Sealed` for a key that neither platform key opens.
pub async fn find(
    client: &impl GenericClient,
    seal: &Seal,
    (user, slot): (&IdpUserId, &Slot),
) -> Result<Option<RepositoryKey>, KeyError> {
    let Some(stored) = file_keys::find(client, user.as_str(), slot.as_str()).await? else { return Ok(None) };
    let kid = seal_name(&stored.user, &stored.slot);
    let opened = zeroize::Zeroizing::new(seal.open(&kid, &stored.sealed)?);
    let key = std::str::from_utf8(&opened).ok().and_then(|text| text.parse().ok());
    key.map(Some).ok_or(KeyError::Damaged { kid })
}

/// Reseals a batch of the keys that were sealed with the previous platform key. Returns whether that was the last one.
///
/// # Errors
/// [`KeyError`]; `Sealed` for a damaged key.
pub async fn reseal_batch(client: &impl GenericClient, seal: &Seal) -> Result<bool, KeyError> {
    let Some(previous) = seal.previous_id() else { return Ok(true) };
    let keys = file_keys::list_sealed_with(client, previous, BATCH_SIZE).await?;
    let is_last = keys.len() < BATCH_SIZE as usize;
    for mut key in keys {
        let name = seal_name(&key.user, &key.slot);
        key.sealed = seal.seal(&name, &zeroize::Zeroizing::new(seal.open(&name, &key.sealed)?))?;
        file_keys::reseal(client, &key, seal.id()).await?;
    }
    Ok(is_last)
}
