//! Manages the platform's signing keys, and seals all keys in the database. Signing keys are created in the database
//! under a lock, sealed with a key derived from `PLATFORM_KEY`, and shared by all platform processes.
//!
//! Invariant: a private signing key leaves the process only when sealed and bound to its `kid`.

use std::sync::Arc;
use std::time::Duration;

use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf;
use ring::rand::{SecureRandom, SystemRandom};
use secrecy::{ExposeSecret, SecretSlice};

use super::db::{self, Db, DbError};
use super::platform_key::{KeyId, KeyIds, PlatformKeys};
use svc_http::proof::{ProofKeys, Signer};
use svc_router::signing_set::{AppKeys, SigningSet};

/// Maximum number of retired keys that still sign for hosts without a newer key.
const MAX_RETIRED_KEYS: i64 = 8;

/// Advisory lock held while the set of signing keys changes.
pub const SIGNING_KEYS_LOCK: &str = "signing keys";

/// The reason a signing key, or the key of a slot's file backups, is unavailable.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error(transparent)]
    Db(#[from] DbError),
    #[error(
        "cannot open key {kid}: it was sealed with a key other than PLATFORM_KEY and PLATFORM_KEY_PREVIOUS; set \
         PLATFORM_KEY_PREVIOUS to that key"
    )]
    CannotOpen { kid: String },
    #[error("key {kid} in the database is corrupt")]
    Corrupt { kid: String },
    #[error("the system's random number generator failed")]
    Randomness,
}

impl From<ring::error::Unspecified> for KeyError {
    fn from(_: ring::error::Unspecified) -> Self {
        Self::Randomness
    }
}

/// Seals secrets with the current platform key, and opens secrets sealed with the current or the previous one.
pub struct Seal {
    key: LessSafeKey,
    id: KeyId,
    previous: Option<(LessSafeKey, KeyId)>,
}

/// Which platform key opens a sealed key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpeningKey {
    Current,
    Previous,
    Neither,
}

impl Seal {
    pub fn new(platform_key: &SecretSlice<u8>) -> Self {
        Self { key: derive_sealing_key(platform_key), id: KeyId::from_key(platform_key), previous: None }
    }

    /// Creates a seal that seals with the current key and opens with either key.
    pub fn from_keys(keys: &PlatformKeys) -> Self {
        let previous = keys.previous.as_ref().map(|key| (derive_sealing_key(key), KeyId::from_key(key)));
        Self { previous, ..Self::new(&keys.current) }
    }

    /// Returns the fingerprint of the platform key with which secrets are sealed.
    pub fn id(&self) -> &KeyId {
        &self.id
    }

    pub fn previous_id(&self) -> Option<&KeyId> {
        self.previous.as_ref().map(|(_, id)| id)
    }

    pub fn has_previous(&self) -> bool {
        self.previous.is_some()
    }

    pub fn find_opening_key(&self, kid: &str, sealed: &[u8]) -> OpeningKey {
        if open_with(&self.key, kid, sealed).is_some() {
            return OpeningKey::Current;
        }
        match self.previous.as_ref().and_then(|(key, _)| open_with(key, kid, sealed)) {
            Some(_) => OpeningKey::Previous,
            None => OpeningKey::Neither,
        }
    }

    /// Reseals, with the current key, a secret that only the previous key opens; `None` for any other secret.
    pub fn reseal(&self, kid: &str, sealed: &[u8]) -> Result<Option<Vec<u8>>, KeyError> {
        match self.find_opening_key(kid, sealed) {
            OpeningKey::Previous => Ok(Some(self.seal(kid, &self.open(kid, sealed)?)?)),
            OpeningKey::Current | OpeningKey::Neither => Ok(None),
        }
    }

    /// Encrypts a secret with the current key, and binds it to `kid`. Returns the nonce, ciphertext and tag.
    ///
    /// # Errors
    /// `Randomness` if the random number generator fails.
    pub fn seal(&self, kid: &str, secret: &[u8]) -> Result<Vec<u8>, KeyError> {
        let mut nonce = [0; NONCE_LEN];
        SystemRandom::new().fill(&mut nonce)?;
        let mut sealed = secret.to_vec();
        let aad = Aad::from(kid.as_bytes());
        self.key.seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), aad, &mut sealed)?;
        Ok([nonce.as_slice(), &sealed].concat())
    }

    /// Decrypts a sealed secret with the current or the previous key.
    ///
    /// # Errors
    /// `CannotOpen` if neither key opens it, if it was sealed with another `kid`, or if it is corrupt.
    pub fn open(&self, kid: &str, sealed: &[u8]) -> Result<Vec<u8>, KeyError> {
        let mut keys = std::iter::once(&self.key).chain(self.previous.as_ref().map(|(key, _)| key));
        keys.find_map(|key| open_with(key, kid, sealed))
            .ok_or_else(|| KeyError::CannotOpen { kid: kid.to_owned() })
    }
}

fn derive_sealing_key(platform_key: &SecretSlice<u8>) -> LessSafeKey {
    let salt = hkdf::Salt::new(hkdf::HKDF_SHA256, b"svc-platform");
    let derived = salt.extract(platform_key.expose_secret());
    let info: [&[u8]; 1] = [b"seal of signing keys, version 1"];
    let okm = derived.expand(&info, &CHACHA20_POLY1305).expect("HKDF can output one key's length");
    LessSafeKey::new(UnboundKey::from(okm))
}

fn open_with(key: &LessSafeKey, kid: &str, sealed: &[u8]) -> Option<Vec<u8>> {
    let (nonce, body) = sealed.split_at_checked(NONCE_LEN)?;
    let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
    let mut body = body.to_vec();
    Some(key.open_in_place(nonce, Aad::from(kid.as_bytes()), &mut body).ok()?.to_vec())
}

/// Loads the keys from the database. Creates a key for each purpose that has none. The newest app key that is at least
/// `overlap` old signs; if there is none, the oldest does. Retired keys that cannot be opened are left out.
pub async fn load(db: &Db, seal: &Seal, overlap: Duration) -> Result<SigningSet, KeyError> {
    let proof = open_all(load_or_create(db, seal, db::keys::PROOF_PURPOSE).await?, seal)?;
    let app = load_or_create(db, seal, db::keys::APP_PURPOSE).await?;
    let app_index = app.iter().rposition(|key| key.age >= overlap).unwrap_or(0);
    let app = open_all(app, seal)?;
    let session = db.session().await?;
    let retired = db::keys::list_retired(&session, db::keys::PROOF_PURPOSE, MAX_RETIRED_KEYS).await?;
    drop(session);
    let no_key = || KeyError::Corrupt { kid: "(none)".to_owned() };
    let app_signer = app.get(app_index).cloned().ok_or_else(no_key)?;
    // The oldest key signs proofs until hosts have acknowledged the newest one.
    let mut signers = proof.iter().cloned();
    Ok(SigningSet {
        current: signers.next().ok_or_else(no_key)?,
        next: signers.next_back(),
        retired: retired.into_iter().filter_map(|key| open_all(vec![key], seal).ok()?.pop()).collect(),
        public: public_keys(&proof),
        app: AppKeys { current: app_signer, public: public_keys(&app) },
    })
}

/// Checks that each active signing key, and the key of each slot's file backups, can be opened with one of the platform
/// keys. `ids` are the fingerprints of the keys of `seal`.
///
/// # Errors
/// [`KeyError`]; `CannotOpen` for a key that neither platform key opens, `Corrupt` if an opened signing key is invalid,
/// `Db` if the database fails.
pub async fn ensure_keys_can_be_opened(
    client: &impl deadpool_postgres::GenericClient,
    ids: &KeyIds,
    seal: &Seal,
) -> Result<(), KeyError> {
    for purpose in [db::keys::PROOF_PURPOSE, db::keys::APP_PURPOSE] {
        open_all(db::keys::list_active(client, purpose).await?, seal)?;
    }
    match db::files_keys::find_sealed_with_neither(client, ids).await? {
        Some(slot) => Err(KeyError::CannotOpen { kid: format!("files:{slot}") }),
        None => Ok(()),
    }
}

async fn load_or_create(db: &Db, seal: &Seal, purpose: &str) -> Result<Vec<db::keys::StoredKey>, KeyError> {
    let mut session = db.session().await?;
    let stored = db::keys::list_active(&session, purpose).await?;
    if !stored.is_empty() {
        return Ok(stored);
    }
    let tx = db::begin(&mut session).await?;
    db::lock(&tx, SIGNING_KEYS_LOCK).await?;
    let mut stored = db::keys::list_active(&tx, purpose).await?;
    if stored.is_empty() {
        stored.push(create_signing_key(&tx, seal, purpose).await?);
    }
    db::commit(tx).await?;
    Ok(stored)
}

/// Generates a key and stores it. The transaction must hold [`SIGNING_KEYS_LOCK`].
pub async fn create_signing_key(
    tx: &deadpool_postgres::Transaction<'_>,
    seal: &Seal,
    purpose: &str,
) -> Result<db::keys::StoredKey, KeyError> {
    let kid = format!("{purpose}-{}", uuid::Uuid::now_v7().simple());
    let pkcs8 = Signer::generate_pkcs8()?;
    let signer = Signer::from_pkcs8(&kid, &pkcs8).map_err(|_| KeyError::Corrupt { kid: kid.clone() })?;
    let sealed = seal.seal(&kid, &pkcs8)?;
    let key = db::keys::StoredKey { kid, public_key: signer.public_key().x, sealed, age: Duration::ZERO };
    db::keys::insert(tx, purpose, &key).await?;
    Ok(key)
}

fn open_all(stored: Vec<db::keys::StoredKey>, seal: &Seal) -> Result<Vec<Arc<Signer>>, KeyError> {
    let open = |key: db::keys::StoredKey| {
        let pkcs8 = seal.open(&key.kid, &key.sealed)?;
        let signer = Signer::from_pkcs8(&key.kid, &pkcs8);
        signer.map(Arc::new).map_err(|_| KeyError::Corrupt { kid: key.kid })
    };
    stored.into_iter().map(open).collect()
}

fn public_keys(signers: &[Arc<Signer>]) -> ProofKeys {
    ProofKeys { keys: signers.iter().map(|signer| signer.public_key()).collect() }
}

/// Returns whether two signing sets contain the same keys and sign with the same keys.
pub fn has_same_keys(one: &SigningSet, other: &SigningSet) -> bool {
    one.public == other.public
        && one.app.public == other.app.public
        && one.retired.first().map(|signer| signer.kid()) == other.retired.first().map(|signer| signer.kid())
        && one.app.current.kid() == other.app.current.kid()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sealed_key_opens_only_with_its_kid_and_platform_key() {
        let seal = Seal::new(&vec![1; 32].into());
        let sealed = seal.seal("k1", b"private").unwrap();
        assert_eq!(seal.open("k1", &sealed).unwrap(), b"private");
        assert!(!sealed.windows(7).any(|part| part == b"private"));
        assert!(matches!(seal.open("k2", &sealed), Err(KeyError::CannotOpen { .. })));
        let other = Seal::new(&vec![2; 32].into());
        assert!(matches!(other.open("k1", &sealed), Err(KeyError::CannotOpen { .. })));
        assert!(matches!(seal.open("k1", b"short"), Err(KeyError::CannotOpen { .. })));
    }

    #[test]
    fn reseal_replaces_only_seal_of_previous_key() {
        let seal = |current: u8, previous: Option<u8>| {
            let key = |byte: u8| vec![byte; 32].into();
            Seal::from_keys(&PlatformKeys { current: key(current), previous: previous.map(key) })
        };
        let (old, both, new) = (seal(1, None), seal(2, Some(1)), seal(2, None));
        let sealed = old.seal("k1", b"private").unwrap();
        assert_eq!(both.open("k1", &sealed).unwrap(), b"private");
        assert_eq!(both.find_opening_key("k1", &sealed), OpeningKey::Previous);
        assert_eq!(new.find_opening_key("k1", &sealed), OpeningKey::Neither);
        assert_eq!(new.reseal("k1", &sealed).unwrap(), None, "the key cannot be opened");
        let again = both.reseal("k1", &sealed).unwrap().unwrap();
        assert_eq!(new.open("k1", &again).unwrap(), b"private");
        assert_eq!(both.reseal("k1", &again).unwrap(), None, "the key is already resealed");
        assert_eq!(new.find_opening_key("k1", &both.seal("k1", b"x").unwrap()), OpeningKey::Current);
    }
}
