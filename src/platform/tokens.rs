//! Tokens of hosts, the one-time registration token and `UPGRADE_TOKEN`; tokens of operators; and what the platform signs
//! of a slot's fence.
//!
//! A token is an HMAC-SHA256 of `PLATFORM_KEY` over machine, purpose and generation, so that user-data can be rendered
//! again after a kill. An operator's is one over its id, so that a repeated request gets the same token again. The database keeps only SHA-256 hashes; comparison takes the same time wherever they differ.

use ring::hmac;
use secrecy::{ExposeSecret, SecretSlice, SecretString};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use uuid::Uuid;

use crate::machine::epoch::Epoch;
use crate::machine::id::{MachineId, OperatorTokenId};
use crate::store::key::SlotPrefix;

/// Counts up when a machine's tokens are replaced.
const GENERATION: u32 = 1;

/// Of an operator's token: secret scanners find it as `svco_[0-9a-f]{32}_[0-9a-f]{64}`.
const OPERATOR_PREFIX: &str = "svco_";

/// What a token is for; each has its own prefix.
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

/// Makes the tokens of every machine.
pub struct TokenMint {
    key: hmac::Key,
}

impl TokenMint {
    pub fn new(platform_key: &SecretSlice<u8>) -> Self {
        Self { key: hmac::Key::new(hmac::HMAC_SHA256, platform_key.expose_secret()) }
    }

    /// `svcr_<machine>_<mac>` or `svcu_<machine>_<mac>`.
    pub fn token(&self, machine: MachineId, purpose: Purpose) -> SecretString {
        let subject = format!("svc host token\n{}\n{}\n{GENERATION}", machine, purpose.prefix());
        let mac = hex::encode(hmac::sign(&self.key, subject.as_bytes()));
        format!("{}{}_{mac}", purpose.prefix(), machine.0.simple()).into()
    }

    /// `svco_<id>_<mac>`.
    pub fn operator_token(&self, id: OperatorTokenId) -> SecretString {
        let mac = hex::encode(hmac::sign(&self.key, format!("svc operator token\n{id}").as_bytes()));
        format!("{OPERATOR_PREFIX}{}_{mac}", id.0.simple()).into()
    }

    /// The MAC by which the platform knows a fence of its own: a host can write the pointer, too. In hex.
    pub fn fence_proof(&self, slot: &SlotPrefix, epoch: Epoch, machine: MachineId) -> String {
        hex::encode(hmac::sign(&self.key, fence_subject(slot, epoch, machine).as_bytes()))
    }

    /// Whether the platform signed the fence for this machine.
    pub fn has_signed_fence(&self, slot: &SlotPrefix, epoch: Epoch, machine: MachineId, proof: &str) -> bool {
        let Ok(mac) = hex::decode(proof) else { return false };
        hmac::verify(&self.key, fence_subject(slot, epoch, machine).as_bytes(), &mac).is_ok()
    }

    pub fn hash(&self, machine: MachineId, purpose: Purpose) -> Vec<u8> {
        hash(self.token(machine, purpose).expose_secret())
    }
}

fn fence_subject(slot: &SlotPrefix, epoch: Epoch, machine: MachineId) -> String {
    format!("svc fence\n{}\n{epoch}\n{machine}", slot.pointer())
}

/// What the database keeps of a token.
pub fn hash(token: &str) -> Vec<u8> {
    Sha256::digest(token.as_bytes()).to_vec()
}

/// The machine that a token says it belongs to; nothing is proven by it.
pub fn claimed_machine(token: &str, purpose: Purpose) -> Option<MachineId> {
    claimed(token, purpose.prefix()).map(MachineId)
}

/// The id in an operator's token; nothing is proven by it.
pub fn claimed_operator_token(token: &str) -> Option<OperatorTokenId> {
    claimed(token, OPERATOR_PREFIX).map(OperatorTokenId)
}

fn claimed(token: &str, prefix: &str) -> Option<Uuid> {
    let (id, mac) = token.strip_prefix(prefix)?.split_once('_')?;
    if mac.len() != 64 || id.len() != 32 {
        return None;
    }
    Uuid::try_parse(id).ok()
}

/// Whether a token is the one whose hash is stored.
pub fn fits(token: &str, stored_hash: &[u8]) -> bool {
    hash(token).ct_eq(stored_hash).into()
}

/// Whether two secrets are equal; their lengths do not show either.
pub fn same_secret(given: &str, expected: &SecretString) -> bool {
    hash(given).ct_eq(&hash(expected.expose_secret())).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mint(byte: u8) -> TokenMint {
        TokenMint::new(&vec![byte; 32].into())
    }

    #[test]
    fn a_token_can_be_made_again_and_belongs_to_one_machine_purpose_and_key() {
        let (machine, other) = (MachineId::new(), MachineId::new());
        let token = mint(1).token(machine, Purpose::Registration);
        let stored = mint(1).hash(machine, Purpose::Registration);
        assert!(fits(token.expose_secret(), &stored));
        assert_eq!(claimed_machine(token.expose_secret(), Purpose::Registration), Some(machine));
        assert_eq!(claimed_machine(token.expose_secret(), Purpose::Upgrade), None);
        for wrong in [
            mint(1).token(other, Purpose::Registration),
            mint(1).token(machine, Purpose::Upgrade),
            mint(2).token(machine, Purpose::Registration),
        ] {
            assert!(!fits(wrong.expose_secret(), &stored));
        }
    }

    #[test]
    fn fence_is_signed_for_one_slot_epoch_and_machine() {
        let slot = |name: &str| SlotPrefix::new(&"user_1".parse().unwrap(), &name.parse().unwrap());
        let (machine, other) = (MachineId::new(), MachineId::new());
        let proof = mint(1).fence_proof(&slot("main"), Epoch(2), machine);
        assert!(mint(1).has_signed_fence(&slot("main"), Epoch(2), machine, &proof));
        assert!(!mint(1).has_signed_fence(&slot("other"), Epoch(2), machine, &proof));
        assert!(!mint(1).has_signed_fence(&slot("main"), Epoch(3), machine, &proof));
        assert!(!mint(1).has_signed_fence(&slot("main"), Epoch(2), other, &proof));
        assert!(!mint(2).has_signed_fence(&slot("main"), Epoch(2), machine, &proof));
        assert!(!mint(1).has_signed_fence(&slot("main"), Epoch(2), machine, "no hex"));
    }

    #[test]
    fn operator_token_is_found_by_its_id_and_belongs_to_one_key() {
        let id = OperatorTokenId::new();
        let token = mint(1).operator_token(id);
        let token = token.expose_secret();
        assert_eq!(claimed_operator_token(token), Some(id));
        assert_eq!(claimed_machine(token, Purpose::Upgrade), None);
        assert!(fits(token, &hash(mint(1).operator_token(id).expose_secret())));
        for other in [mint(2).operator_token(id), mint(1).operator_token(OperatorTokenId::new())] {
            assert!(!fits(other.expose_secret(), &hash(token)));
        }
        let cut = &token[..token.len() - 1];
        assert_eq!((claimed_operator_token(cut), claimed_operator_token("svco_")), (None, None));
    }

    #[test]
    fn text_that_is_no_token_claims_nothing() {
        for text in ["", "svcr_", "svcr__", "svcr_x_y", "svcr_00000000-0000-0000-0000-000000000000_"] {
            assert_eq!(claimed_machine(text, Purpose::Registration), None, "{text:?}");
        }
    }
}
