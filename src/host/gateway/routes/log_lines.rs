//! Serves log lines, both as newest-first pages and as streams of new lines.

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
use tokio_util::sync::CancellationToken;

use crate::bridge;
use crate::events::{self, HEARTBEAT_INTERVAL, MAX_STREAM_DURATION, RETRY_DELAY_MS};
use svc_base::error_chain::format_chain;
use svc_host::agents::kernel::Kernel;
use svc_host::records::files::{LinePosition, LogKind, TailPosition};
use svc_host::records::page::{self, PageError, Verdict};
use svc_host::records::tail::Tail;
use svc_http::fields::Fields;
use svc_http::problem::{Code, Problem};
use svc_machine::choice::must_be_one_of;

pub const DEFAULT_LIMIT: usize = 50;
pub const MAX_LIMIT: usize = 1000;
/// Maximum length of a filter value.
pub const MAX_FILTER_CHARS: usize = 1024;
/// Poll interval for new lines.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Maximum assumed disorder of lines, in hours. The clock may have been set back, and changing the owner's time zone
/// (by up to 26 hours) can put lines into an earlier or later day's file.
const MAX_DISORDER_HOURS: i64 = 50;

/// A log and its supported filters.
pub struct LogView {
    pub kind: LogKind,
    /// Response member that contains the lines.
    pub member: &'static str,
    /// Line members that must equal the filter of the same name. In ambiguous audit entries, they are lists that must
    /// contain the filter value.
    pub exact_members: &'static [&'static str],
    /// Allowed values, for `exact_members` with a fixed set.
    pub values: &'static [(&'static str, &'static [&'static str])],
    /// Path member: the filter of the same name selects that path and everything below it.
    pub path_member: Option<&'static str>,
    /// Defaults for text members missing from lines written by earlier releases.
    pub defaults: &'static [(&'static str, &'static str)],
    /// Whether lines are plain text rather than JSON. Text lines support the substring filter `contains`.
    pub is_text: bool,
}

/// Filters parsed from a request.
#[derive(Default)]
struct LogFilter {
    exact: Vec<(&'static str, String)>,
    path_prefix: Option<(&'static str, String)>,
    contains: Option<String>,
    since: Option<Timestamp>,
    until: Option<Timestamp>,
}

impl LogFilter {
    fn read(query: &mut Fields, view: &LogView) -> Self {
        let mut exact = Vec::new();
        for &name in view.exact_members {
            let Some(wanted) = query.optional_text(name, MAX_FILTER_CHARS) else { continue };
            let values = view.values.iter().find(|(member, _)| *member == name).map(|(_, values)| *values);
            if let Some(values) = values.filter(|values| !values.contains(&wanted.as_str())) {
                query.add_error(name, must_be_one_of(values));
            }
            exact.push((name, wanted));
        }
        let mut text = |name| query.optional_text(name, MAX_FILTER_CHARS);
        Self {
            exact,
            path_prefix: view
                .path_member
                .and_then(|name| Some((name, text(name)?.trim_end_matches('/').to_owned()))),
            contains: view.is_text.then(|| text("contains")).flatten(),
            since: query.optional_time("since"),
            until: query.optional_time("until"),
        }
    }

    fn evaluate(&self, entry: &Map<String, Value>) -> Verdict {
        let time =
            entry.get("timestamp").and_then(Value::as_str).and_then(|text| text.parse::<Timestamp>().ok());
        if let (Some(time), Some(since)) = (time, self.since)
            && time < since
        {
            let can_stop_scanning =
                since.checked_sub(MAX_DISORDER_HOURS.hours()).is_ok_and(|limit| time < limit);
            return if can_stop_scanning { Verdict::Stop } else { Verdict::Skip };
        }
        let is_before_end = self.until.is_none_or(|until| time.is_some_and(|time| time < until));
        let text = |name: &str| entry.get(name).and_then(Value::as_str);
        // A gap replaces dropped lines, some of which may have matched.
        let is_gap = entry.contains_key("gap");
        // Ambiguous audit entries list all agents that may have made the change.
        let is_ambiguous = entry.get("ambiguous") == Some(&Value::Bool(true));
        let list_contains =
            |value: &str, wanted: &str| is_ambiguous && value.split(", ").any(|name| name == wanted);
        let is_equal = self.exact.iter().all(|(name, wanted)| {
            text(name).is_some_and(|value| value == wanted.as_str() || list_contains(value, wanted))
        });
        let is_under_path = self.path_prefix.as_ref().is_none_or(|(name, wanted)| {
            let rest = text(name).and_then(|path| path.strip_prefix(&**wanted));
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/') || wanted.is_empty())
        });
        let has_text =
            self.contains.as_ref().is_none_or(|part| text("text").is_some_and(|line| line.contains(part)));
        if is_before_end && (is_gap || (is_equal && is_under_path && has_text)) {
            Verdict::Take
        } else {
            Verdict::Skip
        }
    }
}

/// Parses a line, returning `None` if it isn't valid for this log.
fn parse_line(view: &LogView, line: &str) -> Option<Map<String, Value>> {
    if !view.is_text {
        return match serde_json::from_str(line) {
            Ok(Value::Object(mut entry)) => {
                for &(name, value) in view.defaults {
                    entry.entry(name).or_insert_with(|| value.into());
                }
                Some(entry)
            }
            _ => None,
        };
    }
    let (timestamp, text) = line.split_once(' ')?;
    timestamp.parse::<Timestamp>().ok()?;
    Some(Map::from_iter([("timestamp".to_owned(), timestamp.into()), ("text".to_owned(), text.into())]))
}

/// Returns a page of log lines.
///
/// # Errors
/// 400 for an invalid parameter; 410 if the cursor's lines no longer exist; 500 if a file cannot be read.
pub async fn list(kernel: &Kernel, view: &'static LogView, query: Option<&str>) -> Result<Response, Problem> {
    let mut query = Fields::from_query(query.unwrap_or_default());
    let limit = query.number_in_range("limit", 1..=MAX_LIMIT, DEFAULT_LIMIT);
    let cursor: Option<LinePosition> = query.optional("cursor");
    let filter = LogFilter::read(&mut query, view);
    let filter = query.finish(Some(filter))?;
    let logs = kernel.logs();
    let read = tokio::task::spawn_blocking(move || {
        let mut entries = Vec::new();
        let page = page::read_newest(view.kind, &logs, cursor, limit, |line| {
            let Some(entry) = parse_line(view, line) else { return Verdict::Skip };
            let verdict = filter.evaluate(&entry);
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
            let detail = "The lines after this cursor are no longer available; start again without it.";
            return Err(Problem::new(Code::Gone, detail));
        }
        Err(PageError::File(error)) => return Err(Problem::internal(&error)),
    };
    let response = json!({ view.member: entries, "nextCursor": next.map(|position| position.to_string()) });
    Ok(bridge::json_response(StatusCode::OK, Bytes::from(response.to_string())).into_response())
}

/// Streams new log lines until the gateway shuts down, cancelling `closing`, or `MAX_STREAM_DURATION` has elapsed. The
/// client then reconnects.
///
/// # Errors
/// 400 for an invalid filter or `Last-Event-ID`; 410 if the lines after `Last-Event-ID` no longer exist; 500 if a file
/// cannot be read; 503 if too many streams are open.
pub async fn follow(
    kernel: &Arc<Kernel>,
    view: &'static LogView,
    headers: &HeaderMap,
    query: Option<&str>,
    closing: CancellationToken,
) -> Result<Response, Problem> {
    let mut query = Fields::from_query(query.unwrap_or_default());
    let filter = LogFilter::read(&mut query, view);
    let filter = query.finish(Some(filter))?;
    let last_event_id = parse_last_event_id(headers)?;
    let too_many = || {
        let detail = "Too many streams are open: close one, or try again later.";
        Problem::new(Code::Unavailable, detail).retry_after(5)
    };
    let permit = kernel.admit_log_stream().ok_or_else(too_many)?;
    let logs = kernel.logs();
    let opened = tokio::task::spawn_blocking(move || match last_event_id {
        Some(position) => Tail::resume_after(view.kind, logs, position),
        None => Tail::from_end(view.kind, logs).map(Some),
    });
    let tail = opened.await.map_err(|error| Problem::internal(&error))?;
    let tail = tail.map_err(|error| Problem::internal(&error))?;
    let detail = "The events after `Last-Event-ID` are no longer available; start again without it.";
    let gone = || Problem::new(Code::Gone, detail);
    let tail = tail.ok_or_else(gone)?;
    let now = Instant::now();
    let ready_event =
        format!("retry: {RETRY_DELAY_MS}\n{}event: ready\ndata: {{}}\n\n", id_line(tail.position()));
    let log_stream = LogStream {
        tail: Some(tail),
        view,
        filter,
        queued: VecDeque::from([Bytes::from(ready_event)]),
        next_heartbeat: now + HEARTBEAT_INTERVAL,
        deadline: now + MAX_STREAM_DURATION,
        _permit: permit,
    };
    Ok(events::stream_response(stream::unfold((log_stream, closing), |(mut stream, closing)| async move {
        let chunk = closing.run_until_cancelled(stream.next()).await??;
        Some((Ok::<_, Infallible>(chunk), (stream, closing)))
    })))
}

fn parse_last_event_id(headers: &HeaderMap) -> Result<Option<TailPosition>, Problem> {
    let Some(value) = headers.get("last-event-id").filter(|value| !value.is_empty()) else { return Ok(None) };
    let position = value.to_str().ok().and_then(|text| text.parse().ok());
    let invalid_id = || Problem::field("Last-Event-ID", "must be the id of an event");
    position.map(Some).ok_or_else(invalid_id)
}

fn id_line(position: Option<TailPosition>) -> String {
    position.map(|position| format!("id: {position}\n")).unwrap_or_default()
}

/// State of a log stream.
struct LogStream {
    /// `None` while a blocking thread reads the next lines.
    tail: Option<Tail>,
    view: &'static LogView,
    filter: LogFilter,
    queued: VecDeque<Bytes>,
    next_heartbeat: Instant,
    deadline: Instant,
    _permit: OwnedSemaphorePermit,
}

impl LogStream {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(chunk) = self.queued.pop_front() {
                self.next_heartbeat = Instant::now() + HEARTBEAT_INTERVAL;
                return Some(chunk);
            }
            let now = Instant::now();
            if now >= self.deadline {
                return None;
            }
            let mut tail = self.tail.take()?;
            let (tail, lines) = tokio::task::spawn_blocking(move || {
                let lines = tail.read_lines();
                (tail, lines)
            })
            .await
            .ok()?;
            let position = tail.position();
            self.tail = Some(tail);
            match lines {
                Ok(lines) => {
                    let events: Vec<Bytes> = lines
                        .iter()
                        .filter_map(|(position, line)| self.format_event(*position, line))
                        .collect();
                    self.queued.extend(events);
                }
                Err(error) => {
                    tracing::warn!(error = %format_chain(&error), "cannot read new lines; ending the stream");
                    return None;
                }
            }
            if self.queued.is_empty() {
                if now >= self.next_heartbeat {
                    self.queued.push_back(Bytes::from(format!(": heartbeat\n{}\n", id_line(position))));
                } else {
                    tokio::time::sleep(POLL_INTERVAL).await;
                }
            }
        }
    }

    fn format_event(&self, position: TailPosition, line: &str) -> Option<Bytes> {
        let entry = parse_line(self.view, line)?;
        let is_wanted = self.filter.evaluate(&entry) == Verdict::Take;
        is_wanted
            .then(|| Bytes::from(format!("{}data: {}\n\n", id_line(Some(position)), Value::Object(entry))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VIEW: LogView = LogView {
        kind: LogKind::Audit,
        member: "entries",
        exact_members: &["op", "agentName"],
        values: &[],
        path_member: Some("path"),
        defaults: &[],
        is_text: false,
    };

    fn verdict_of(query: &str, line: &Value) -> Verdict {
        let mut fields = Fields::from_query(query);
        let filter = LogFilter::read(&mut fields, &VIEW);
        fields.finish(Some(())).unwrap();
        filter.evaluate(line.as_object().unwrap())
    }

    #[test]
    fn filter_matches_members_paths_and_times() {
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
            assert_eq!(verdict_of(query, &line), verdict, "{query}");
        }
    }

    #[test]
    fn filter_matches_each_agent_of_ambiguous_entry() {
        let entry = |is_ambiguous: bool| {
            json!({"timestamp": "2026-11-22T10:00:00.000Z", "op": "write", "path": "a", "agentName": "bob, alice",
                "ambiguous": is_ambiguous})
        };
        for (query, is_ambiguous, verdict) in [
            ("agentName=bob", true, Verdict::Take),
            ("agentName=alice", true, Verdict::Take),
            ("agentName=bob,%20alice", true, Verdict::Take),
            ("agentName=ali", true, Verdict::Skip),
            ("agentName=alice&op=delete", true, Verdict::Skip),
            ("agentName=alice", false, Verdict::Skip),
        ] {
            assert_eq!(verdict_of(query, &entry(is_ambiguous)), verdict, "{query} {is_ambiguous}");
        }
    }

    #[test]
    fn filter_keeps_gaps_within_time_range() {
        let line = json!({"timestamp": "2026-11-22T10:00:00.000Z", "gap": {"lost": 1}});
        assert_eq!(verdict_of("op=write&path=a", &line), Verdict::Take);
        assert_eq!(verdict_of("until=2026-11-22T00:00:00Z", &line), Verdict::Skip);
    }

    #[test]
    fn filter_rejects_unknown_value() {
        let view = LogView { values: &[("op", &["create", "write"])], ..VIEW };
        for (query, is_valid) in [("op=write", true), ("op=bogus", false), ("agentName=any", true)] {
            let mut fields = Fields::from_query(query);
            let filter = LogFilter::read(&mut fields, &view);
            assert_eq!(fields.finish(Some(filter)).is_ok(), is_valid, "{query}");
        }
    }

    #[test]
    fn parse_line_fills_in_defaults_for_old_lines() {
        let view = LogView {
            exact_members: &["kind"],
            defaults: &[("kind", "database")],
            path_member: None,
            ..VIEW
        };
        for (line, kind) in [("{}", "database"), (r#"{"kind":"files"}"#, "files")] {
            assert_eq!(parse_line(&view, line).unwrap()["kind"], kind);
        }
    }

    #[test]
    fn parse_line_splits_text_lines() {
        let view = LogView {
            kind: LogKind::Activity,
            member: "entries",
            exact_members: &[],
            values: &[],
            path_member: None,
            defaults: &[],
            is_text: true,
        };
        let parsed =
            Value::Object(parse_line(&view, "2026-11-22T10:00:00.000Z a limit was changed").unwrap());
        assert_eq!(parsed, json!({"timestamp": "2026-11-22T10:00:00.000Z", "text": "a limit was changed"}));
        assert!(parse_line(&view, "no time").is_none() && parse_line(&view, "").is_none());
        assert!(parse_line(&VIEW, "[]").is_none() && parse_line(&VIEW, "{").is_none());
    }
}
