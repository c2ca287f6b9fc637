//! Issues and verifies host tokens (the one-time registration token and `UPGRADE_TOKEN`) and operator tokens, and signs
//! and verifies fences.
//!
//! A host token is an HMAC-SHA256 of machine, purpose and generation with `PLATFORM_KEY`, so that user-data can be
//! rendered again after a crash. An operator's token is an HMAC-SHA256 of the token's id, so that a repeated request
//! gets the same token. The database stores only SHA-256 hashes, which are compared in constant time.

use ring::hmac;
use secrecy::{ExposeSecret, SecretSlice, SecretString};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use uuid::Uuid;

use svc_machine::epoch::Epoch;
use svc_machine::id::{MachineId, OperatorTokenId};
use svc_store::key::SlotPrefix;

/// The generation of a machine's token. It is incremented when the `UPGRADE_TOKEN` rotates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Generation(pub u32);

impl Generation {
    /// The generation of the tokens in user-data.
    pub const FIRST: Self = Self(1);

    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

/// Prefix of operator tokens. Secret scanners can find them with the pattern `svco_[0-9a-f]{32}_[0-9a-f]{64}`.
const OPERATOR_PREFIX: &str = "svco_";

/// Purpose of a host token. Each purpose has its own prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Purpose {
    Registration,
    Upgrade,
}

impl Purpose {
    fn prefix(self) -> &'static str {
        match self {
            Self::Registration => "svcr_",
            Self::Upgrade => "svcu_",
        }
    }
}

/// Issues and verifies tokens, and signs and verifies fences.
pub struct TokenMint {
    key: hmac::Key,
    previous: Option<hmac::Key>,
}

impl TokenMint {
    pub fn new(platform_key: &SecretSlice<u8>) -> Self {
        Self { key: mac_key(platform_key), previous: None }
    }

    /// Also accepts MACs made with the previous platform key.
    #[must_use]
    pub fn with_previous(self, platform_key: Option<&SecretSlice<u8>>) -> Self {
        Self { previous: platform_key.map(mac_key), ..self }
    }

    /// Derives a token: `svcr_<machine>_<mac>`, `svcu_<machine>_<mac>`, or `svcu_<machine>_<generation>_<mac>` for a
    /// later generation.
    pub fn token(&self, machine: MachineId, purpose: Purpose, generation: Generation) -> SecretString {
        token(&self.key, machine, purpose, generation)
    }

    /// Derives a machine's first token from the key that matches the stored hash, so that user-data that is rendered
    /// again during a rotation of `PLATFORM_KEY` contains the same token. If neither key matches, the current key is
    /// used.
    pub fn first_token(&self, machine: MachineId, purpose: Purpose, stored_hash: &[u8]) -> SecretString {
        let first = Generation::FIRST;
        let stored = self.stored_token(machine, purpose, first, stored_hash);
        stored.unwrap_or_else(|| self.token(machine, purpose, first))
    }

    /// Derives the token that has the stored hash, from either key; `None` if neither key produces that hash.
    pub fn stored_token(
        &self,
        machine: MachineId,
        purpose: Purpose,
        generation: Generation,
        stored_hash: &[u8],
    ) -> Option<SecretString> {
        let mut tokens = self.keys().map(|key| token(key, machine, purpose, generation));
        tokens.find(|token| matches_hash(token.expose_secret(), stored_hash))
    }

    /// Returns whether the platform issued this token, with the current or the previous key. `claim` must be parsed
    /// from `token`.
    pub fn is_genuine(&self, token: &str, claim: TokenClaim, purpose: Purpose) -> bool {
        let Some((_, mac)) = token.rsplit_once('_') else { return false };
        let Ok(mac) = hex::decode(mac) else { return false };
        let subject = token_subject(claim.machine, purpose, claim.generation);
        self.keys().any(|key| hmac::verify(key, subject.as_bytes(), &mac).is_ok())
    }

    fn keys(&self) -> impl Iterator<Item = &hmac::Key> {
        std::iter::once(&self.key).chain(&self.previous)
    }

    /// Derives an operator's token: `svco_<id>_<mac>`.
    pub fn operator_token(&self, id: OperatorTokenId) -> SecretString {
        operator_token(&self.key, id)
    }

    /// Derives the operator's token that has the stored hash, from either key; `None` if neither key produces that
    /// hash.
    pub fn stored_operator_token(&self, id: OperatorTokenId, stored_hash: &[u8]) -> Option<SecretString> {
        let mut tokens = self.keys().map(|key| operator_token(key, id));
        tokens.find(|token| matches_hash(token.expose_secret(), stored_hash))
    }

    /// Returns a hex-encoded MAC that signs a fence, so that the platform recognizes its own fences: a host can write
    /// the pointer, too.
    pub fn fence_proof(&self, slot: &SlotPrefix, epoch: Epoch, machine: MachineId) -> String {
        hex::encode(hmac::sign(&self.key, fence_subject(slot, epoch, machine).as_bytes()))
    }

    /// Returns whether the current key signed the fence.
    pub fn is_fence_signed_with_current_key(
        &self,
        slot: &SlotPrefix,
        epoch: Epoch,
        machine: MachineId,
        proof: &str,
    ) -> bool {
        let Ok(mac) = hex::decode(proof) else { return false };
        hmac::verify(&self.key, fence_subject(slot, epoch, machine).as_bytes(), &mac).is_ok()
    }

    /// Returns whether the current or the previous key signed the fence.
    pub fn is_fence_signed(&self, slot: &SlotPrefix, epoch: Epoch, machine: MachineId, proof: &str) -> bool {
        let Ok(mac) = hex::decode(proof) else { return false };
        let subject = fence_subject(slot, epoch, machine);
        self.keys().any(|key| hmac::verify(key, subject.as_bytes(), &mac).is_ok())
    }

    /// Returns the hash of the token that is derived from the current platform key.
    pub fn token_hash(&self, machine: MachineId, purpose: Purpose, generation: Generation) -> Vec<u8> {
        hash(self.token(machine, purpose, generation).expose_secret())
    }
}

fn mac_key(platform_key: &SecretSlice<u8>) -> hmac::Key {
    hmac::Key::new(hmac::HMAC_SHA256, platform_key.expose_secret())
}

fn token(key: &hmac::Key, machine: MachineId, purpose: Purpose, generation: Generation) -> SecretString {
    let mac = hex::encode(hmac::sign(key, token_subject(machine, purpose, generation).as_bytes()));
    let generation_part =
        if generation == Generation::FIRST { String::new() } else { format!("{}_", generation.0) };
    format!("{}{}_{generation_part}{mac}", purpose.prefix(), machine.0.simple()).into()
}

fn operator_token(key: &hmac::Key, id: OperatorTokenId) -> SecretString {
    let mac = hex::encode(hmac::sign(key, format!("svc operator token\n{id}").as_bytes()));
    format!("{OPERATOR_PREFIX}{}_{mac}", id.0.simple()).into()
}

fn token_subject(machine: MachineId, purpose: Purpose, generation: Generation) -> String {
    format!("svc host token\n{machine}\n{}\n{}", purpose.prefix(), generation.0)
}

fn fence_subject(slot: &SlotPrefix, epoch: Epoch, machine: MachineId) -> String {
    format!("svc fence\n{}\n{epoch}\n{machine}", slot.pointer())
}

/// Returns a token's hash, as it is stored.
pub fn hash(token: &str) -> Vec<u8> {
    Sha256::digest(token.as_bytes()).to_vec()
}

/// Parses the id in an operator's token, without verification.
pub fn parse_operator_token_id(token: &str) -> Option<OperatorTokenId> {
    let (id, mac) = token.strip_prefix(OPERATOR_PREFIX)?.split_once('_')?;
    if mac.len() != 64 || id.len() != 32 {
        return None;
    }
    Uuid::try_parse(id).ok().map(OperatorTokenId)
}

/// The unverified content of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenClaim {
    pub machine: MachineId,
    pub generation: Generation,
}

/// Parses a token's content without verification.
pub fn parse_claim(token: &str, purpose: Purpose) -> Option<TokenClaim> {
    let (machine, rest) = token.strip_prefix(purpose.prefix())?.split_once('_')?;
    let (generation, mac) = match rest.split_once('_') {
        None => (Generation::FIRST, rest),
        Some((number, mac)) => {
            let generation = Generation(number.parse().ok()?);
            // Each generation has exactly one representation; the first generation has no number.
            let is_canonical = generation > Generation::FIRST && generation.0.to_string() == number;
            (is_canonical.then_some(generation)?, mac)
        }
    };
    if mac.len() != 64 || machine.len() != 32 {
        return None;
    }
    Some(TokenClaim { machine: Uuid::try_parse(machine).ok().map(MachineId)?, generation })
}

/// Returns whether a token has the stored hash.
pub fn matches_hash(token: &str, stored_hash: &[u8]) -> bool {
    hash(token).ct_eq(stored_hash).into()
}

/// Compares two secrets in constant time, without revealing their lengths.
pub fn is_same_secret(given: &str, expected: &SecretString) -> bool {
    hash(given).ct_eq(&hash(expected.expose_secret())).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mint(byte: u8) -> TokenMint {
        TokenMint::new(&vec![byte; 32].into())
    }

    #[test]
    fn token_is_reproducible_and_bound_to_its_subject() {
        let (machine, other) = (MachineId::new(), MachineId::new());
        let first = Generation::FIRST;
        let token = mint(1).token(machine, Purpose::Registration, first);
        let stored = mint(1).token_hash(machine, Purpose::Registration, first);
        assert!(matches_hash(token.expose_secret(), &stored));
        let claimed = parse_claim(token.expose_secret(), Purpose::Registration);
        assert_eq!(claimed, Some(TokenClaim { machine, generation: first }));
        assert_eq!(parse_claim(token.expose_secret(), Purpose::Upgrade), None);
        for wrong in [
            mint(1).token(other, Purpose::Registration, first),
            mint(1).token(machine, Purpose::Upgrade, first),
            mint(1).token(machine, Purpose::Registration, first.next()),
            mint(2).token(machine, Purpose::Registration, first),
        ] {
            assert!(!matches_hash(wrong.expose_secret(), &stored));
        }
    }

    #[test]
    fn is_genuine_rejects_changed_generation_and_other_key() {
        let machine = MachineId::new();
        let token = mint(1).token(machine, Purpose::Upgrade, Generation(7));
        let token = token.expose_secret();
        let claimed = parse_claim(token, Purpose::Upgrade).unwrap();
        assert_eq!(claimed, TokenClaim { machine, generation: Generation(7) });
        assert!(mint(1).is_genuine(token, claimed, Purpose::Upgrade));
        assert!(!mint(2).is_genuine(token, claimed, Purpose::Upgrade));
        let raised = token.replace("_7_", "_8_");
        let claimed = parse_claim(&raised, Purpose::Upgrade).unwrap();
        assert!(!mint(1).is_genuine(&raised, claimed, Purpose::Upgrade), "the MAC covers the generation");
        for other in ["_07_", "_+7_", "_1_", "_0_", "_4294967296_", "__"] {
            assert_eq!(parse_claim(&token.replace("_7_", other), Purpose::Upgrade), None, "{other}");
        }
    }

    #[test]
    fn previous_key_verifies_but_issues_no_new_token() {
        let (machine, first) = (MachineId::new(), Generation::FIRST);
        let both = mint(2).with_previous(Some(&vec![1; 32].into()));
        let old = mint(1).token(machine, Purpose::Upgrade, Generation(3));
        let claimed = parse_claim(old.expose_secret(), Purpose::Upgrade).unwrap();
        assert!(both.is_genuine(old.expose_secret(), claimed, Purpose::Upgrade));
        let new_token = both.token(machine, Purpose::Upgrade, Generation(4));
        assert_eq!(
            new_token.expose_secret(),
            mint(2).token(machine, Purpose::Upgrade, Generation(4)).expose_secret()
        );
        let stored = mint(1).token_hash(machine, Purpose::Registration, first);
        let again = both.first_token(machine, Purpose::Registration, &stored);
        assert!(matches_hash(again.expose_secret(), &stored), "user-data is unchanged");
        let slot = SlotPrefix::new(&"user_1".parse().unwrap(), &"main".parse().unwrap());
        let proof = mint(1).fence_proof(&slot, Epoch(2), machine);
        assert!(both.is_fence_signed(&slot, Epoch(2), machine, &proof));
        assert!(!mint(2).is_fence_signed(&slot, Epoch(2), machine, &proof));
        assert!(!both.is_fence_signed_with_current_key(&slot, Epoch(2), machine, &proof));
        let current = both.fence_proof(&slot, Epoch(2), machine);
        assert!(both.is_fence_signed_with_current_key(&slot, Epoch(2), machine, &current));
        let id = OperatorTokenId::new();
        let issued = mint(1).operator_token(id);
        let again = both.stored_operator_token(id, &hash(issued.expose_secret())).unwrap();
        assert_eq!(again.expose_secret(), issued.expose_secret());
        assert!(mint(2).stored_operator_token(id, &hash(issued.expose_secret())).is_none());
    }

    #[test]
    fn fence_proof_binds_slot_epoch_and_machine() {
        let slot = |name: &str| SlotPrefix::new(&"user_1".parse().unwrap(), &name.parse().unwrap());
        let (machine, other) = (MachineId::new(), MachineId::new());
        let proof = mint(1).fence_proof(&slot("main"), Epoch(2), machine);
        assert!(mint(1).is_fence_signed(&slot("main"), Epoch(2), machine, &proof));
        assert!(!mint(1).is_fence_signed(&slot("other"), Epoch(2), machine, &proof));
        assert!(!mint(1).is_fence_signed(&slot("main"), Epoch(3), machine, &proof));
        assert!(!mint(1).is_fence_signed(&slot("main"), Epoch(2), other, &proof));
        assert!(!mint(2).is_fence_signed(&slot("main"), Epoch(2), machine, &proof));
        assert!(!mint(1).is_fence_signed(&slot("main"), Epoch(2), machine, "not hex"));
    }

    #[test]
    fn operator_token_is_bound_to_its_id_and_key() {
        let id = OperatorTokenId::new();
        let token = mint(1).operator_token(id);
        let token = token.expose_secret();
        assert_eq!(parse_operator_token_id(token), Some(id));
        assert_eq!(parse_claim(token, Purpose::Upgrade), None);
        assert!(matches_hash(token, &hash(mint(1).operator_token(id).expose_secret())));
        for other in [mint(2).operator_token(id), mint(1).operator_token(OperatorTokenId::new())] {
            assert!(!matches_hash(other.expose_secret(), &hash(token)));
        }
        let truncated = &token[..token.len() - 1];
        assert_eq!((parse_operator_token_id(truncated), parse_operator_token_id("svco_")), (None, None));
    }

    #[test]
    fn invalid_token_has_no_claim() {
        for text in ["", "svcr_", "svcr__", "svcr_x_y", "svcr_00000000-0000-0000-0000-000000000000_"] {
            assert_eq!(parse_claim(text, Purpose::Registration), None, "{text:?}");
        }
    }
}
