//! The records as they are asked for: pages, the newest lines first, and streams of what comes.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;

use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, StatusCode};
use jiff::{Timestamp, ToSpan};
use serde_json::{Map, Value, json};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Duration, Instant};

use crate::chain::chain;
use crate::host::agents::kernel::Kernel;
use crate::host::gateway::bridge;
use crate::host::gateway::events::{self, HEARTBEAT, LONGEST, RETRY_MS};
use crate::host::records::files::{LinePosition, RecordKind, TailPosition};
use crate::host::records::page::{self, PageError, Verdict};
use crate::host::records::tail::Tail;
use crate::http::fields::Fields;
use crate::http::problem::{Code, Problem};

pub const DEFAULT_LIMIT: usize = 50;
pub const LARGEST_LIMIT: usize = 1000;
/// The longest text of a filter.
pub const LONGEST_FILTER: usize = 1024;
/// How often a stream looks for lines.
const LOOK: Duration = Duration::from_millis(200);
/// Clocks may be set back, and days begin by another zone's, 26 hours away: lines that much out of order are still found.
const OUT_OF_ORDER: i64 = 50;

/// A record and the filters that it has.
pub struct Shown {
    pub kind: RecordKind,
    /// The member of an answer that has the lines.
    pub member: &'static str,
    /// Members of a line that a filter of the same name must equal.
    pub equal: &'static [&'static str],
    /// A member that is a path: a filter of its name finds it, and what is below it.
    pub below: Option<&'static str>,
    /// Lines are text, found by a part of it: `contains`.
    pub text: bool,
}

/// What a caller wants of a record.
#[derive(Default)]
struct Filter {
    equal: Vec<(&'static str, String)>,
    below: Option<(&'static str, String)>,
    contains: Option<String>,
    since: Option<Timestamp>,
    until: Option<Timestamp>,
}

impl Filter {
    fn read(query: &mut Fields, shown: &Shown) -> Self {
        let mut text = |name| query.optional_text(name, LONGEST_FILTER);
        Self {
            equal: shown.equal.iter().filter_map(|name| Some((*name, text(name)?))).collect(),
            below: shown.below.and_then(|name| Some((name, text(name)?.trim_end_matches('/').to_owned()))),
            contains: shown.text.then(|| text("contains")).flatten(),
            since: query.time("since"),
            until: query.time("until"),
        }
    }

    fn judge(&self, entry: &Map<String, Value>) -> Verdict {
        let at = entry.get("timestamp").and_then(Value::as_str).and_then(|at| at.parse::<Timestamp>().ok());
        if let (Some(at), Some(since)) = (at, self.since)
            && at < since
        {
            let long_before = since.checked_sub(OUT_OF_ORDER.hours()).is_ok_and(|before| at < before);
            return if long_before { Verdict::Stop } else { Verdict::Skip };
        }
        let in_time = self.until.is_none_or(|until| at.is_some_and(|at| at < until));
        let text = |name: &str| entry.get(name).and_then(Value::as_str);
        // What was lost may have been what is asked for.
        let is_gap = entry.contains_key("gap");
        let equal = self.equal.iter().all(|(name, wanted)| text(name) == Some(wanted));
        let below = self.below.as_ref().is_none_or(|(name, wanted)| {
            let rest = text(name).and_then(|path| path.strip_prefix(&**wanted));
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/') || wanted.is_empty())
        });
        let contains =
            self.contains.as_ref().is_none_or(|part| text("text").is_some_and(|line| line.contains(part)));
        if in_time && (is_gap || (equal && below && contains)) { Verdict::Take } else { Verdict::Skip }
    }
}

/// A line as it is shown; `None` for what is no line of its record.
fn entry(shown: &Shown, line: &str) -> Option<Map<String, Value>> {
    if !shown.text {
        return match serde_json::from_str(line) {
            Ok(Value::Object(entry)) => Some(entry),
            _ => None,
        };
    }
    let (at, text) = line.split_once(' ')?;
    at.parse::<Timestamp>().ok()?;
    Some(Map::from_iter([("timestamp".to_owned(), at.into()), ("text".to_owned(), text.into())]))
}

/// A page of it.
///
/// # Errors
/// A filter that is wrong; 410 for a cursor whose lines are gone.
pub async fn list(kernel: &Kernel, shown: &'static Shown, query: Option<&str>) -> Result<Response, Problem> {
    let mut query = Fields::of_query(query.unwrap_or_default());
    let limit = query.within("limit", 1..=LARGEST_LIMIT, DEFAULT_LIMIT);
    let cursor: Option<LinePosition> = query.optional("cursor");
    let filter = Filter::read(&mut query, shown);
    let filter = query.finish(Some(filter))?;
    let logs = kernel.logs();
    let read = tokio::task::spawn_blocking(move || {
        let mut entries = Vec::new();
        let page = page::newest(shown.kind, &logs, cursor, limit, |line| {
            let Some(entry) = entry(shown, line) else { return Verdict::Skip };
            let verdict = filter.judge(&entry);
            if verdict == Verdict::Take {
                entries.push(Value::Object(entry));
            }
            verdict
        })?;
        Ok((entries, page.next))
    });
    let (entries, next) = match read.await.map_err(|error| Problem::internal(&error))? {
        Ok(read) => read,
        Err(PageError::Gone) => {
            let detail = "The lines after this cursor are not there any more; ask again without it.";
            return Err(Problem::new(Code::Gone, detail));
        }
        Err(PageError::File(error)) => return Err(Problem::internal(&error)),
    };
    let answer = json!({ shown.member: entries, "nextCursor": next.map(|place| place.to_string()) });
    Ok(bridge::json(StatusCode::OK, Bytes::from(answer.to_string())).into_response())
}

/// What comes, line by line.
///
/// # Errors
/// A filter that is wrong; 410 where what came after `Last-Event-ID` is gone; too many listeners.
pub async fn follow(
    kernel: &Arc<Kernel>,
    shown: &'static Shown,
    headers: &HeaderMap,
    query: Option<&str>,
) -> Result<Response, Problem> {
    let mut query = Fields::of_query(query.unwrap_or_default());
    let filter = Filter::read(&mut query, shown);
    let filter = query.finish(Some(filter))?;
    let resumed = resumed(headers)?;
    let busy = || Problem::new(Code::Unavailable, "Too many listeners at once.").retry_after(5);
    let permit = kernel.admit_listener().ok_or_else(busy)?;
    let logs = kernel.logs();
    let opened = tokio::task::spawn_blocking(move || match resumed {
        Some(place) => Tail::after(shown.kind, logs, place),
        None => Tail::at_end(shown.kind, logs).map(Some),
    });
    let tail = opened.await.map_err(|error| Problem::internal(&error))?;
    let tail = tail.map_err(|error| Problem::internal(&error))?;
    let gone = || Problem::new(Code::Gone, "What came after this event is not there any more.");
    let tail = tail.ok_or_else(gone)?;
    let now = Instant::now();
    let greeting = format!("retry: {RETRY_MS}\n{}event: ready\ndata: {{}}\n\n", id(tail.position()));
    let listener = Listener {
        tail: Some(tail),
        shown,
        filter,
        ready: VecDeque::from([Bytes::from(greeting)]),
        heartbeat: now + HEARTBEAT,
        end: now + LONGEST,
        _permit: permit,
    };
    Ok(events::response(stream::unfold(listener, |mut listener| async move {
        let chunk = listener.next().await?;
        Some((Ok::<_, Infallible>(chunk), listener))
    })))
}

fn resumed(headers: &HeaderMap) -> Result<Option<TailPosition>, Problem> {
    let Some(value) = headers.get("last-event-id").filter(|value| !value.is_empty()) else { return Ok(None) };
    let place = value.to_str().ok().and_then(|text| text.parse().ok());
    let wrong = || Problem::field("Last-Event-ID", "must be the id of an event");
    place.map(Some).ok_or_else(wrong)
}

fn id(place: Option<TailPosition>) -> String {
    place.map(|place| format!("id: {place}\n")).unwrap_or_default()
}

struct Listener {
    /// `None` while it is read.
    tail: Option<Tail>,
    shown: &'static Shown,
    filter: Filter,
    ready: VecDeque<Bytes>,
    heartbeat: Instant,
    end: Instant,
    _permit: OwnedSemaphorePermit,
}

impl Listener {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(chunk) = self.ready.pop_front() {
                self.heartbeat = Instant::now() + HEARTBEAT;
                return Some(chunk);
            }
            let now = Instant::now();
            if now >= self.end {
                return None;
            }
            let mut tail = self.tail.take()?;
            let (tail, lines) = tokio::task::spawn_blocking(move || {
                let lines = tail.lines();
                (tail, lines)
            })
            .await
            .ok()?;
            let place = tail.position();
            self.tail = Some(tail);
            match lines {
                Ok(lines) => {
                    let events: Vec<Bytes> =
                        lines.iter().filter_map(|(place, line)| self.event(*place, line)).collect();
                    self.ready.extend(events);
                }
                Err(error) => {
                    tracing::warn!(error = %chain(&error), "a record cannot be followed");
                    return None;
                }
            }
            if self.ready.is_empty() {
                if now >= self.heartbeat {
                    self.ready.push_back(Bytes::from(format!(": heartbeat\n{}\n", id(place))));
                } else {
                    tokio::time::sleep(LOOK).await;
                }
            }
        }
    }

    fn event(&self, place: TailPosition, line: &str) -> Option<Bytes> {
        let entry = entry(self.shown, line)?;
        let is_wanted = self.filter.judge(&entry) == Verdict::Take;
        is_wanted.then(|| Bytes::from(format!("{}data: {}\n\n", id(Some(place)), Value::Object(entry))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHOWN: Shown = Shown {
        kind: RecordKind::Audit,
        member: "entries",
        equal: &["op", "agentName"],
        below: Some("path"),
        text: false,
    };

    fn judged(query: &str, line: &Value) -> Verdict {
        let mut fields = Fields::of_query(query);
        let filter = Filter::read(&mut fields, &SHOWN);
        fields.finish(Some(())).unwrap();
        filter.judge(line.as_object().unwrap())
    }

    #[test]
    fn a_filter_takes_what_is_equal_below_and_in_time() {
        let line = json!({"timestamp": "2026-11-22T10:00:00.000Z", "op": "write", "path": "apps/notes/a.txt", "agentName": "x"});
        for (query, verdict) in [
            ("", Verdict::Take),
            ("op=write", Verdict::Take),
            ("op=delete", Verdict::Skip),
            ("op=write&agentName=y", Verdict::Skip),
            ("path=apps/notes", Verdict::Take),
            ("path=apps/notes/", Verdict::Take),
            ("path=apps/no", Verdict::Skip),
            ("path=apps/notes/a.txt", Verdict::Take),
            ("path=/", Verdict::Take),
            ("since=2026-11-22T10:00:00Z", Verdict::Take),
            ("since=2026-11-22T10:00:00.001Z", Verdict::Skip),
            ("since=2026-11-24T12:00:00.000Z", Verdict::Skip),
            ("since=2026-11-24T12:00:00.001Z", Verdict::Stop),
            ("until=2026-11-22T10:00:00Z", Verdict::Skip),
            ("until=2026-11-22T10:00:00.001Z", Verdict::Take),
        ] {
            assert_eq!(judged(query, &line), verdict, "{query}");
        }
    }

    #[test]
    fn a_gap_is_always_shown() {
        let line = json!({"timestamp": "2026-11-22T10:00:00.000Z", "gap": {"lost": 1}});
        assert_eq!(judged("op=write&path=a", &line), Verdict::Take);
        assert_eq!(judged("until=2026-11-22T00:00:00Z", &line), Verdict::Skip);
    }

    #[test]
    fn a_line_of_text_is_its_time_and_the_rest() {
        let shown =
            Shown { kind: RecordKind::Activity, member: "entries", equal: &[], below: None, text: true };
        let told = Value::Object(entry(&shown, "2026-11-22T10:00:00.000Z a limit was armed").unwrap());
        assert_eq!(told, json!({"timestamp": "2026-11-22T10:00:00.000Z", "text": "a limit was armed"}));
        assert!(entry(&shown, "no time").is_none() && entry(&shown, "").is_none());
        assert!(entry(&SHOWN, "[]").is_none() && entry(&SHOWN, "{").is_none());
    }
}
