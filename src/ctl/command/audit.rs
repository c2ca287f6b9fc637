//! `svcctl audit`: who changed what, once or as it is written.

use std::collections::HashSet;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use crate::applet::Failure;
use crate::clock::rfc3339_ms;
use crate::ctl::api::Api;
use crate::ctl::args::Audit as Args;
use crate::ctl::out::{Out, print};
use crate::ctl::show::View;
use crate::ctl::show::audit::{self, Entry, Page};

const FOLLOW_INTERVAL: Duration = Duration::from_secs(2);
/// An entry has the time at which its transaction began, and appears when that ends: later entries may be there first.
const MAX_TRANSACTION: SignedDuration = SignedDuration::from_secs(60);
const MAX_PAGE: &str = "500";

pub async fn run(api: &Api, args: Args, out: &Out) -> Result<(), Failure> {
    let mut query = filters(&args);
    query.extend(args.since.map(|since| ("since", rfc3339_ms(since))));
    query.extend(args.until.map(|until| ("until", rfc3339_ms(until))));
    query.extend(args.cursor.map(|cursor| ("cursor", cursor.to_string())));
    query.push(("limit", args.limit.to_string()));
    let answer = api.get(&["audit"], &query).await?;
    if !args.follow {
        return out.answer(&answer, |view| Ok(audit::list(view, &answer.read::<Page>()?)));
    }
    let mut entries = answer.read::<Page>()?.entries;
    let mut seen = HashSet::new();
    let mut newest = args.since;
    // What was older than the first page is not new when it comes again.
    let oldest = entries.last().map(|entry| entry.at);
    loop {
        entries.reverse();
        for entry in entries.iter().filter(|entry| oldest.is_none_or(|oldest| entry.at >= oldest)) {
            if seen.insert(entry.audit_id.clone()) {
                show(entry, out)?;
            }
        }
        newest = newest.max(entries.last().map(|entry| entry.at));
        tokio::time::sleep(FOLLOW_INTERVAL).await;
        let since = newest.and_then(|newest| newest.checked_sub(MAX_TRANSACTION).ok());
        entries = all_since(api, &args, since).await?;
        let again: HashSet<&String> = entries.iter().map(|entry| &entry.audit_id).collect();
        seen.retain(|id| again.contains(id));
    }
}

fn filters(args: &Args) -> Vec<(&'static str, String)> {
    let filters = [("actor", &args.actor), ("action", &args.action), ("target", &args.target)];
    filters.into_iter().filter_map(|(name, value)| Some((name, value.clone()?))).collect()
}

/// Every entry from then on, the newest first.
async fn all_since(api: &Api, args: &Args, since: Option<Timestamp>) -> Result<Vec<Entry>, Failure> {
    let mut query = filters(args);
    query.extend(since.map(|since| ("since", rfc3339_ms(since))));
    query.push(("limit", MAX_PAGE.to_owned()));
    let mut page: Page = api.get(&["audit"], &query).await?.read()?;
    let mut all = page.entries;
    while let Some(cursor) = page.next_cursor.take() {
        let mut query = query.clone();
        query.push(("cursor", cursor));
        page = api.get(&["audit"], &query).await?.read()?;
        all.append(&mut page.entries);
    }
    Ok(all)
}

fn show(entry: &Entry, out: &Out) -> Result<(), Failure> {
    if out.json {
        let whole: &Value = &entry.whole;
        return print(&format!("{whole}\n"));
    }
    print(&audit::line(&View::of_stdout(), entry))
}
