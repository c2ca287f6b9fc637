//! An event's id: `<epoch>-<position>`.

use std::fmt;
use std::str::FromStr;

use crate::machine::epoch::Epoch;

/// Everything up to this transaction was told, by the machine of this epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventId {
    pub epoch: Epoch,
    pub position: i64,
}

/// A text that no event has as its id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be the id of an event, <epoch>-<position>")]
pub struct NotAnId;

impl FromStr for EventId {
    type Err = NotAnId;

    fn from_str(text: &str) -> Result<Self, NotAnId> {
        let (epoch, position) = text.split_once('-').ok_or(NotAnId)?;
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        if !is_number(epoch) || !is_number(position) {
            return Err(NotAnId);
        }
        let epoch = epoch.parse().map_err(|_| NotAnId)?;
        Ok(Self { epoch, position: position.parse().map_err(|_| NotAnId)? })
    }
}

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.epoch, self.position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_read_as_it_is_written() {
        let id = EventId { epoch: Epoch(3), position: 7421 };
        assert_eq!(id.to_string(), "3-7421");
        assert_eq!("3-7421".parse(), Ok(id));
        for bad in ["", "-", "3", "3-", "-1", "3--1", "+3-1", "3-1x", "3-99999999999999999999", "3-1-1"] {
            assert_eq!(bad.parse::<EventId>(), Err(NotAnId), "{bad:?}");
        }
    }
}
