//! An event's id: `<epoch>-<position>`, as its listener knows it.
//!
//! Positions are those of the whole database: from two of them an app could tell how much others write. So an app gets each
//! position sealed, for itself alone.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};

use crate::machine::epoch::Epoch;

/// Everything up to this transaction was told, by the machine of this epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventId {
    pub epoch: Epoch,
    pub position: i64,
}

/// A text that no event has as its id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be the id of an event of this stream")]
pub struct NotAnId;

/// The machine's secret, from which each app's key is made. It stays the same for as long as the epoch does.
#[derive(Clone)]
pub struct IdSecret(hmac::Key);

impl fmt::Debug for IdSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("IdSecret(…)")
    }
}

impl IdSecret {
    /// From something that only this machine knows.
    pub fn derive(of_machine: &[u8]) -> Self {
        let key = hmac::Key::new(hmac::HMAC_SHA256, of_machine);
        let secret = hmac::sign(&key, b"svc: ids of change events");
        Self(hmac::Key::new(hmac::HMAC_SHA256, secret.as_ref()))
    }
}

/// How ids look to one listener.
#[derive(Debug)]
pub enum IdForm {
    /// `<epoch>-<position>`, for the owner.
    Plain,
    /// The position encrypted under the app's own key.
    Sealed(Box<LessSafeKey>),
}

impl IdForm {
    pub fn of_app(secret: &IdSecret, app: &str) -> Self {
        let key = hmac::sign(&secret.0, app.as_bytes());
        let key = UnboundKey::new(&CHACHA20_POLY1305, key.as_ref()).expect("HMAC-SHA256 has 32 bytes");
        Self::Sealed(Box::new(LessSafeKey::new(key)))
    }

    pub fn write(&self, id: EventId) -> String {
        let position = match self {
            Self::Plain => id.position.to_string(),
            Self::Sealed(key) => seal(key, id.position),
        };
        format!("{}-{position}", id.epoch)
    }

    /// Reads an id that the machine of epoch `current` is shown. What another machine has sealed is only known to be of
    /// another epoch: its position is given as 0.
    ///
    /// # Errors
    /// [`NotAnId`], also for the id of another app.
    pub fn read(&self, text: &str, current: Epoch) -> Result<EventId, NotAnId> {
        let (epoch, position) = text.split_once('-').ok_or(NotAnId)?;
        let epoch = Epoch(number(epoch)?);
        let position = match self {
            Self::Plain => number(position)?,
            Self::Sealed(key) if epoch == current => open(key, position).ok_or(NotAnId)?,
            Self::Sealed(_) => 0,
        };
        Ok(EventId { epoch, position })
    }
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, NotAnId> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| is_number).ok_or(NotAnId)
}

fn seal(key: &LessSafeKey, position: i64) -> String {
    let mut nonce = [0; NONCE_LEN];
    let mut sealed = position.to_be_bytes().to_vec();
    let filled = SystemRandom::new().fill(&mut nonce);
    let sealing = filled.and_then(|()| {
        key.seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), Aad::empty(), &mut sealed)
    });
    sealing.expect("the system gives random bytes, and eight bytes can be sealed");
    URL_SAFE_NO_PAD.encode([&nonce[..], &sealed].concat())
}

fn open(key: &LessSafeKey, text: &str) -> Option<i64> {
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
    fn an_id_is_read_as_it_is_written() {
        assert_eq!(IdForm::Plain.write(ID), "3-7421");
        assert_eq!(IdForm::Plain.read("3-7421", Epoch(3)), Ok(ID));
        for bad in ["", "-", "3", "3-", "-1", "3--1", "+3-1", "3-1x", "3-99999999999999999999", "3-1-1"] {
            assert_eq!(IdForm::Plain.read(bad, Epoch(3)), Err(NotAnId), "{bad:?}");
        }
    }

    #[test]
    fn an_apps_ids_say_nothing_and_are_its_own() {
        let secret = IdSecret::derive(b"of the machine");
        let (one, other) = (IdForm::of_app(&secret, "one"), IdForm::of_app(&secret, "other"));
        let (first, second) = (one.write(ID), one.write(ID));
        assert_ne!(first, second, "not even that nothing has happened");
        assert!(!first.contains("7421"));
        // After a restart, too.
        let again = IdForm::of_app(&IdSecret::derive(b"of the machine"), "one");
        assert_eq!((again.read(&first, Epoch(3)), again.read(&second, Epoch(3))), (Ok(ID), Ok(ID)));
        for bad in [&first[..first.len() - 1], "3-7421", "3-"] {
            assert_eq!(one.read(bad, Epoch(3)), Err(NotAnId), "{bad}");
        }
        let of_another_machine = EventId { epoch: Epoch(3), position: 0 };
        assert_eq!(one.read("3-AAAA", Epoch(4)), Ok(of_another_machine), "it is gone, and not wrong");
        assert_eq!(other.read(&first, Epoch(3)), Err(NotAnId));
        assert_eq!(IdForm::Plain.read(&first, Epoch(3)), Err(NotAnId));
    }
}
