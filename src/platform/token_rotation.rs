//! The rotation of a machine's `UPGRADE_TOKEN`, pure: decides which tokens are accepted, and which one a heartbeat's
//! response offers to the host.
//!
//! The host stores the next token before it sends a heartbeat with it, and that heartbeat makes the platform retire
//! the previous one after an overlap. If the database was restored from a copy, a token may have a later generation
//! than the database records: if the platform made it, it is accepted, and the database catches up.
//!
//! The invariant: a token that a host has stored is accepted until the host has sent a heartbeat with a later one.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use secrecy::{ExposeSecret, SecretString};

use super::tokens::{Generation, Purpose, TokenClaim, TokenMint, matches_hash};
use svc_machine::id::MachineId;

/// Places where a test may stop the process, in the order in which they are reached.
pub const FAILPOINTS: &[&str] = &["token-take-up-before-commit", "token-take-up-after-commit"];

/// Schedule of token rotation.
#[derive(Debug, Clone, Copy)]
pub struct TokenTiming {
    /// Age at which a token gets a successor.
    pub rotate: Duration,
    /// How long a token is accepted after a heartbeat with its successor.
    pub overlap: Duration,
}

/// A machine's token as stored in the database.
#[derive(Debug, Clone)]
pub struct UpgradeToken {
    pub hash: Vec<u8>,
    pub generation: Generation,
    /// Time of the first heartbeat of this generation, or of the machine's creation.
    pub rotated_at: Timestamp,
    /// Since when an operator requests a later generation.
    pub requested_at: Option<Timestamp>,
    pub previous: Option<PreviousToken>,
}

#[derive(Debug, Clone)]
pub struct PreviousToken {
    pub hash: Vec<u8>,
    pub until: Timestamp,
}

/// The status of a token that a host presents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenStatus {
    Current,
    /// The previous one, within its overlap.
    Previous,
    /// Made by the platform for a later generation than the stored one.
    Later(Generation),
    Refused,
}

/// The token that a heartbeat's response offers to a host.
#[derive(Debug, Clone)]
pub enum TokenOffer {
    /// The stored token, which the host does not use.
    Stored(SecretString),
    /// A token of a later generation, to be made with the current platform key. None is made while processes with
    /// another current key run, which would replace each other's tokens.
    Next(Generation),
}

impl UpgradeToken {
    pub fn judge(&self, token: &str, claim: TokenClaim, mint: &TokenMint, now: Timestamp) -> TokenStatus {
        if matches_hash(token, &self.hash) {
            return TokenStatus::Current;
        }
        if self
            .previous
            .as_ref()
            .is_some_and(|previous| now < previous.until && matches_hash(token, &previous.hash))
        {
            return TokenStatus::Previous;
        }
        if claim.generation > self.generation && mint.has_made(token, claim, Purpose::Upgrade) {
            return TokenStatus::Later(claim.generation);
        }
        TokenStatus::Refused
    }

    /// The state after the first heartbeat of a later generation.
    #[must_use]
    pub fn advanced(self, to: Generation, hash: Vec<u8>, overlap: Duration, now: Timestamp) -> Self {
        if to <= self.generation {
            return self;
        }
        let overlap = SignedDuration::try_from(overlap).unwrap_or(SignedDuration::MAX);
        let until = now.saturating_add(overlap).unwrap_or(Timestamp::MAX);
        let previous = Some(PreviousToken { hash: self.hash, until });
        Self { hash, generation: to, rotated_at: now, requested_at: None, previous }
    }

    /// The token to offer to a host that presented one of this status; `None`: it keeps its token.
    pub fn offer(
        &self,
        machine: MachineId,
        standing: TokenStatus,
        mint: &TokenMint,
        timing: TokenTiming,
        now: Timestamp,
    ) -> Option<TokenOffer> {
        match standing {
            TokenStatus::Refused | TokenStatus::Later(_) => None,
            // It lost the response, or went back to an earlier file.
            TokenStatus::Previous => {
                let stored = mint.stored_token(machine, Purpose::Upgrade, self.generation, &self.hash);
                Some(stored.map_or_else(|| TokenOffer::Next(self.generation.next()), TokenOffer::Stored))
            }
            TokenStatus::Current => {
                let is_due = self.requested_at.is_some() || self.is_old(timing.rotate, now);
                let is_due = is_due || !self.is_of_current_key(machine, mint);
                is_due.then(|| TokenOffer::Next(self.generation.next()))
            }
        }
    }

    fn is_old(&self, rotate: Duration, now: Timestamp) -> bool {
        now.duration_since(self.rotated_at) >= SignedDuration::try_from(rotate).unwrap_or(SignedDuration::MAX)
    }

    /// Whether the current platform key made the stored token.
    pub fn is_of_current_key(&self, machine: MachineId, mint: &TokenMint) -> bool {
        is_made_by_current_key(mint, machine, self.generation, &self.hash)
    }
}

/// Whether the current platform key made the token with this hash.
pub fn is_made_by_current_key(
    mint: &TokenMint,
    machine: MachineId,
    generation: Generation,
    hash: &[u8],
) -> bool {
    matches_hash(mint.token(machine, Purpose::Upgrade, generation).expose_secret(), hash)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokens::{hash, parse_claim};
    use proptest::prelude::*;

    const TIMING: TokenTiming =
        TokenTiming { rotate: Duration::from_secs(1000), overlap: Duration::from_secs(100) };

    /// Events between a host and the platform.
    #[derive(Debug, Clone)]
    enum Act {
        Wait(i64),
        Request,
        /// A heartbeat whose response the host stores, or loses at one of two places.
        Beat(Loss),
        /// The sync agent is killed and another process reads the file.
        Restart,
        CopyDatabase,
        RestoreDatabase,
        /// The operator restarts the first of the platform's processes with another key. The other processes still
        /// use the current one, which becomes the previous one when they restart.
        BeginKeyChange,
        /// The other processes restart.
        EndKeyChange,
        /// The operator removes the previous key, if the platform says that it is not needed.
        DropKey,
    }

    #[derive(Debug, Clone, Copy)]
    enum Loss {
        Nothing,
        Response,
        /// Killed while it writes the file: the old content stays.
        Write,
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            3 => (1_i64..1500).prop_map(Act::Wait),
            2 => Just(Act::Request),
            6 => Just(Act::Beat(Loss::Nothing)),
            2 => Just(Act::Beat(Loss::Response)),
            2 => Just(Act::Beat(Loss::Write)),
            1 => Just(Act::Restart),
            1 => Just(Act::CopyDatabase),
            1 => Just(Act::RestoreDatabase),
            2 => Just(Act::BeginKeyChange),
            2 => Just(Act::EndKeyChange),
            1 => Just(Act::DropKey),
        ]
    }

    struct World {
        machine: MachineId,
        now: Timestamp,
        keys: (u8, Option<u8>),
        /// While processes of both current keys run: the next call reaches a process with the other key.
        is_mixed: bool,
        row: UpgradeToken,
        copy: Option<UpgradeToken>,
        /// The token in the host's file.
        file: SecretString,
        /// Every earlier token, of which an attacker may have a copy.
        copied: Vec<SecretString>,
    }

    fn mint(keys: (u8, Option<u8>)) -> TokenMint {
        let previous = keys.1.map(|key| vec![key; 32].into());
        TokenMint::new(&vec![keys.0; 32].into()).with_previous(previous.as_ref())
    }

    impl World {
        fn new() -> Self {
            let (machine, now, keys) = (MachineId::new(), Timestamp::UNIX_EPOCH, (1, None));
            let file = mint(keys).token(machine, Purpose::Upgrade, Generation::FIRST);
            let row = UpgradeToken {
                hash: hash(file.expose_secret()),
                generation: Generation::FIRST,
                rotated_at: now,
                requested_at: None,
                previous: None,
            };
            Self { machine, now, keys, is_mixed: false, row, copy: None, file, copied: Vec::new() }
        }

        fn judge(&self, token: &SecretString) -> TokenStatus {
            let token = token.expose_secret();
            self.row.judge(token, parse_claim(token, Purpose::Upgrade).unwrap(), &mint(self.keys), self.now)
        }

        /// The next call reaches a process with the other current key.
        fn alternate(&mut self) {
            if let (true, (current, Some(previous))) = (self.is_mixed, self.keys) {
                self.keys = (previous, Some(current));
            }
        }

        fn beat(&mut self, loss: Loss) {
            self.alternate();
            let standing = self.judge(&self.file);
            assert_ne!(standing, TokenStatus::Refused, "the host is locked out");
            let (row, mint) = (self.row.clone(), mint(self.keys));
            let (row, standing) = match standing {
                TokenStatus::Later(generation) => {
                    let hash = hash(self.file.expose_secret());
                    (row.advanced(generation, hash, TIMING.overlap, self.now), TokenStatus::Current)
                }
                standing => (row, standing),
            };
            let offer = row.offer(self.machine, standing, &mint, TIMING, self.now);
            self.row = row;
            let next = match offer {
                Some(TokenOffer::Stored(token)) => Some(token),
                Some(TokenOffer::Next(generation)) if !self.is_mixed => {
                    Some(mint.token(self.machine, Purpose::Upgrade, generation))
                }
                Some(TokenOffer::Next(_)) | None => None,
            };
            if let (Some(next), Loss::Nothing) = (next, loss) {
                self.copied.push(std::mem::replace(&mut self.file, next));
            }
        }

        fn take(&mut self, act: &Act) {
            match *act {
                Act::Wait(seconds) => {
                    self.now = self.now.saturating_add(SignedDuration::from_secs(seconds)).unwrap();
                }
                Act::Request => self.row.requested_at = Some(self.now),
                Act::Beat(loss) => self.beat(loss),
                Act::Restart => {}
                Act::CopyDatabase => self.copy = Some(self.row.clone()),
                Act::RestoreDatabase => self.row = self.copy.clone().unwrap_or_else(|| self.row.clone()),
                Act::BeginKeyChange if self.keys.1.is_none() => {
                    self.keys = (self.keys.0 + 1, Some(self.keys.0));
                    self.is_mixed = true;
                    // Copies that need an older key than the previous one are not restored.
                    self.copy = None;
                }
                Act::EndKeyChange => {
                    if let (true, (one, Some(other))) = (self.is_mixed, self.keys) {
                        self.keys = (one.max(other), Some(one.min(other)));
                    }
                    self.is_mixed = false;
                }
                Act::BeginKeyChange => {}
                Act::DropKey => {
                    let is_needed = !self.row.is_of_current_key(self.machine, &mint((self.keys.0, None)));
                    if !is_needed && !self.is_mixed {
                        (self.keys.1, self.copy) = (None, None);
                    }
                }
            }
        }

        fn settle(&mut self) {
            self.take(&Act::EndKeyChange);
            for _ in 0..4 {
                self.beat(Loss::Nothing);
            }
            self.now = self.now.saturating_add(SignedDuration::from_secs(101)).unwrap();
        }
    }

    proptest! {
        #[test]
        fn no_history_locks_host_out_or_keeps_copied_token(
            acts in proptest::collection::vec(act(), 0..60),
        ) {
            let mut world = World::new();
            for act in acts {
                world.take(&act);
                assert_ne!(world.judge(&world.file), TokenStatus::Refused, "the host is locked out");
            }
            world.settle();
            let own = parse_claim(world.file.expose_secret(), Purpose::Upgrade).unwrap().generation;
            for copied in &world.copied {
                if parse_claim(copied.expose_secret(), Purpose::Upgrade).unwrap().generation < own {
                    prop_assert_eq!(world.judge(copied), TokenStatus::Refused, "a copied token still works");
                }
            }
        }
    }

    #[test]
    fn requested_token_replaces_old_one() {
        let mut world = World::new();
        let first = world.file.clone();
        world.beat(Loss::Nothing);
        assert_eq!(world.row.generation, Generation(1), "nothing is due");
        world.take(&Act::Request);
        world.beat(Loss::Response);
        world.beat(Loss::Nothing);
        assert_eq!(world.judge(&first), TokenStatus::Current, "no heartbeat with the new one yet");
        world.beat(Loss::Nothing);
        assert_eq!((world.row.generation, world.row.requested_at), (Generation(2), None));
        assert_eq!(world.judge(&first), TokenStatus::Previous);
        world.take(&Act::Wait(100));
        assert_eq!(world.judge(&first), TokenStatus::Refused);
        world.take(&Act::Wait(900));
        world.beat(Loss::Nothing);
        world.beat(Loss::Nothing);
        assert_eq!(world.row.generation, Generation(3), "an old token rotates automatically");
    }

    #[test]
    fn forged_generation_is_refused() {
        let world = World::new();
        let forged = mint((9, None)).token(world.machine, Purpose::Upgrade, Generation(5));
        assert_eq!(world.judge(&forged), TokenStatus::Refused);
        let real = mint(world.keys).token(world.machine, Purpose::Upgrade, Generation(5));
        assert_eq!(world.judge(&real), TokenStatus::Later(Generation(5)), "the database is older");
    }
}
