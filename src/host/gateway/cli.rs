//! `svc-gateway usage` and `svc-gateway logs`. Both read the files directly, so the gateway doesn't have to be running.

use std::path::{Path, PathBuf};
use std::time::Duration;

use comfy_table::{CellAlignment, Table, presets};
use jiff::civil::Date;

use svc_base::applet::{Exit, Failure, OrExit};
use svc_base::stdout::{OutputState, print};
use svc_base::untrusted_text;
use svc_host::records::files::LogKind;
use svc_host::records::ledger::{GroupBy, Totals, UsageQuery};
use svc_host::records::page::{self, PageError, Verdict};
use svc_host::records::tail::Tail;
use svc_host::records::usage_store;
use svc_host::system::layout::Layout;
use svc_wire::usage::UsageReport;

/// Poll interval for `logs --follow`.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

#[derive(clap::Args)]
pub struct UsageArgs {
    /// How to group the totals
    #[arg(long, value_enum, default_value_t = GroupBy::Day)]
    by: GroupBy,
    /// Only this user or channel
    #[arg(long, value_name = "ID")]
    user: Option<String>,
    /// The first day, such as 2026-11-01
    #[arg(long, value_name = "DAY")]
    since: Option<Date>,
    /// The last day
    #[arg(long, value_name = "DAY")]
    until: Option<Date>,
    /// Print the JSON of GET /api/usage
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
pub struct LogsArgs {
    /// Log to print
    #[arg(value_enum, default_value_t = LogName::Activity)]
    log: LogName,
    /// Number of existing lines to print
    #[arg(short = 'n', long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(0..=100_000))]
    lines: u32,
    /// Keep printing new lines
    #[arg(short, long)]
    follow: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum LogName {
    /// Events on the machine
    Activity,
    /// Ended dispatches
    Interactions,
    /// Changes to files by agents
    Audit,
    /// Daily measurements of storage
    Storage,
    /// Backup runs
    Backups,
}

impl From<LogName> for LogKind {
    fn from(name: LogName) -> Self {
        match name {
            LogName::Activity => Self::Activity,
            LogName::Interactions => Self::Interactions,
            LogName::Audit => Self::Audit,
            LogName::Storage => Self::Storage,
            LogName::Backups => Self::Backups,
        }
    }
}

/// Prints the usage report.
///
/// # Errors
/// If the records cannot be read or the report cannot be printed.
pub fn print_usage(layout: &Layout, args: UsageArgs) -> Result<(), Failure> {
    let ledger = usage_store::read_ledger(&layout.logs(), &layout.usage_seals()).or_exit(Exit::Internal)?;
    let UsageArgs { by, user, since, until, json } = args;
    let report = ledger.report(&UsageQuery { user_id: user, start: since, end: until, group_by: by });
    if json {
        let text = serde_json::to_string(&UsageReport::from(report)).or_exit(Exit::Internal)?;
        return print(&format!("{text}\n")).map(|_| ());
    }
    let group = match by {
        GroupBy::Day => "day",
        GroupBy::Week => "week starting",
        GroupBy::Month => "month starting",
        GroupBy::Model => "model",
        GroupBy::User => "user",
    };
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header([group, "cost", "tokens in", "tokens out", "dispatches"]);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let row = |name: String, totals: &Totals| {
        let numbers =
            [totals.tokens_in, totals.tokens_out, totals.dispatches].map(|number| number.to_string());
        [vec![name, totals.cost.to_string()], numbers.into()].concat()
    };
    for entry in report.entries {
        let name = entry.model.or(entry.user_id);
        // Both are untrusted: agents report model names, and senders choose their ids.
        let name = name.map(|name| untrusted_text::one_line(&name).into_owned());
        let name = name.unwrap_or_else(|| entry.date.to_string());
        table.add_row(row(name, &entry.totals));
    }
    table.add_row(row("all".to_owned(), &report.total));
    print(&format!("{table}\n")).map(|_| ())
}

/// Prints the last lines of a log and, with `--follow`, new lines as they arrive.
///
/// # Errors
/// If the log cannot be read or its lines cannot be printed.
pub fn print_logs(layout: &Layout, args: &LogsArgs) -> Result<(), Failure> {
    let (kind, logs): (LogKind, PathBuf) = (args.log.into(), layout.logs());
    // Open the tail first, so that it picks up lines written concurrently.
    let tail = args.follow.then(|| Tail::from_end(kind, logs.clone())).transpose().or_exit(Exit::Internal)?;
    let lines = read_existing_lines(kind, &logs, tail.as_ref(), args.lines as usize);
    let lines = lines.or_exit(Exit::Internal)?;
    for line in lines.iter().rev() {
        if print(&format!("{line}\n"))? == OutputState::Closed {
            return Ok(());
        }
    }
    let Some(mut tail) = tail else { return Ok(()) };
    loop {
        let lines = tail.read_lines().or_exit(Exit::Internal)?;
        if lines.is_empty() {
            std::thread::sleep(POLL_INTERVAL);
        }
        for (_, line) in lines {
            if print(&format!("{line}\n"))? == OutputState::Closed {
                return Ok(());
            }
        }
    }
}

/// Reads up to `limit` lines, newest first, excluding any that `tail` will return.
fn read_existing_lines(
    kind: LogKind,
    logs: &Path,
    tail: Option<&Tail>,
    limit: usize,
) -> Result<Vec<String>, PageError> {
    let mut lines = Vec::new();
    let mut before = None;
    if let Some(tail) = tail {
        // No position means there was no file yet, so the tail returns all lines.
        let Some(position) = tail.position() else { return Ok(lines) };
        before = Some(position.last);
    }
    while lines.len() < limit {
        let page = match page::read_newest(kind, logs, before, limit - lines.len(), |_| Verdict::Take) {
            // Retention removed the file concurrently.
            Err(PageError::Gone) => break,
            page => page?,
        };
        lines.extend(page.lines);
        before = page.next;
        if before.is_none() {
            break;
        }
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn read_existing_lines_excludes_tail_lines() {
        let dir = tempfile::tempdir().unwrap();
        let (kind, logs) = (LogKind::Audit, dir.path());
        let open_tail = || Tail::from_end(kind, logs.to_owned()).unwrap();
        let first_tail = open_tail();
        fs::write(logs.join("audit.jsonl"), "1\n2\n").unwrap();
        let tail = open_tail();
        fs::write(logs.join("audit.jsonl"), "1\n2\n3\n").unwrap();
        let read = |tail: Option<&Tail>| read_existing_lines(kind, logs, tail, 10).unwrap();
        assert_eq!(read(Some(&tail)), ["2", "1"]);
        assert_eq!(read(Some(&first_tail)), Vec::<String>::new());
        assert_eq!(read(None), ["3", "2", "1"]);
    }
}
