//! Signing keys of the platform: created in the database under a lock, sealed with a key derived from `PLATFORM_KEY`,
//! and shared by all platform processes.
//!
//! Owns the sealing and the choice of the signing key. The invariant: a private key leaves the process only sealed,
//! bound to its `kid`.

use std::sync::Arc;
use std::time::Duration;

use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf;
use ring::rand::{SecureRandom, SystemRandom};
use secrecy::{ExposeSecret, SecretSlice};

use super::db::{self, Db, DbError};
use super::platform_key::PlatformKeys;
use svc_http::proof::{ProofKeys, Signer};

/// Maximum retired keys that still sign for hosts without a newer one.
const MAX_RETIRED: i64 = 8;

/// Advisory lock held while the set of signing keys changes.
pub const LOCK: &str = "signing keys";

/// The keys that sign proofs, in one process's current view.
pub struct SigningSet {
    pub current: Arc<Signer>,
    /// Signs for hosts that have acknowledged it.
    pub next: Option<Arc<Signer>>,
    /// Newest first: for hosts that were unreachable during the replacement and have no other key.
    pub retired: Vec<Arc<Signer>>,
    pub public: ProofKeys,
    pub app: AppKeys,
}

/// The keys that sign app tokens. Hosts do not have them: only routers accept such tokens, so the newest signs as
/// soon as every router has had time to read it.
pub struct AppKeys {
    pub current: Arc<Signer>,
    pub public: ProofKeys,
}

impl SigningSet {
    /// The key that signs for a machine whose host has acknowledged these: the newest of them. Before the first
    /// heartbeat, it is the oldest active key, which was in the user-data.
    pub fn signer_for(&self, acknowledged: &[String]) -> &Signer {
        let known = |signer: &&Arc<Signer>| acknowledged.iter().any(|kid| kid == signer.kid());
        let newest_first = self.next.iter().chain([&self.current]).chain(&self.retired);
        newest_first.into_iter().find(known).unwrap_or(&self.current)
    }
}

/// Why the keys are unavailable.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error(transparent)]
    Db(#[from] DbError),
    #[error(
        "cannot open signing key {kid}: it was sealed with a key other than PLATFORM_KEY and PLATFORM_KEY_PREVIOUS; set \
         PLATFORM_KEY_PREVIOUS to that key"
    )]
    Sealed { kid: String },
    #[error("signing key {kid} is damaged")]
    Damaged { kid: String },
    #[error("the system's random number generator failed")]
    Randomness,
}

impl From<ring::error::Unspecified> for KeyError {
    fn from(_: ring::error::Unspecified) -> Self {
        Self::Randomness
    }
}

/// Seals private keys with the current platform key, and opens those sealed with the previous one as well.
pub struct Seal {
    key: LessSafeKey,
    previous: Option<LessSafeKey>,
}

/// Which platform key opens a sealed key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SealedWith {
    Current,
    Previous,
    Neither,
}

impl Seal {
    pub fn new(platform_key: &SecretSlice<u8>) -> Self {
        Self { key: sealing_key(platform_key), previous: None }
    }

    /// With both keys in force.
    pub fn of(keys: &PlatformKeys) -> Self {
        Self { previous: keys.previous.as_ref().map(sealing_key), ..Self::new(&keys.current) }
    }

    pub fn has_previous(&self) -> bool {
        self.previous.is_some()
    }

    pub fn sealed_with(&self, kid: &str, sealed: &[u8]) -> SealedWith {
        if open_with(&self.key, kid, sealed).is_some() {
            return SealedWith::Current;
        }
        match self.previous.as_ref().and_then(|key| open_with(key, kid, sealed)) {
            Some(_) => SealedWith::Previous,
            None => SealedWith::Neither,
        }
    }

    /// Reseals with the current key a secret that only the previous key opens; `None` otherwise.
    pub fn reseal(&self, kid: &str, sealed: &[u8]) -> Result<Option<Vec<u8>>, KeyError> {
        match self.sealed_with(kid, sealed) {
            SealedWith::Previous => Ok(Some(self.close(kid, &self.open(kid, sealed)?)?)),
            SealedWith::Current | SealedWith::Neither => Ok(None),
        }
    }

    /// Nonce, ciphertext and tag.
    fn close(&self, kid: &str, secret: &[u8]) -> Result<Vec<u8>, KeyError> {
        let mut nonce = [0; NONCE_LEN];
        SystemRandom::new().fill(&mut nonce)?;
        let mut sealed = secret.to_vec();
        let bound = Aad::from(kid.as_bytes());
        self.key.seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), bound, &mut sealed)?;
        Ok([nonce.as_slice(), &sealed].concat())
    }

    fn open(&self, kid: &str, sealed: &[u8]) -> Result<Vec<u8>, KeyError> {
        let mut keys = std::iter::once(&self.key).chain(&self.previous);
        keys.find_map(|key| open_with(key, kid, sealed))
            .ok_or_else(|| KeyError::Sealed { kid: kid.to_owned() })
    }
}

fn sealing_key(platform_key: &SecretSlice<u8>) -> LessSafeKey {
    let salt = hkdf::Salt::new(hkdf::HKDF_SHA256, b"svc-platform");
    let derived = salt.extract(platform_key.expose_secret());
    let info: [&[u8]; 1] = [b"seal of signing keys, version 1"];
    let okm = derived.expand(&info, &CHACHA20_POLY1305).expect("one key is within HKDF's reach");
    LessSafeKey::new(UnboundKey::from(okm))
}

fn open_with(key: &LessSafeKey, kid: &str, sealed: &[u8]) -> Option<Vec<u8>> {
    let (nonce, body) = sealed.split_at_checked(NONCE_LEN)?;
    let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
    let mut body = body.to_vec();
    Some(key.open_in_place(nonce, Aad::from(kid.as_bytes()), &mut body).ok()?.to_vec())
}

/// Loads the keys from the database, and creates the first one of a purpose. An app key signs once it is `overlap`
/// old.
pub async fn load(db: &Db, seal: &Seal, overlap: Duration) -> Result<SigningSet, KeyError> {
    let proof = open_all(load_stored(db, seal, db::keys::PROOF).await?, seal)?;
    let app = load_stored(db, seal, db::keys::APP).await?;
    let nth = app.iter().rposition(|key| key.age >= overlap).unwrap_or(0);
    let app = open_all(app, seal)?;
    let session = db.session().await?;
    let retired = db::keys::list_retired(&session, db::keys::PROOF, MAX_RETIRED).await?;
    drop(session);
    let none = || KeyError::Damaged { kid: "(none)".to_owned() };
    let app_signer = app.get(nth).cloned().ok_or_else(none)?;
    // The oldest key signs proofs until hosts have acknowledged the newest one.
    let mut signers = proof.iter().cloned();
    Ok(SigningSet {
        current: signers.next().ok_or_else(none)?,
        next: signers.next_back(),
        retired: retired.into_iter().filter_map(|key| open_all(vec![key], seal).ok()?.pop()).collect(),
        public: public_keys(&proof),
        app: AppKeys { current: app_signer, public: public_keys(&app) },
    })
}

/// Refuses active keys that neither platform key opens.
pub async fn ensure_opened(
    client: &impl deadpool_postgres::GenericClient,
    seal: &Seal,
) -> Result<(), KeyError> {
    for purpose in [db::keys::PROOF, db::keys::APP] {
        open_all(db::keys::list_active(client, purpose).await?, seal)?;
    }
    Ok(())
}

async fn load_stored(db: &Db, seal: &Seal, purpose: &str) -> Result<Vec<db::keys::StoredKey>, KeyError> {
    let mut session = db.session().await?;
    let stored = db::keys::list_active(&session, purpose).await?;
    if !stored.is_empty() {
        return Ok(stored);
    }
    let tx = db::begin(&mut session).await?;
    db::lock(&tx, LOCK).await?;
    let mut stored = db::keys::list_active(&tx, purpose).await?;
    if stored.is_empty() {
        stored.push(generate(&tx, seal, purpose).await?);
    }
    db::commit(tx).await?;
    Ok(stored)
}

/// Creates another key, under the lock that the transaction holds.
pub async fn generate(
    tx: &deadpool_postgres::Transaction<'_>,
    seal: &Seal,
    purpose: &str,
) -> Result<db::keys::StoredKey, KeyError> {
    let kid = format!("{purpose}-{}", uuid::Uuid::now_v7().simple());
    let pkcs8 = Signer::generate()?;
    let signer = Signer::from_pkcs8(&kid, &pkcs8).map_err(|_| KeyError::Damaged { kid: kid.clone() })?;
    let sealed = seal.close(&kid, &pkcs8)?;
    let key = db::keys::StoredKey { kid, public_key: signer.public_key().x, sealed, age: Duration::ZERO };
    db::keys::insert(tx, purpose, &key).await?;
    Ok(key)
}

fn open_all(stored: Vec<db::keys::StoredKey>, seal: &Seal) -> Result<Vec<Arc<Signer>>, KeyError> {
    let open = |key: db::keys::StoredKey| {
        let pkcs8 = seal.open(&key.kid, &key.sealed)?;
        let signer = Signer::from_pkcs8(&key.kid, &pkcs8);
        signer.map(Arc::new).map_err(|_| KeyError::Damaged { kid: key.kid })
    };
    stored.into_iter().map(open).collect()
}

fn public_keys(signers: &[Arc<Signer>]) -> ProofKeys {
    ProofKeys { keys: signers.iter().map(|signer| signer.public_key()).collect() }
}

/// Whether two views hold the same keys and sign with the same ones.
pub fn is_same(one: &SigningSet, other: &SigningSet) -> bool {
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
        let sealed = seal.close("k1", b"private").unwrap();
        assert_eq!(seal.open("k1", &sealed).unwrap(), b"private");
        assert!(!sealed.windows(7).any(|part| part == b"private"));
        assert!(matches!(seal.open("k2", &sealed), Err(KeyError::Sealed { .. })));
        let other = Seal::new(&vec![2; 32].into());
        assert!(matches!(other.open("k1", &sealed), Err(KeyError::Sealed { .. })));
        assert!(matches!(seal.open("k1", b"short"), Err(KeyError::Sealed { .. })));
    }

    #[test]
    fn reseal_replaces_previous_key() {
        let keys = |current: u8, previous: Option<u8>| {
            let key = |byte: u8| vec![byte; 32].into();
            Seal::of(&PlatformKeys { current: key(current), previous: previous.map(key) })
        };
        let (old, both, new) = (keys(1, None), keys(2, Some(1)), keys(2, None));
        let sealed = old.close("k1", b"private").unwrap();
        assert_eq!(both.open("k1", &sealed).unwrap(), b"private");
        assert_eq!(both.sealed_with("k1", &sealed), SealedWith::Previous);
        assert_eq!(new.sealed_with("k1", &sealed), SealedWith::Neither);
        assert_eq!(new.reseal("k1", &sealed).unwrap(), None, "what cannot be opened stays");
        let again = both.reseal("k1", &sealed).unwrap().unwrap();
        assert_eq!(new.open("k1", &again).unwrap(), b"private");
        assert_eq!(both.reseal("k1", &again).unwrap(), None, "it is done once");
        assert_eq!(new.sealed_with("k1", &both.close("k1", b"x").unwrap()), SealedWith::Current);
    }
}
