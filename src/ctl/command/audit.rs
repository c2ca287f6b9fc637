//! `svcctl audit`: lists audit entries and, with `--follow`, prints new ones.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use crate::api::{ApiClient, CallError};
use crate::args::Audit as Args;
use crate::output::{Output, print};
use crate::show::View;
use crate::show::audit::{self, AuditEntry, AuditEntryPage};
use svc_base::applet::Failure;
use svc_base::clock::rfc3339_ms;

const FOLLOW_INTERVAL: Duration = Duration::from_secs(2);
/// Maximum delay until an entry becomes visible. Entries are timestamped at the start of their transaction but only
/// become visible when it commits, possibly after entries with later timestamps.
const MAX_TRANSACTION_DURATION: SignedDuration = SignedDuration::from_secs(60);
/// How long `--follow` retries while the platform is unresponsive.
const OUTAGE_TIMEOUT: Duration = Duration::from_secs(600);
const MAX_PAGE_SIZE: &str = "500";
/// One in this many polls reads all pages, since a late entry may be on any of them. The others stop at the first page
/// without new entries.
const POLLS_PER_FULL_READ: usize = 10;

pub async fn run(api: &ApiClient, args: Args, out: &Output) -> Result<(), Failure> {
    let mut query = filters(&args);
    query.extend(args.since.map(|since| ("since", rfc3339_ms(since))));
    query.extend(args.until.map(|until| ("until", rfc3339_ms(until))));
    query.extend(args.cursor.map(|cursor| ("cursor", cursor.to_string())));
    query.push(("limit", args.limit.to_string()));
    let response = api.get(&["audit"], &query).await?;
    if !args.follow {
        return out
            .print_response(&response, |view| Ok(audit::list(view, &response.parse::<AuditEntryPage>()?)));
    }
    follow(api, &args, response.parse::<AuditEntryPage>()?, out).await
}

/// Prints the first page, then new entries as they appear.
async fn follow(api: &ApiClient, args: &Args, first: AuditEntryPage, out: &Output) -> Result<(), Failure> {
    // Skip entries older than the first page.
    let oldest = first.entries.last().map(|entry| entry.at);
    let mut window = FollowWindow { since: args.since, ..FollowWindow::default() };
    let mut started = Instant::now();
    let mut entries = window.add(first.entries, started);
    for poll_number in 0_usize.. {
        for entry in entries.iter().filter(|entry| oldest.is_none_or(|oldest| entry.at >= oldest)) {
            print_entry(entry, out)?;
        }
        let pages = if poll_number % POLLS_PER_FULL_READ == 0 {
            PagesToRead::All
        } else {
            PagesToRead::UntilNoNewEntries
        };
        if poll_number == 0 {
            window.advance(started);
        }
        tokio::time::sleep(FOLLOW_INTERVAL).await;
        started = Instant::now();
        entries = poll_new_entries(api, args, &mut window, pages).await?;
        if pages == PagesToRead::All {
            window.advance(started);
        }
    }
    Ok(())
}

/// How many pages of the window to read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PagesToRead {
    All,
    /// Up to the first page without new entries.
    UntilNoNewEntries,
}

/// Time range in which entries may still appear, plus the entries already received in it.
#[derive(Default, Clone)]
struct FollowWindow {
    since: Option<Timestamp>,
    seen: HashMap<String, Timestamp>,
    /// An entry's timestamp, and when we received it: the platform clock had passed that timestamp by then. Of all
    /// received entries, this one gives the highest lower bound for the clock.
    clock_bound: Option<(Timestamp, Instant)>,
}

impl FollowWindow {
    /// Adds entries, sorted newest first, and returns the new ones, oldest first.
    fn add(&mut self, mut entries: Vec<AuditEntry>, now: Instant) -> Vec<AuditEntry> {
        entries.retain(|entry| self.seen.insert(entry.audit_id.clone(), entry.at).is_none());
        entries.reverse();
        if let Some(at) = entries.iter().map(|entry| entry.at).max()
            && self.platform_time(now).is_none_or(|time| at > time)
        {
            self.clock_bound = Some((at, now));
        }
        entries
    }

    /// Returns a lower bound for the platform's time at `now`. Doesn't use the local wall clock, which may be wrong.
    fn platform_time(&self, now: Instant) -> Option<Timestamp> {
        let (at, received_at) = self.clock_bound?;
        at.checked_add(now.saturating_duration_since(received_at)).ok()
    }

    /// Advances the window after all pages were read, starting at `read_started`. Entries that appear later are at most
    /// [`MAX_TRANSACTION_DURATION`] older than that.
    fn advance(&mut self, read_started: Instant) {
        let since =
            self.platform_time(read_started).and_then(|time| time.checked_sub(MAX_TRANSACTION_DURATION).ok());
        self.since = self.since.max(since);
        if let Some(since) = self.since {
            // The query truncates `since` to milliseconds, so the next response still includes all entries in that
            // millisecond.
            self.seen.retain(|_, at| at.as_millisecond() >= since.as_millisecond());
        }
    }
}

fn filters(args: &Args) -> Vec<(&'static str, String)> {
    let filters = [("actor", &args.actor), ("action", &args.action), ("target", &args.target)];
    filters.into_iter().filter_map(|(name, value)| Some((name, value.clone()?))).collect()
}

/// Returns the window's new entries, oldest first. Retries transient errors for [`OUTAGE_TIMEOUT`], each time from the
/// first page.
async fn poll_new_entries(
    api: &ApiClient,
    args: &Args,
    window: &mut FollowWindow,
    pages: PagesToRead,
) -> Result<Vec<AuditEntry>, Failure> {
    let started = Instant::now();
    let mut is_outage_reported = false;
    loop {
        let mut next = window.clone();
        match fetch_new_entries(api, args, &mut next, pages).await {
            Ok(entries) => {
                *window = next;
                if is_outage_reported {
                    eprintln!("the platform responds again");
                }
                return Ok(entries);
            }
            Err(error) if error.is_transient() && started.elapsed() < OUTAGE_TIMEOUT => {
                if !std::mem::replace(&mut is_outage_reported, true) {
                    eprintln!("still following: {}", error.brief());
                }
                tokio::time::sleep(FOLLOW_INTERVAL).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

async fn fetch_new_entries(
    api: &ApiClient,
    args: &Args,
    window: &mut FollowWindow,
    pages: PagesToRead,
) -> Result<Vec<AuditEntry>, CallError> {
    let mut query = filters(args);
    query.extend(window.since.map(|since| ("since", rfc3339_ms(since))));
    query.push(("limit", MAX_PAGE_SIZE.to_owned()));
    let mut page: AuditEntryPage = api.poll(&["audit"], &query).await?.parse()?;
    let mut all = Vec::new();
    loop {
        let mut new = window.add(page.entries, Instant::now());
        let is_complete = pages == PagesToRead::UntilNoNewEntries && new.is_empty();
        new.append(&mut all);
        all = new;
        let Some(cursor) = page.next_cursor.filter(|_| !is_complete) else { return Ok(all) };
        let mut query = query.clone();
        query.push(("cursor", cursor));
        page = api.poll(&["audit"], &query).await?.parse()?;
    }
}

fn print_entry(entry: &AuditEntry, out: &Output) -> Result<(), Failure> {
    if out.is_json {
        let json: &Value = &entry.json;
        return print(&format!("{json}\n"));
    }
    print(&audit::line(&View::for_stdout(), entry))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn entry(id: &str, at: Timestamp) -> AuditEntry {
        AuditEntry { audit_id: id.to_owned(), at, json: json!({}) }
    }

    #[test]
    fn follow_window_advances_without_later_entries() {
        let (at, start) = (Timestamp::UNIX_EPOCH, Instant::now());
        let mut window = FollowWindow::default();
        assert_eq!(window.add(vec![entry("b", at), entry("a", at)], start).len(), 2);
        window.advance(start);
        assert_eq!(window.since, Some(at - MAX_TRANSACTION_DURATION));
        assert!(window.add(vec![entry("b", at), entry("a", at)], start).is_empty());
        window.advance(start + Duration::from_secs(61));
        assert_eq!(window.since, Some(at + SignedDuration::from_secs(1)));
        assert!(window.seen.is_empty(), "entries before the window are dropped");
    }

    #[test]
    fn advance_keeps_entries_in_same_millisecond_as_since() {
        let (at, start) = (Timestamp::UNIX_EPOCH, Instant::now());
        let mut window = FollowWindow::default();
        window.add(vec![entry("a", at)], start);
        // The window now starts 0.5 ms after the entry.
        let later = start + Duration::from_micros(60_000_500);
        window.advance(later);
        assert!(window.since > Some(at), "{:?}", window.since);
        assert!(window.add(vec![entry("a", at)], later).is_empty());
    }

    #[test]
    fn add_returns_late_entries_once_and_in_order() {
        let (at, now) = (Timestamp::UNIX_EPOCH, Instant::now());
        let second = SignedDuration::from_secs(1);
        let mut window = FollowWindow::default();
        window.add(vec![entry("b", at)], now);
        window.advance(now);
        let late = window.add(vec![entry("c", at + second), entry("b", at), entry("a", at - second)], now);
        let ids: Vec<_> = late.iter().map(|entry| &*entry.audit_id).collect();
        assert_eq!(ids, ["a", "c"]);
        assert_eq!(window.clock_bound.map(|(at, _)| at), Some(at + second));
    }
}
