//! The ids of change events: `<epoch>-<position>`.
//!
//! Positions are transaction ids, which PostgreSQL assigns in one sequence to all writers, so two of them reveal how
//! much other apps write. For apps and agents, the position is therefore encrypted under the app's own key.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};

use svc_machine::epoch::Epoch;

/// The position up to which events were sent, and the epoch of the machine that sent them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventId {
    pub epoch: Epoch,
    pub position: i64,
}

/// The error for text that is not an event id from the listener's stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be the id of an event from this stream")]
pub struct InvalidEventId;

/// The secret from which each app's key is derived. It is constant within an epoch.
#[derive(Clone)]
pub struct EventIdSecret(hmac::Key);

impl fmt::Debug for EventIdSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EventIdSecret(…)")
    }
}

impl EventIdSecret {
    /// Derives the secret from another secret, which no other machine has.
    pub fn derive(machine_secret: &[u8]) -> Self {
        let key = hmac::Key::new(hmac::HMAC_SHA256, machine_secret);
        let secret = hmac::sign(&key, b"svc: ids of change events");
        Self(hmac::Key::new(hmac::HMAC_SHA256, secret.as_ref()))
    }
}

/// The id format for one listener.
#[derive(Debug)]
pub enum EventIdFormat {
    /// The position in decimal, for clients other than apps and agents, such as the owner.
    Plain,
    /// The position encrypted under the app's key, for the app and for agents.
    Sealed(Box<LessSafeKey>),
}

impl EventIdFormat {
    pub fn for_app(secret: &EventIdSecret, app: &str) -> Self {
        let key = hmac::sign(&secret.0, app.as_bytes());
        let key = UnboundKey::new(&CHACHA20_POLY1305, key.as_ref()).expect("HMAC-SHA256 has 32 bytes");
        Self::Sealed(Box::new(LessSafeKey::new(key)))
    }

    pub fn format(&self, id: EventId) -> String {
        let position = match self {
            Self::Plain => id.position.to_string(),
            Self::Sealed(key) => seal_position(key, id.position),
        };
        format!("{}-{position}", id.epoch)
    }

    /// Parses an id presented to the machine of epoch `current`. An id sealed in another epoch cannot be decrypted, so
    /// its position is returned as 0; no events are available after it anyway.
    ///
    /// # Errors
    /// [`InvalidEventId`] if the text is not an id, or if it was sealed in this epoch for another app.
    pub fn parse(&self, text: &str, current: Epoch) -> Result<EventId, InvalidEventId> {
        let (epoch, position) = text.split_once('-').ok_or(InvalidEventId)?;
        let epoch = Epoch(parse_digits(epoch)?);
        let position = match self {
            Self::Plain => parse_digits(position)?,
            Self::Sealed(key) if epoch == current => open_position(key, position).ok_or(InvalidEventId)?,
            Self::Sealed(_) => 0,
        };
        Ok(EventId { epoch, position })
    }
}

fn parse_digits<T: std::str::FromStr>(text: &str) -> Result<T, InvalidEventId> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| is_number).ok_or(InvalidEventId)
}

fn seal_position(key: &LessSafeKey, position: i64) -> String {
    let mut nonce = [0; NONCE_LEN];
    let mut sealed = position.to_be_bytes().to_vec();
    let filled = SystemRandom::new().fill(&mut nonce);
    let sealing = filled.and_then(|()| {
        key.seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), Aad::empty(), &mut sealed)
    });
    sealing.expect("random bytes are available, and eight bytes can be sealed");
    URL_SAFE_NO_PAD.encode([&nonce[..], &sealed].concat())
}

fn open_position(key: &LessSafeKey, text: &str) -> Option<i64> {
    let bytes = URL_SAFE_NO_PAD.decode(text).ok()?;
    let (nonce, sealed) = bytes.split_at_checked(NONCE_LEN)?;
    let mut sealed = sealed.to_vec();
    let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
    let position = key.open_in_place(nonce, Aad::empty(), &mut sealed).ok()?;
    position.try_into().ok().map(i64::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: EventId = EventId { epoch: Epoch(3), position: 7421 };

    #[test]
    fn plain_id_round_trips() {
        assert_eq!(EventIdFormat::Plain.format(ID), "3-7421");
        assert_eq!(EventIdFormat::Plain.parse("3-7421", Epoch(3)), Ok(ID));
        for bad in ["", "-", "3", "3-", "-1", "3--1", "+3-1", "3-1x", "3-99999999999999999999", "3-1-1"] {
            assert_eq!(EventIdFormat::Plain.parse(bad, Epoch(3)), Err(InvalidEventId), "{bad:?}");
        }
    }

    #[test]
    fn sealed_ids_are_opaque_and_per_app() {
        let secret = EventIdSecret::derive(b"machine secret");
        let (one, other) = (EventIdFormat::for_app(&secret, "one"), EventIdFormat::for_app(&secret, "other"));
        let (first, second) = (one.format(ID), one.format(ID));
        assert_ne!(first, second, "equal positions got equal ids");
        assert!(!first.contains("7421"));
        // The ids remain valid after a restart.
        let after_restart = EventIdFormat::for_app(&EventIdSecret::derive(b"machine secret"), "one");
        assert_eq!(
            (after_restart.parse(&first, Epoch(3)), after_restart.parse(&second, Epoch(3))),
            (Ok(ID), Ok(ID))
        );
        for bad in [&first[..first.len() - 1], "3-7421", "3-"] {
            assert_eq!(one.parse(bad, Epoch(3)), Err(InvalidEventId), "{bad}");
        }
        let undecrypted_id = EventId { epoch: Epoch(3), position: 0 };
        assert_eq!(
            one.parse("3-AAAA", Epoch(4)),
            Ok(undecrypted_id),
            "a position from another epoch was decrypted"
        );
        assert_eq!(other.parse(&first, Epoch(3)), Err(InvalidEventId));
        assert_eq!(EventIdFormat::Plain.parse(&first, Epoch(3)), Err(InvalidEventId));
    }
}
