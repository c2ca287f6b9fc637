//! `Last-Event-ID`, with which a client resumes an event stream: an app learns nothing from it, and cannot use another
//! app's position.

use proptest::prelude::*;
use svc::gateway::bridge_fuzzing::{read_event_id, write_event_id};
use svc::host::records::files::TailPosition;

use super::Target;

const EPOCH: u32 = 3;

pub fn target() -> Target {
    Target { name: "event-id", valid: ids().boxed(), check_any, check_valid, cases: 1500 }
}

fn ids() -> impl Strategy<Value = Vec<u8>> {
    let position = || 0..i64::MAX;
    let line_position = || "[1-9][0-9]{0,17}-[1-9][0-9]{0,17}-(0|[1-9][0-9]{0,17})";
    prop_oneof![
        position().prop_map(|position| write_event_id(None, EPOCH, position)),
        position().prop_map(|position| write_event_id(Some("notes"), EPOCH, position)),
        line_position(),
        (line_position(), line_position()).prop_map(|(first, second)| format!("{first}_{second}")),
    ]
    .prop_map(String::into_bytes)
}

fn check_any(bytes: &[u8]) -> Result<(), String> {
    let Ok(text) = std::str::from_utf8(bytes) else { return Ok(()) };
    if let Ok(position) = text.parse::<TailPosition>()
        && position.to_string() != text
    {
        return Err(format!("{text:?} is parsed as the position {position}"));
    }
    let owner = read_event_id(None, text, EPOCH);
    if let Some((epoch, position)) = owner
        && (position < 0 || read_event_id(None, &write_event_id(None, epoch, position), EPOCH) != owner)
    {
        return Err(format!("{text:?} is decoded as {owner:?}"));
    }
    let (notes, other) =
        (read_event_id(Some("notes"), text, EPOCH), read_event_id(Some("other"), text, EPOCH));
    match (notes, other) {
        // An id from another machine reveals only that it is from another machine.
        (Some((epoch, 0)), Some((other_epoch, 0))) if epoch == other_epoch && epoch != EPOCH => Ok(()),
        (Some(_), Some(_)) => Err(format!("{text:?} is accepted for two apps")),
        (Some((epoch, _)), None) | (None, Some((epoch, _))) if epoch != EPOCH => {
            Err(format!("{text:?}, from epoch {epoch}, is accepted for one app only"))
        }
        // The position is sealed with one app's key, so changing any of its bytes invalidates the id.
        (Some(_), None) => check_seal(text),
        _ => Ok(()),
    }
}

/// Checks that the text is rejected when its last character differs.
fn check_seal(text: &str) -> Result<(), String> {
    let mut changed = text.to_owned();
    let last = changed.pop();
    changed.push(if last == Some('A') { 'B' } else { 'A' });
    match read_event_id(Some("notes"), &changed, EPOCH) {
        None => Ok(()),
        Some(event) => Err(format!("{changed:?} is accepted as {event:?}, like {text:?}")),
    }
}

fn check_valid(bytes: &[u8]) -> Result<(), String> {
    let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
    let accepted_by = [
        read_event_id(None, text, EPOCH).is_some(),
        read_event_id(Some("notes"), text, EPOCH).is_some_and(|(epoch, _)| epoch == EPOCH),
        text.parse::<TailPosition>().is_ok(),
    ];
    if accepted_by.iter().filter(|is_accepted| **is_accepted).count() == 1 {
        Ok(())
    } else {
        Err(format!("{accepted_by:?}: not accepted by exactly one reader"))
    }
}
