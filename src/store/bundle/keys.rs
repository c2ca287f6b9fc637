//! Keys trusted to sign release manifests, and how one set of keys follows another on a host.
//!
//! The invariants: a key set has a key, and one of its keys has signed the manifest that brings it, so that no host is left
//! with keys that never signed anything. A host's sequence only grows, so that an older release brings no key back.

use std::fmt;
use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::signature::{ED25519, UnparsedPublicKey};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{ManifestError, Signed, signatures};

/// Before the manifest's bytes in what is signed, so that a signature is of nothing else.
const CONTEXT: &[u8] = b"svc-host-bundle-manifest-v1\n";
/// Keys that are trusted at one time, and signatures in one file.
pub const MAX_KEYS: usize = 16;
/// A mistyped sequence must not leave a host with one that no later set can exceed.
const MAX_SEQUENCE_STEP: u32 = 1000;

/// The highest sequence that a host at this one takes.
pub const fn max_sequence_after(sequence: u32) -> u32 {
    sequence.saturating_add(MAX_SEQUENCE_STEP)
}

/// A raw Ed25519 public key.
#[derive(Clone, PartialEq, Eq)]
struct PublicKey([u8; 32]);

impl PublicKey {
    /// The first 16 hexadecimal digits of the key's SHA-256.
    fn id(&self) -> String {
        hex::encode(&Sha256::digest(self.0)[..8])
    }
}

/// Trusted keys: base64 of raw Ed25519 keys, separated by commas.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct TrustedKeys(Vec<PublicKey>);

impl fmt::Debug for TrustedKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.ids()).finish()
    }
}

impl fmt::Display for TrustedKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.texts().join(","))
    }
}

/// Keys that are not such a list.
#[derive(Debug, thiserror::Error)]
#[error("must be base64 of 32 bytes, up to {MAX_KEYS} separated by commas")]
pub struct KeysError;

impl FromStr for TrustedKeys {
    type Err = KeysError;

    fn from_str(text: &str) -> Result<Self, KeysError> {
        Self::of(text.split(','))
    }
}

impl TrustedKeys {
    fn of<'a>(texts: impl Iterator<Item = &'a str>) -> Result<Self, KeysError> {
        let parse = |one: &str| {
            let raw = STANDARD.decode(one.trim()).map_err(|_| KeysError)?;
            raw.try_into().map(PublicKey).map_err(|_| KeysError)
        };
        let keys: Vec<PublicKey> = texts.map(parse).collect::<Result<_, _>>()?;
        if keys.len() > MAX_KEYS { Err(KeysError) } else { Ok(Self(keys)) }
    }

    fn texts(&self) -> Vec<String> {
        self.0.iter().map(|key| STANDARD.encode(key.0)).collect()
    }

    /// Of each key, the first 16 hexadecimal digits of its SHA-256.
    pub fn ids(&self) -> Vec<String> {
        self.0.iter().map(PublicKey::id).collect()
    }

    fn sorted_ids(&self) -> Vec<String> {
        let mut ids = self.ids();
        ids.sort();
        ids
    }

    /// Needs one valid signature by a trusted key; an invalid one by a trusted key is refused.
    pub(super) fn check(&self, manifest: &[u8], signature: &[u8]) -> Result<(), ManifestError> {
        if self.0.is_empty() {
            return Err(ManifestError::NoKeys);
        }
        let signed = [CONTEXT, manifest].concat();
        let (mut ids, mut good) = (Vec::new(), 0);
        for (id, bytes) in signatures(signature)? {
            match self.0.iter().find(|key| key.id() == id) {
                Some(key) => {
                    UnparsedPublicKey::new(&ED25519, key.0)
                        .verify(&signed, &bytes)
                        .map_err(|_| ManifestError::WrongSignature { id })?;
                    good += 1;
                }
                None => ids.push(id),
            }
        }
        if good == 0 { Err(ManifestError::UnknownKey { ids }) } else { Ok(()) }
    }
}

/// What a host trusts: the keys, and the number of the set, which grows with each.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "WrittenKeySet", into = "WrittenKeySet")]
pub struct KeySet {
    /// 0 for a host's initial keys, unless user-data sets it.
    pub sequence: u32,
    pub keys: TrustedKeys,
}

/// `{"sequence":1,"keys":["…"]}`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenKeySet {
    sequence: u32,
    keys: Vec<String>,
}

impl From<KeySet> for WrittenKeySet {
    fn from(set: KeySet) -> Self {
        Self { sequence: set.sequence, keys: set.keys.texts() }
    }
}

impl TryFrom<WrittenKeySet> for KeySet {
    type Error = String;

    fn try_from(written: WrittenKeySet) -> Result<Self, String> {
        let keys = TrustedKeys::of(written.keys.iter().map(String::as_str));
        let keys = keys.map_err(|error| format!("trustedKeys {error}"))?;
        let mut ids = keys.sorted_ids();
        ids.dedup();
        match (ids.len(), written.sequence) {
            (0, _) => Err("trustedKeys has no key: a host would trust no release any more".to_owned()),
            (distinct, _) if distinct < keys.0.len() => Err("trustedKeys has a key twice".to_owned()),
            (_, 0) => Err("the sequence of trustedKeys must be at least 1".to_owned()),
            (_, sequence) => Ok(Self { sequence, keys }),
        }
    }
}

/// Why a key set does not follow the one that is trusted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeySetError {
    #[error(
        "none of the keys of its trustedKeys ({}) has signed it: sign it with one that stays trusted, too", .ids.join(", ")
    )]
    Unproven { ids: Vec<String> },
    #[error("its trustedKeys have the sequence {sequence}, under which other keys ({}) are trusted here: give them a higher one", .ids.join(", "))]
    SequenceTaken { sequence: u32, ids: Vec<String> },
    #[error("its trustedKeys have the sequence {found}, and here at most {max} can follow {current}")]
    SequenceTooHigh { found: u32, max: u32, current: u32 },
}

impl KeySet {
    /// Whether one of its own keys has signed the manifest that brings it.
    ///
    /// # Errors
    /// [`KeySetError::Unproven`], and [`ManifestError::WrongSignature`] where a signature by one of them is not good.
    pub(super) fn is_proven_by(&self, signed: &Signed) -> Result<(), ManifestError> {
        self.keys.check(&signed.manifest, &signed.signature).map_err(|error| match error {
            ManifestError::UnknownKey { .. } => KeySetError::Unproven { ids: self.keys.ids() }.into(),
            error => error,
        })
    }

    /// The set to trust after this one, where the offered one is another and later.
    ///
    /// # Errors
    /// [`KeySetError`].
    pub fn successor(&self, offered: &Self) -> Result<Option<Self>, KeySetError> {
        let max = max_sequence_after(self.sequence);
        match offered.sequence {
            // An older release never changes the trusted keys.
            sequence if sequence < self.sequence => Ok(None),
            sequence if sequence == self.sequence => {
                let is_same = offered.keys.sorted_ids() == self.keys.sorted_ids();
                let ids = self.keys.ids();
                if is_same { Ok(None) } else { Err(KeySetError::SequenceTaken { sequence, ids }) }
            }
            found if found > max => Err(KeySetError::SequenceTooHigh { found, max, current: self.sequence }),
            _ => Ok(Some(offered.clone())),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(n: u8) -> String {
        STANDARD.encode([n; 32])
    }

    fn set(sequence: u32, keys: &[u8]) -> KeySet {
        let keys: Vec<String> = keys.iter().map(|n| key(*n)).collect();
        KeySet { sequence, keys: keys.join(",").parse().unwrap() }
    }

    #[test]
    fn key_set_is_read_as_it_is_written() {
        let text = serde_json::to_string(&set(3, &[1, 2])).unwrap();
        assert_eq!(text, format!("{{\"sequence\":3,\"keys\":[\"{}\",\"{}\"]}}", key(1), key(2)));
        assert_eq!(serde_json::from_str::<KeySet>(&text).unwrap(), set(3, &[1, 2]));
    }

    #[test]
    fn key_set_that_would_lock_hosts_out_is_not_read() {
        let read = |sequence: u32, keys: &[String]| {
            let text = serde_json::json!({"sequence": sequence, "keys": keys}).to_string();
            serde_json::from_str::<KeySet>(&text).map_err(|error| error.to_string())
        };
        read(1, &[key(1)]).unwrap();
        let many: Vec<String> = (0..17).map(key).collect();
        for (sequence, keys, why) in [
            (1, &[] as &[String], "no key"),
            (0, &[key(1)], "at least 1"),
            (1, &[key(1), key(1)], "twice"),
            (1, &["AAAA".to_owned()], "base64 of 32 bytes"),
            (1, &many, "up to 16"),
        ] {
            let error = read(sequence, keys).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        let misspelt = format!("{{\"sequence\":1,\"keys\":[\"{}\"],\"key\":[]}}", key(1));
        assert!(serde_json::from_str::<KeySet>(&misspelt).is_err());
    }

    #[test]
    fn older_set_changes_nothing_and_other_keys_need_a_new_sequence() {
        let trusted = set(2, &[1, 2]);
        assert_eq!(trusted.successor(&set(1, &[1])), Ok(None));
        assert_eq!(trusted.successor(&set(2, &[2, 1])), Ok(None), "their order does not count");
        assert!(matches!(trusted.successor(&set(2, &[2])), Err(KeySetError::SequenceTaken { .. })));
        assert_eq!(trusted.successor(&set(3, &[2])), Ok(Some(set(3, &[2]))));
        assert_eq!(trusted.successor(&set(1002, &[2])), Ok(Some(set(1002, &[2]))));
        assert!(matches!(trusted.successor(&set(1003, &[2])), Err(KeySetError::SequenceTooHigh { .. })));
        let last = set(u32::MAX - 1, &[1]);
        assert_eq!(last.successor(&set(u32::MAX, &[2])), Ok(Some(set(u32::MAX, &[2]))));
    }

    proptest! {
        /// Whatever is offered, in whatever order: the sequence never falls, and no removed key comes back with an older set.
        #[test]
        fn sequence_of_trusted_keys_never_falls(offers in proptest::collection::vec((1u32..2000, 1u8..5), 1..20)) {
            let mut trusted = set(0, &[1]);
            for (sequence, n) in offers {
                let offered = set(sequence, &[n]);
                let before = trusted.clone();
                if let Ok(Some(next)) = trusted.successor(&offered) {
                    trusted = next;
                }
                prop_assert!(trusted.sequence >= before.sequence);
                prop_assert!(trusted.sequence > before.sequence || trusted == before);
                prop_assert!(!trusted.keys.0.is_empty());
            }
        }
    }
}
