//! The active platform keys. New secrets are made with `PLATFORM_KEY`; secrets made with `PLATFORM_KEY_PREVIOUS` are
//! still accepted.
//!
//! Invariant: outside the process, a key is identified only by its fingerprint, which reveals nothing about the key.

use std::fmt;

use ring::hmac;
use secrecy::{ExposeSecret, SecretSlice};

/// Length of a fingerprint before hexadecimal encoding.
const ID_BYTES: usize = 6;

pub struct PlatformKeys {
    pub current: SecretSlice<u8>,
    pub previous: Option<SecretSlice<u8>>,
}

/// A key's fingerprint, which names it in the database, logs and messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyId(String);

impl KeyId {
    /// Length of a fingerprint's text.
    pub const CHARS: usize = 2 * ID_BYTES;

    pub fn from_key(key: &SecretSlice<u8>) -> Self {
        let key = hmac::Key::new(hmac::HMAC_SHA256, key.expose_secret());
        let mac = hmac::sign(&key, b"svc platform key id");
        Self(hex::encode(&mac.as_ref()[..ID_BYTES]))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The fingerprints of a process's keys.
#[derive(Debug, Clone)]
pub struct KeyIds {
    pub current: KeyId,
    pub previous: Option<KeyId>,
}

impl PlatformKeys {
    pub fn ids(&self) -> KeyIds {
        KeyIds {
            current: KeyId::from_key(&self.current),
            previous: self.previous.as_ref().map(KeyId::from_key),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fingerprint_differs_by_key_and_excludes_key_bytes() {
        let id = |byte: u8| KeyId::from_key(&vec![byte; 32].into());
        assert_eq!(id(7), id(7));
        assert_ne!(id(7), id(8));
        assert_eq!(id(7).as_str().len(), 2 * ID_BYTES);
        assert!(!id(7).as_str().contains("0707"), "{}", id(7));
    }
}
