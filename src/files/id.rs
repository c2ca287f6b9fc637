//! Object and blob ids.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use sha2::{Digest, Sha256};

/// SHA-256 of an object's stored bytes or of a blob's plaintext. A repository's own id is random.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id([u8; 32]);

impl Id {
    /// Length of an id in bytes.
    pub(crate) const BYTES: usize = 32;

    /// Hashes `bytes` into an id.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// Hashes a list of ids.
    pub(crate) fn of_all(ids: &[Self]) -> Self {
        let mut hash = Sha256::new();
        ids.iter().for_each(|id| hash.update(id.0));
        Self(hash.finalize().into())
    }

    pub(crate) const fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    pub(crate) const fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Id({})", &hex::encode(self.0)[..8])
    }
}

impl FromStr for Id {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut bytes = [0; Self::BYTES];
        hex::decode_to_slice(text, &mut bytes).map_err(|_| "an id must be 64 hexadecimal digits")?;
        Ok(Self(bytes))
    }
}

impl Serialize for Id {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Id {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        <std::borrow::Cow<'de, str>>::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}
