//! Rotates a machine's `UPGRADE_TOKEN`: decides which tokens are accepted, and which token the response to a heartbeat
//! offers to the host. Pure: reads no clock and no database.
//!
//! The host stores the next token before it sends a heartbeat with it. After that heartbeat, the platform accepts the
//! previous token only during an overlap. If the database was restored from an older copy, a token may have a later
//! generation than the database records: if the platform issued the token, it is accepted, and the database is updated.
//!
//! Invariant: a token that a host has stored is accepted until the host has sent a heartbeat with a later token.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use secrecy::{ExposeSecret, SecretString};

use super::tokens::{Generation, Purpose, TokenClaim, TokenMint, matches_hash};
use svc_machine::id::MachineId;

/// The fail points in the rotation, in the order in which they are reached.
pub const FAILPOINTS: &[&str] = &["token-adoption-before-commit", "token-adoption-after-commit"];

/// The token rotation schedule.
#[derive(Debug, Clone, Copy)]
pub struct TokenTiming {
    /// Age at which a token gets a successor.
    pub rotation_age: Duration,
    /// How long a token is accepted after a heartbeat with its successor.
    pub overlap: Duration,
}

/// A machine's token as stored in the database.
#[derive(Debug, Clone)]
pub struct UpgradeToken {
    pub hash: Vec<u8>,
    pub generation: Generation,
    /// When the first heartbeat with this generation arrived; for the first generation, when the machine was created.
    pub rotated_at: Timestamp,
    /// When an operator requested a rotation.
    pub requested_at: Option<Timestamp>,
    pub previous: Option<PreviousToken>,
}

/// The token that the stored token replaced.
#[derive(Debug, Clone)]
pub struct PreviousToken {
    pub hash: Vec<u8>,
    /// The end of the overlap; from then on, the token is rejected.
    pub until: Timestamp,
}

/// The status of a token that a host presents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenStatus {
    Current,
    /// The previous token, within its overlap.
    Previous,
    /// A token that the platform issued, of a later generation than the stored one.
    Later(Generation),
    Rejected,
}

/// The token that the response to a heartbeat offers to a host.
#[derive(Debug, Clone)]
pub enum TokenOffer {
    /// The stored token, to replace the previous token that the host presented.
    Stored(SecretString),
    /// A token with this generation, which the caller derives from the current platform key. The caller must not do so
    /// while processes with a different current key are running: the processes would replace each other's tokens.
    Next(Generation),
}

impl UpgradeToken {
    /// Determines the status of a token that a host presents.
    pub fn check_token(
        &self,
        token: &str,
        claim: TokenClaim,
        mint: &TokenMint,
        now: Timestamp,
    ) -> TokenStatus {
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
        if claim.generation > self.generation && mint.is_genuine(token, claim, Purpose::Upgrade) {
            return TokenStatus::Later(claim.generation);
        }
        TokenStatus::Rejected
    }

    /// Returns the state to store after a heartbeat with the generation `to`: unchanged, unless `to` is later than the
    /// stored generation. `last_heartbeat_at` is the time of the host's heartbeat before this one.
    ///
    /// A rotation request is fulfilled only if that heartbeat arrived after the request. The host had not stored the
    /// new token when it sent that heartbeat, so it received the token after the request. Otherwise, the host may have
    /// received the token before the request: the request remains, so that the response offers another token.
    #[must_use]
    pub fn advance(
        self,
        to: Generation,
        hash: Vec<u8>,
        overlap: Duration,
        last_heartbeat_at: Option<Timestamp>,
        now: Timestamp,
    ) -> Self {
        if to <= self.generation {
            return self;
        }
        let requested_at =
            self.requested_at.filter(|requested| last_heartbeat_at.is_none_or(|last| last <= *requested));
        let overlap = SignedDuration::try_from(overlap).unwrap_or(SignedDuration::MAX);
        let until = now.saturating_add(overlap).unwrap_or(Timestamp::MAX);
        let previous = Some(PreviousToken { hash: self.hash, until });
        Self { hash, generation: to, rotated_at: now, requested_at, previous }
    }

    /// Returns the token to offer to a host that presented a token with this status; `None` if the host keeps its
    /// token.
    pub fn next_offer(
        &self,
        machine: MachineId,
        status: TokenStatus,
        mint: &TokenMint,
        timing: TokenTiming,
        now: Timestamp,
    ) -> Option<TokenOffer> {
        match status {
            TokenStatus::Rejected | TokenStatus::Later(_) => None,
            // The host no longer has the stored token, for example because its file was restored from an older copy.
            TokenStatus::Previous => {
                let stored = mint.stored_token(machine, Purpose::Upgrade, self.generation, &self.hash);
                Some(stored.map_or_else(|| TokenOffer::Next(self.generation.next()), TokenOffer::Stored))
            }
            TokenStatus::Current => {
                let is_due = self.requested_at.is_some() || self.is_old(timing.rotation_age, now);
                let is_due = is_due || !self.is_issued_with_current_key(machine, mint);
                is_due.then(|| TokenOffer::Next(self.generation.next()))
            }
        }
    }

    fn is_old(&self, rotation_age: Duration, now: Timestamp) -> bool {
        now.duration_since(self.rotated_at)
            >= SignedDuration::try_from(rotation_age).unwrap_or(SignedDuration::MAX)
    }

    /// Returns whether the stored token was issued with the current platform key.
    pub fn is_issued_with_current_key(&self, machine: MachineId, mint: &TokenMint) -> bool {
        is_token_issued_with_current_key(mint, machine, self.generation, &self.hash)
    }
}

/// Returns whether the token with this hash was issued with the current platform key.
pub fn is_token_issued_with_current_key(
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
        TokenTiming { rotation_age: Duration::from_secs(1000), overlap: Duration::from_secs(100) };

    /// An event on the host or the platform.
    #[derive(Debug, Clone)]
    enum Event {
        Wait(i64),
        Request,
        /// A heartbeat after which the host stores the offered token, or fails to.
        Heartbeat(HeartbeatLoss),
        /// The sync agent is killed, and another process reads the file.
        Restart,
        CopyDatabase,
        RestoreDatabase,
        /// The operator restarts the first of the platform's processes with a new key. The other processes still use
        /// the current key, which becomes their previous key when they restart.
        BeginKeyRotation,
        /// The other processes restart.
        EndKeyRotation,
        /// The operator removes the previous key if the platform reports that it is not needed.
        DropKey,
    }

    #[derive(Debug, Clone, Copy)]
    enum HeartbeatLoss {
        Nothing,
        Response,
        /// The agent is killed while writing the file, which keeps its old content.
        Write,
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            3 => (1_i64..1500).prop_map(Event::Wait),
            2 => Just(Event::Request),
            6 => Just(Event::Heartbeat(HeartbeatLoss::Nothing)),
            2 => Just(Event::Heartbeat(HeartbeatLoss::Response)),
            2 => Just(Event::Heartbeat(HeartbeatLoss::Write)),
            1 => Just(Event::Restart),
            1 => Just(Event::CopyDatabase),
            1 => Just(Event::RestoreDatabase),
            2 => Just(Event::BeginKeyRotation),
            2 => Just(Event::EndKeyRotation),
            1 => Just(Event::DropKey),
        ]
    }

    struct RotationModel {
        machine: MachineId,
        now: Timestamp,
        keys: (u8, Option<u8>),
        /// Whether processes with different current keys are running. If so, consecutive heartbeats reach processes
        /// with alternating keys.
        is_mixed: bool,
        row: UpgradeToken,
        last_heartbeat_at: Option<Timestamp>,
        /// A copy of the row, with the time of the last heartbeat.
        copy: Option<(UpgradeToken, Option<Timestamp>)>,
        /// The generation in the host's file when the request that the database contains was made.
        generation_at_request: Option<Generation>,
        /// The token in the host's file.
        file: SecretString,
        /// The host's earlier tokens, of which an attacker may have copies.
        earlier: Vec<SecretString>,
    }

    fn mint(keys: (u8, Option<u8>)) -> TokenMint {
        let previous = keys.1.map(|key| vec![key; 32].into());
        TokenMint::new(&vec![keys.0; 32].into()).with_previous(previous.as_ref())
    }

    impl RotationModel {
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
            Self {
                machine,
                now,
                keys,
                is_mixed: false,
                row,
                last_heartbeat_at: None,
                copy: None,
                generation_at_request: None,
                file,
                earlier: Vec::new(),
            }
        }

        fn check_token(&self, token: &SecretString) -> TokenStatus {
            let token = token.expose_secret();
            self.row.check_token(
                token,
                parse_claim(token, Purpose::Upgrade).unwrap(),
                &mint(self.keys),
                self.now,
            )
        }

        fn file_generation(&self) -> Generation {
            parse_claim(self.file.expose_secret(), Purpose::Upgrade).unwrap().generation
        }

        /// Makes the next heartbeat reach a process with the other current key.
        fn switch_process(&mut self) {
            if let (true, (current, Some(previous))) = (self.is_mixed, self.keys) {
                self.keys = (previous, Some(current));
            }
        }

        fn send_heartbeat(&mut self, loss: HeartbeatLoss) {
            self.switch_process();
            self.apply(&Event::Wait(1));
            let status = self.check_token(&self.file);
            assert_ne!(status, TokenStatus::Rejected, "the host is locked out");
            let (row, mint) = (self.row.clone(), mint(self.keys));
            let (row, status) = match status {
                TokenStatus::Later(generation) => {
                    let hash = hash(self.file.expose_secret());
                    let last = self.last_heartbeat_at;
                    (row.advance(generation, hash, TIMING.overlap, last, self.now), TokenStatus::Current)
                }
                status => (row, status),
            };
            let offer = row.next_offer(self.machine, status, &mint, TIMING, self.now);
            self.row = row;
            self.last_heartbeat_at = Some(self.now);
            let next = match offer {
                Some(TokenOffer::Stored(token)) => Some(token),
                Some(TokenOffer::Next(generation)) if !self.is_mixed => {
                    Some(mint.token(self.machine, Purpose::Upgrade, generation))
                }
                Some(TokenOffer::Next(_)) | None => None,
            };
            if let (Some(next), HeartbeatLoss::Nothing) = (next, loss) {
                self.earlier.push(std::mem::replace(&mut self.file, next));
            }
        }

        fn apply(&mut self, event: &Event) {
            match *event {
                Event::Wait(seconds) => {
                    self.now = self.now.saturating_add(SignedDuration::from_secs(seconds)).unwrap();
                }
                Event::Request if self.row.requested_at.is_none() => {
                    self.row.requested_at = Some(self.now);
                    self.generation_at_request = Some(self.file_generation());
                }
                Event::Heartbeat(loss) => self.send_heartbeat(loss),
                Event::Request | Event::Restart => {}
                Event::CopyDatabase => self.copy = Some((self.row.clone(), self.last_heartbeat_at)),
                Event::RestoreDatabase => {
                    if let Some(copy) = self.copy.clone() {
                        (self.row, self.last_heartbeat_at) = copy;
                        // The copy may not contain the request.
                        self.generation_at_request = None;
                    }
                }
                Event::BeginKeyRotation if self.keys.1.is_none() => {
                    self.keys = (self.keys.0 + 1, Some(self.keys.0));
                    self.is_mixed = true;
                    // A copy that needs a key older than the previous one is never restored.
                    self.copy = None;
                }
                Event::EndKeyRotation => {
                    if let (true, (current, Some(previous))) = (self.is_mixed, self.keys) {
                        self.keys = (current.max(previous), Some(current.min(previous)));
                    }
                    self.is_mixed = false;
                }
                Event::BeginKeyRotation => {}
                Event::DropKey => {
                    let is_needed =
                        !self.row.is_issued_with_current_key(self.machine, &mint((self.keys.0, None)));
                    if !is_needed && !self.is_mixed {
                        (self.keys.1, self.copy) = (None, None);
                    }
                }
            }
        }

        /// Ends a key rotation, sends enough heartbeats for the newest token to replace all others, and waits for the
        /// end of the overlap. Waits for `rotation_age` first, so that the rotation that is then due begins with the
        /// first heartbeat, not with the last one.
        fn settle(&mut self) {
            self.apply(&Event::EndKeyRotation);
            self.apply(&Event::Wait(1000));
            for _ in 0..4 {
                self.send_heartbeat(HeartbeatLoss::Nothing);
            }
            self.now = self.now.saturating_add(SignedDuration::from_secs(101)).unwrap();
        }
    }

    proptest! {
        #[test]
        fn any_history_keeps_host_accepted_and_replaces_tokens(
            events in proptest::collection::vec(event(), 0..60),
        ) {
            let mut model = RotationModel::new();
            for event in events {
                model.apply(&event);
                assert_ne!(model.check_token(&model.file), TokenStatus::Rejected, "the host is locked out");
            }
            model.settle();
            let current = model.file_generation();
            if let Some(requested) = model.generation_at_request {
                prop_assert!(current > requested, "the requested rotation did not happen");
            }
            for earlier in &model.earlier {
                if parse_claim(earlier.expose_secret(), Purpose::Upgrade).unwrap().generation < current {
                    prop_assert_eq!(
                        model.check_token(earlier),
                        TokenStatus::Rejected,
                        "an earlier token is still accepted"
                    );
                }
            }
        }
    }

    #[test]
    fn requested_token_replaces_previous_one() {
        let mut model = RotationModel::new();
        let first = model.file.clone();
        model.send_heartbeat(HeartbeatLoss::Nothing);
        assert_eq!(model.row.generation, Generation(1), "nothing is due");
        model.apply(&Event::Request);
        model.send_heartbeat(HeartbeatLoss::Response);
        model.send_heartbeat(HeartbeatLoss::Nothing);
        assert_eq!(model.check_token(&first), TokenStatus::Current, "no heartbeat with the new token yet");
        model.send_heartbeat(HeartbeatLoss::Nothing);
        assert_eq!((model.row.generation, model.row.requested_at), (Generation(2), None));
        assert_eq!(model.check_token(&first), TokenStatus::Previous);
        model.apply(&Event::Wait(100));
        assert_eq!(model.check_token(&first), TokenStatus::Rejected);
        model.apply(&Event::Wait(900));
        model.send_heartbeat(HeartbeatLoss::Nothing);
        model.send_heartbeat(HeartbeatLoss::Nothing);
        assert_eq!(model.row.generation, Generation(3), "an old token rotates automatically");
    }

    #[test]
    fn token_offered_before_request_is_replaced() {
        let mut model = RotationModel::new();
        model.apply(&Event::Wait(1000));
        model.send_heartbeat(HeartbeatLoss::Nothing);
        model.apply(&Event::Request);
        model.send_heartbeat(HeartbeatLoss::Nothing);
        assert_eq!(model.row.generation, Generation(2));
        assert_eq!(model.file_generation(), Generation(3), "the response offers the requested token");
        model.send_heartbeat(HeartbeatLoss::Nothing);
        assert_eq!((model.row.generation, model.row.requested_at), (Generation(3), None));
        assert_eq!(model.file_generation(), Generation(3), "the request is fulfilled");
    }

    #[test]
    fn request_after_restore_replaces_later_token() {
        let mut model = RotationModel::new();
        model.apply(&Event::CopyDatabase);
        for _ in 0..2 {
            model.apply(&Event::Request);
            model.send_heartbeat(HeartbeatLoss::Nothing);
            model.send_heartbeat(HeartbeatLoss::Nothing);
        }
        assert_eq!(model.row.generation, Generation(3));
        model.apply(&Event::RestoreDatabase);
        model.apply(&Event::Request);
        model.send_heartbeat(HeartbeatLoss::Nothing);
        assert_eq!((model.row.generation, model.file_generation()), (Generation(3), Generation(4)));
        model.send_heartbeat(HeartbeatLoss::Nothing);
        assert_eq!((model.row.generation, model.row.requested_at), (Generation(4), None));
    }

    #[test]
    fn forged_generation_is_rejected() {
        let model = RotationModel::new();
        let forged = mint((9, None)).token(model.machine, Purpose::Upgrade, Generation(5));
        assert_eq!(model.check_token(&forged), TokenStatus::Rejected);
        let genuine = mint(model.keys).token(model.machine, Purpose::Upgrade, Generation(5));
        assert_eq!(
            model.check_token(&genuine),
            TokenStatus::Later(Generation(5)),
            "the database may be older than the token"
        );
    }
}
