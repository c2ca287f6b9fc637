//! The keys that are trusted to sign release manifests, and the succession of key sets on a host.
//!
//! Invariants: a manifest's key set is not empty, and one of its keys has signed that manifest, so that a host that
//! adopts the set trusts at least one key that can still sign. A host's sequence number only increases, so that an
//! older release never restores a removed key.

use std::fmt;
use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::signature::{ED25519, UnparsedPublicKey};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{ManifestError, SignedManifest, parse_signatures};

/// Prefix of the signed bytes, so that a signature is valid only for manifests.
const SIGNATURE_CONTEXT: &[u8] = b"svc-host-bundle-manifest-v1\n";
/// Maximum number of trusted keys, and of signatures in a file.
pub const MAX_KEYS: usize = 16;
/// Maximum increase of the sequence number, so that a typo does not prevent later increases.
const MAX_SEQUENCE_STEP: u32 = 1000;

/// Returns the highest sequence number that a host with this one accepts.
pub const fn max_sequence_after(sequence: u32) -> u32 {
    sequence.saturating_add(MAX_SEQUENCE_STEP)
}

/// A raw Ed25519 public key.
#[derive(Clone, PartialEq, Eq)]
struct PublicKey([u8; 32]);

impl PublicKey {
    /// Returns the first 16 hexadecimal digits of the key's SHA-256.
    fn id(&self) -> String {
        hex::encode(&Sha256::digest(self.0)[..8])
    }
}

/// The keys that are trusted. Their text form is the base64 of each raw Ed25519 key, separated by commas.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct TrustedKeys(Vec<PublicKey>);

impl fmt::Debug for TrustedKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.ids()).finish()
    }
}

impl fmt::Display for TrustedKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_base64().join(","))
    }
}

/// An invalid key list.
#[derive(Debug, thiserror::Error)]
#[error("must be up to {MAX_KEYS} keys separated by commas, each the base64 of 32 bytes")]
pub struct KeyListError;

impl FromStr for TrustedKeys {
    type Err = KeyListError;

    fn from_str(text: &str) -> Result<Self, KeyListError> {
        Self::from_base64(text.split(','))
    }
}

impl TrustedKeys {
    fn from_base64<'a>(texts: impl Iterator<Item = &'a str>) -> Result<Self, KeyListError> {
        let parse = |text: &str| {
            let raw = STANDARD.decode(text.trim()).map_err(|_| KeyListError)?;
            raw.try_into().map(PublicKey).map_err(|_| KeyListError)
        };
        let keys: Vec<PublicKey> = texts.map(parse).collect::<Result<_, _>>()?;
        if keys.len() > MAX_KEYS { Err(KeyListError) } else { Ok(Self(keys)) }
    }

    fn to_base64(&self) -> Vec<String> {
        self.0.iter().map(|key| STANDARD.encode(key.0)).collect()
    }

    /// Returns the first 16 hexadecimal digits of each key's SHA-256.
    pub fn ids(&self) -> Vec<String> {
        self.0.iter().map(PublicKey::id).collect()
    }

    fn sorted_ids(&self) -> Vec<String> {
        let mut ids = self.ids();
        ids.sort();
        ids
    }

    /// Requires at least one valid signature by a trusted key, and no invalid signature by a trusted key.
    pub(super) fn verify_signatures(
        &self,
        manifest: &[u8],
        signature_file: &[u8],
    ) -> Result<(), ManifestError> {
        if self.0.is_empty() {
            return Err(ManifestError::NoKeys);
        }
        let signed = [SIGNATURE_CONTEXT, manifest].concat();
        let (mut unknown_ids, mut valid) = (Vec::new(), 0);
        for (id, bytes) in parse_signatures(signature_file)? {
            match self.0.iter().find(|key| key.id() == id) {
                Some(key) => {
                    UnparsedPublicKey::new(&ED25519, key.0)
                        .verify(&signed, &bytes)
                        .map_err(|_| ManifestError::InvalidSignature { id })?;
                    valid += 1;
                }
                None => unknown_ids.push(id),
            }
        }
        if valid == 0 { Err(ManifestError::UnknownKey { ids: unknown_ids }) } else { Ok(()) }
    }
}

/// The keys that a host trusts, with a sequence number that increases with each set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "KeySetJson", into = "KeySetJson")]
pub struct KeySet {
    /// 0 for a host's initial keys, unless user-data sets it.
    pub sequence: u32,
    pub keys: TrustedKeys,
}

/// `{"sequence":1,"keys":["…"]}`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeySetJson {
    sequence: u32,
    keys: Vec<String>,
}

impl From<KeySet> for KeySetJson {
    fn from(set: KeySet) -> Self {
        Self { sequence: set.sequence, keys: set.keys.to_base64() }
    }
}

impl TryFrom<KeySetJson> for KeySet {
    type Error = String;

    fn try_from(json: KeySetJson) -> Result<Self, String> {
        let keys = TrustedKeys::from_base64(json.keys.iter().map(String::as_str));
        let keys = keys.map_err(|error| format!("trustedKeys {error}"))?;
        let mut ids = keys.sorted_ids();
        ids.dedup();
        match (ids.len(), json.sequence) {
            (0, _) => Err("trustedKeys has no key: a host would no longer trust any release".to_owned()),
            (distinct, _) if distinct < keys.0.len() => {
                Err("trustedKeys contains a key more than once".to_owned())
            }
            (_, 0) => Err("the sequence of trustedKeys must be at least 1".to_owned()),
            (_, sequence) => Ok(Self { sequence, keys }),
        }
    }
}

/// The reason a key set cannot replace the trusted one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeySetError {
    #[error(
        "none of the keys in its trustedKeys ({}) has signed it: also sign it with one of them", .ids.join(", ")
    )]
    Unproven { ids: Vec<String> },
    #[error("the sequence of its trustedKeys is {sequence}, but other keys ({}) with that sequence are trusted here: use a higher sequence", .ids.join(", "))]
    SequenceTaken { sequence: u32, ids: Vec<String> },
    #[error(
        "the sequence of its trustedKeys is {found}, but the current one here is {current}: use at most {max}"
    )]
    SequenceTooHigh { found: u32, max: u32, current: u32 },
}

impl KeySet {
    /// Checks that one of the set's keys has signed the manifest that contains the set.
    ///
    /// # Errors
    /// [`KeySetError::Unproven`] if none has signed it, [`ManifestError::InvalidSignature`] if a signature by one of
    /// them is invalid, and [`ManifestError::MalformedSignature`] if the signature file is malformed.
    pub(super) fn check_signed_by_own_key(&self, signed: &SignedManifest) -> Result<(), ManifestError> {
        self.keys.verify_signatures(&signed.manifest, &signed.signature).map_err(|error| match error {
            ManifestError::UnknownKey { .. } => KeySetError::Unproven { ids: self.keys.ids() }.into(),
            error => error,
        })
    }

    /// Returns the offered set if its sequence number is higher than this one's; `None` if the offered set is older
    /// or the same.
    ///
    /// # Errors
    /// [`KeySetError::SequenceTaken`] if the sequence numbers are equal but the keys differ, and
    /// [`KeySetError::SequenceTooHigh`] if the offered number is higher than [`max_sequence_after`] allows.
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
    fn key_set_round_trips() {
        let text = serde_json::to_string(&set(3, &[1, 2])).unwrap();
        assert_eq!(text, format!("{{\"sequence\":3,\"keys\":[\"{}\",\"{}\"]}}", key(1), key(2)));
        assert_eq!(serde_json::from_str::<KeySet>(&text).unwrap(), set(3, &[1, 2]));
    }

    #[test]
    fn key_set_refuses_invalid_sets() {
        let parse = |sequence: u32, keys: &[String]| {
            let text = serde_json::json!({"sequence": sequence, "keys": keys}).to_string();
            serde_json::from_str::<KeySet>(&text).map_err(|error| error.to_string())
        };
        parse(1, &[key(1)]).unwrap();
        let many: Vec<String> = (0..17).map(key).collect();
        for (sequence, keys, expected) in [
            (1, &[] as &[String], "no key"),
            (0, &[key(1)], "at least 1"),
            (1, &[key(1), key(1)], "more than once"),
            (1, &["AAAA".to_owned()], "base64 of 32 bytes"),
            (1, &many, "up to 16"),
        ] {
            let error = parse(sequence, keys).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        let misspelled = format!("{{\"sequence\":1,\"keys\":[\"{}\"],\"key\":[]}}", key(1));
        assert!(serde_json::from_str::<KeySet>(&misspelled).is_err());
    }

    #[test]
    fn successor_requires_a_higher_sequence() {
        let trusted = set(2, &[1, 2]);
        assert_eq!(trusted.successor(&set(1, &[1])), Ok(None));
        assert_eq!(trusted.successor(&set(2, &[2, 1])), Ok(None), "the order of the keys mattered");
        assert!(matches!(trusted.successor(&set(2, &[2])), Err(KeySetError::SequenceTaken { .. })));
        assert_eq!(trusted.successor(&set(3, &[2])), Ok(Some(set(3, &[2]))));
        assert_eq!(trusted.successor(&set(1002, &[2])), Ok(Some(set(1002, &[2]))));
        assert!(matches!(trusted.successor(&set(1003, &[2])), Err(KeySetError::SequenceTooHigh { .. })));
        let last = set(u32::MAX - 1, &[1]);
        assert_eq!(last.successor(&set(u32::MAX, &[2])), Ok(Some(set(u32::MAX, &[2]))));
    }

    proptest! {
        /// For any offered sets in any order, the sequence number never decreases, and an older set never restores a
        /// removed key.
        #[test]
        fn sequence_never_decreases(offers in proptest::collection::vec((1u32..2000, 1u8..5), 1..20)) {
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
