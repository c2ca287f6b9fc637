//! Whether the clock is believed: a pure rule over what it said before, by the time that has passed since the machine started.
//!
//! A clock that is set weeks ahead would have everything deleted that is kept for thirty days. Where it has jumped since the
//! last check, the earlier of the two is believed until the new one has held for a day. A machine that has started again has
//! asked others for the time (`time-sync.target`).

use std::io;
use std::path::Path;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::fsx::{self, FileError};

const DAY: i64 = 86_400;
/// Clocks that are not further apart are the same one, set right.
const NEAR: i64 = 900;
/// What the kernel counts a process's start in, of a second.
const TICKS: i64 = 100;

/// A clock and the time since the start, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reading {
    pub clock: i64,
    pub up: i64,
}

/// What is kept from one check to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Known {
    /// When the machine started, by the clock that is believed.
    started: i64,
    up: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    doubted: Option<Doubted>,
}

/// A clock that is not believed yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Doubted {
    started: i64,
    since_up: i64,
}

/// The time to go by, and what is kept.
pub fn judge(known: Option<Known>, now: Reading) -> (i64, Known) {
    let started = now.clock - now.up;
    let is_near = |other: i64| (started - other).abs() <= NEAR;
    let believed = (now.clock, Known { started, up: now.up, doubted: None });
    let Some(known) = known.filter(|known| known.up <= now.up && !is_near(known.started)) else {
        return believed;
    };
    let since_up =
        known.doubted.filter(|doubted| is_near(doubted.started)).map_or(now.up, |doubted| doubted.since_up);
    if now.up - since_up >= DAY {
        return believed;
    }
    let doubted = Some(Doubted { started, since_up });
    (now.clock.min(known.started + now.up), Known { started: known.started, up: now.up, doubted })
}

/// The time to go by where something is to be deleted. What is kept of earlier checks is in `file`.
///
/// # Errors
/// [`FileError`].
pub fn believed(file: &Path, clock: Timestamp) -> Result<Timestamp, FileError> {
    let process = Path::new("/proc/self/stat");
    let up = up(process).map_err(FileError::at("read", process))?;
    let text = fsx::read_if_exists(file)?;
    let known = text.and_then(|text| serde_json::from_slice(&text).ok());
    let (believed, kept) = judge(known, Reading { clock: clock.as_second(), up });
    fsx::write_atomic(file, &serde_json::to_vec(&kept).expect("plain fields are JSON"), 0o600)?;
    if believed < clock.as_second() {
        tracing::warn!(%clock, believed, "the clock has jumped; until it has held for a day, less is deleted");
    }
    Ok(Timestamp::from_second(believed).unwrap_or(clock))
}

/// How long after the machine this process started: of the files that say so, its unit hides all but this one.
fn up(process: &Path) -> io::Result<i64> {
    let text = std::fs::read_to_string(process)?;
    // The name, which may hold anything, is in brackets; the start is the twentieth word after it.
    let ticks =
        text.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(19)?.parse::<i64>().ok());
    ticks
        .map(|ticks| ticks / TICKS)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "it has no start"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: i64 = 1_795_000_000;

    fn at(hours_up: i64, ahead: i64) -> Reading {
        Reading { clock: START + hours_up * 3600 + ahead * DAY, up: hours_up * 3600 }
    }

    /// The days that the believed clock is ahead at each check of these.
    fn ahead(checks: &[Reading]) -> Vec<i64> {
        let mut known = None;
        let day = |reading: &Reading| {
            let (believed, kept) = judge(known, *reading);
            known = Some(kept);
            (believed - START - reading.up).div_euclid(DAY)
        };
        checks.iter().map(day).collect()
    }

    #[test]
    fn a_jump_ahead_is_believed_once_it_has_held_for_a_day() {
        assert_eq!(ahead(&[at(1, 0), at(2, 40), at(3, 40), at(4, 0), at(5, 40)]), [0, 0, 0, 0, 0]);
        assert_eq!(ahead(&[at(1, 0), at(2, 40), at(25, 40), at(26, 40), at(27, 40)]), [0, 0, 0, 40, 40]);
        assert_eq!(ahead(&[at(1, 0), at(2, 40), at(14, 70), at(27, 40)]), [0, 0, 0, 0], "each jump anew");
    }

    #[test]
    fn an_earlier_clock_and_a_start_are_believed_at_once() {
        assert_eq!(ahead(&[at(1, 0), at(2, -40)]), [0, -40]);
        let again = Reading { clock: START + 90 * DAY, up: 60 };
        assert_eq!(ahead(&[at(30, 0), again]), [0, 89], "it was off for long");
        assert_eq!(ahead(&[at(1, 40)]), [40], "nothing is known");
        let Reading { clock, up } = at(2, 0);
        let (believed, kept) = judge(Some(judge(None, at(1, 0)).1), Reading { clock: clock + 600, up });
        assert_eq!((believed, kept.doubted), (clock + 600, None), "a small step is none");
    }

    #[test]
    fn what_was_kept_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("clock.json");
        let now = Timestamp::now();
        assert_eq!(believed(&file, now).unwrap().as_second(), now.as_second());
        let ahead = now.checked_add(jiff::SignedDuration::from_hours(24 * 40)).unwrap();
        let days = |at: Timestamp| (at.as_second() - now.as_second()) / DAY;
        assert_eq!(days(believed(&file, ahead).unwrap()), 0);
        std::fs::write(&file, "{").unwrap();
        assert_eq!(days(believed(&file, ahead).unwrap()), 40);
    }
}
