//! Repository key: a random password from which we derive the master key that encrypts all objects.
//!
//! Stock `restic` reads the master key from the repository's key file, which is encrypted with a key derived from the
//! password by scrypt. Our programs derive the master key directly, avoiding scrypt's time and memory cost. The scrypt
//! cost parameters are low because a 256-bit random password can't be guessed.

use aes256ctr_poly1305aes::aead::{Aead, AeadInPlace};
use aes256ctr_poly1305aes::{Aes256CtrPoly1305Aes, Nonce};
use base64::Engine as _;
use base64::prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD};
use jiff::Timestamp;
use ring::hkdf;
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::error::FilesError;
use crate::random::fill_random;

/// Number of random bytes in a password.
const PASSWORD_BYTES: usize = 32;
const NONCE_BYTES: usize = 16;
const TAG_BYTES: usize = 16;
/// Number of bytes that encryption adds to the plaintext.
pub(crate) const OVERHEAD_BYTES: usize = NONCE_BYTES + TAG_BYTES;
const ENCRYPTION_KEY_BYTES: usize = 64;
const SALT_BYTES: usize = 64;
const KDF: &str = "scrypt";
/// HKDF info string. Changing it would make every repository unreadable.
const MASTER_KEY_INFO: &[&[u8]] = &[b"svc files: master key 1"];
/// log2 of the scrypt cost parameter N. Combined with `SCRYPT_R`, scrypt takes 16 MiB of memory.
const SCRYPT_LOG_N: u8 = 14;
const SCRYPT_R: u32 = 8;
const SCRYPT_P: u32 = 1;

/// The secret that opens a slot's repository: 43 characters of unpadded base64url.
#[derive(Debug, Clone)]
pub struct RepositoryKey(SecretString);

impl RepositoryKey {
    /// Generates a random key.
    ///
    /// # Errors
    /// If the system's random number generator fails.
    pub fn generate() -> Result<Self, FilesError> {
        let mut bytes = Zeroizing::new([0; PASSWORD_BYTES]);
        fill_random(&mut *bytes)?;
        Ok(Self(BASE64_URL_SAFE_NO_PAD.encode(*bytes).into()))
    }

    pub fn password(&self) -> &SecretString {
        &self.0
    }

    pub(crate) fn derive_master_key(&self) -> EncryptionKey {
        let salt = hkdf::Salt::new(hkdf::HKDF_SHA256, b"");
        let derived = salt.extract(self.0.expose_secret().as_bytes());
        let mut bytes = Zeroizing::new([0; ENCRYPTION_KEY_BYTES]);
        derived
            .expand(MASTER_KEY_INFO, EncryptionKeyLength)
            .and_then(|output| output.fill(&mut *bytes))
            .expect("HKDF-SHA256 yields up to 8,160 bytes");
        EncryptionKey(bytes)
    }

    /// Creates a key file that lets stock `restic` open the repository with the password.
    ///
    /// # Errors
    /// If the system's random number generator fails.
    pub(crate) fn create_key_file(&self, created: Timestamp) -> Result<Vec<u8>, FilesError> {
        let mut salt = [0; SALT_BYTES];
        fill_random(&mut salt)?;
        let master = self.derive_master_key();
        let (encrypt, mac) = master.0.split_at(32);
        let (k, r) = mac.split_at(16);
        let encode = |bytes: &[u8]| Zeroizing::new(BASE64_STANDARD.encode(bytes));
        let plain = Zeroizing::new(format!(
            r#"{{"mac":{{"k":"{}","r":"{}"}},"encrypt":"{}"}}"#,
            *encode(k),
            *encode(r),
            *encode(encrypt)
        ));
        let file = KeyFile {
            created,
            kdf: KDF.to_owned(),
            n: 1 << SCRYPT_LOG_N,
            r: SCRYPT_R,
            p: SCRYPT_P,
            salt: BASE64_STANDARD.encode(salt),
            data: BASE64_STANDARD.encode(self.derive_password_key(&salt).encrypt(plain.as_bytes())?),
        };
        serde_json::to_vec(&file).map_err(|error| FilesError::encode("key file", &error))
    }

    /// Whether `restic` can open the repository with this key and the given key file.
    pub(crate) fn can_open(&self, content: &[u8]) -> bool {
        let Ok(file) = serde_json::from_slice::<KeyFile>(content) else { return false };
        // Accept only our own parameters; otherwise the key file's author could choose how long this takes.
        let has_expected_params =
            file.kdf == KDF && (file.n, file.r, file.p) == (1 << SCRYPT_LOG_N, SCRYPT_R, SCRYPT_P);
        let (Ok(salt), Ok(data)) = (BASE64_STANDARD.decode(&file.salt), BASE64_STANDARD.decode(&file.data))
        else {
            return false;
        };
        has_expected_params && self.derive_password_key(&salt).decrypt(&data).is_some()
    }

    /// Derives the key that encrypts the master key in the key file.
    fn derive_password_key(&self, salt: &[u8]) -> EncryptionKey {
        let parameters =
            scrypt::Params::new(SCRYPT_LOG_N, SCRYPT_R, SCRYPT_P).expect("scrypt accepts these constants");
        let mut bytes = Zeroizing::new([0; ENCRYPTION_KEY_BYTES]);
        scrypt::scrypt(self.0.expose_secret().as_bytes(), salt, &parameters, &mut *bytes)
            .expect("scrypt fills 64 bytes");
        EncryptionKey(bytes)
    }
}

impl std::str::FromStr for RepositoryKey {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let decoded = BASE64_URL_SAFE_NO_PAD.decode(text).map(Zeroizing::new);
        match decoded {
            Ok(bytes) if bytes.len() == PASSWORD_BYTES => Ok(Self(text.to_owned().into())),
            _ => Err("a repository key must be 43 characters of base64url without padding"),
        }
    }
}

struct EncryptionKeyLength;

impl hkdf::KeyType for EncryptionKeyLength {
    fn len(&self) -> usize {
        ENCRYPTION_KEY_BYTES
    }
}

#[derive(Serialize, Deserialize)]
struct KeyFile {
    created: Timestamp,
    kdf: String,
    #[serde(rename = "N")]
    n: u32,
    r: u32,
    p: u32,
    /// Base64.
    salt: String,
    /// The encrypted master key, in Base64.
    data: String,
}

/// Authenticated encryption key for AES-256-CTR with Poly1305-AES. The repository's master key seals all objects; the
/// password-derived key seals the master key.
///
/// Layout: encryption key (32 bytes), then `k` (16) and `r` (16) of Poly1305-AES.
#[derive(Clone)]
pub(crate) struct EncryptionKey(Zeroizing<[u8; ENCRYPTION_KEY_BYTES]>);

impl EncryptionKey {
    fn cipher(&self) -> Aes256CtrPoly1305Aes {
        Aes256CtrPoly1305Aes::new((&*self.0).into())
    }

    /// Returns `nonce || ciphertext || tag`.
    ///
    /// # Errors
    /// If the system's random number generator fails.
    pub(crate) fn encrypt(&self, plain: &[u8]) -> Result<Vec<u8>, FilesError> {
        let mut output = Vec::with_capacity(plain.len() + OVERHEAD_BYTES);
        self.encrypt_into(plain, &mut output)?;
        Ok(output)
    }

    /// Like [`Self::encrypt`], but appends to `output`.
    pub(crate) fn encrypt_into(&self, plain: &[u8], output: &mut Vec<u8>) -> Result<(), FilesError> {
        let mut nonce = Nonce::default();
        fill_random(&mut nonce)?;
        output.extend_from_slice(&nonce);
        let start = output.len();
        output.extend_from_slice(plain);
        let tag = self
            .cipher()
            .encrypt_in_place_detached(&nonce, &[], &mut output[start..])
            .expect("the plaintext is shorter than the cipher's limit");
        output.extend_from_slice(&tag);
        Ok(())
    }

    /// Decrypts the output of [`Self::encrypt`]. Returns `None` if it was encrypted with a different key or tampered
    /// with.
    pub(crate) fn decrypt(&self, sealed: &[u8]) -> Option<Vec<u8>> {
        let (nonce, sealed) = sealed.split_at_checked(NONCE_BYTES)?;
        self.cipher().decrypt(Nonce::from_slice(nonce), sealed).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decrypt_rejects_tampered_ciphertext_and_wrong_key() {
        let (key, wrong_key) = (RepositoryKey::generate().unwrap(), RepositoryKey::generate().unwrap());
        let sealed = key.derive_master_key().encrypt(b"secret").unwrap();
        assert_eq!(sealed.len(), b"secret".len() + OVERHEAD_BYTES);
        assert_eq!(key.derive_master_key().decrypt(&sealed).as_deref(), Some(&b"secret"[..]));
        assert_eq!(wrong_key.derive_master_key().decrypt(&sealed), None);
        for index in 0..sealed.len() {
            let mut tampered = sealed.clone();
            tampered[index] ^= 1;
            assert_eq!(key.derive_master_key().decrypt(&tampered), None, "byte {index}");
        }
        assert_eq!(key.derive_master_key().decrypt(b"short"), None);
    }

    #[test]
    fn parse_accepts_only_43_base64url_characters() {
        let key = RepositoryKey::generate().unwrap();
        let text = key.password().expose_secret().to_owned();
        assert_eq!(text.len(), 43);
        assert!(text.parse::<RepositoryKey>().is_ok());
        for wrong in ["", "secret", &text[1..], &format!("{text}A"), &text.replace(&text[..1], "!")] {
            assert!(wrong.parse::<RepositoryKey>().is_err(), "{wrong}");
        }
        assert!(!format!("{key:?}").contains(&text), "a key must not appear in logs");
    }

    #[test]
    fn master_key_derivation_is_stable() {
        let key: RepositoryKey = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA".parse().unwrap();
        let digest = crate::id::Id::of(&*key.derive_master_key().0).to_string();
        assert_eq!(&digest[..16], "36d84c3be0160b94", "existing repositories would become unreadable");
    }
}
