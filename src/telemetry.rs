//! Where log lines go: the journal under systemd, readable lines on stderr otherwise.
//!
//! Owns the lines' form; what is logged, and once, is for whoever handles it. Invariant: under the journal a request's
//! lines carry `SVC_REQUEST_ID`, a machine's `SVC_MACHINE_ID`, as fields of their own.

use std::os::fd::AsFd;

use tracing::{Level, Metadata, Subscriber};
use tracing_journald::{Priority, PriorityMappings};
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, fmt};

use crate::log_line::{Clock, Line};
use crate::machine::id::MachineId;

/// Starts logging for one applet. `RUST_LOG` filters; the default is `info`.
pub fn init(applet: &'static str) {
    start(applet, None);
}

/// [`init`] for an applet of this machine.
pub fn init_on(applet: &'static str, machine: Option<MachineId>) {
    start(applet, machine);
}

fn start(applet: &'static str, machine: Option<MachineId>) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let registry = tracing_subscriber::registry().with(filter).with(filter_fn(may_be_told));
    let journal = under_journal().then(|| journal(applet, machine)).and_then(Result::ok);
    let started = match journal {
        Some(journal) => registry.with(journal).try_init(),
        None => registry.with(lines(applet)).try_init(),
    };
    // A second start in one process (tests) keeps the first.
    drop(started);
}

/// Whatever `RUST_LOG` asks for: below warnings, the database's driver writes out statements with the values of rows.
fn may_be_told(about: &Metadata<'_>) -> bool {
    !about.target().starts_with("tokio_postgres") || *about.level() <= Level::WARN
}

/// Fields keep their names, in capitals: `svc_request_id` is `SVC_REQUEST_ID`.
fn journal<S>(applet: &str, machine: Option<MachineId>) -> std::io::Result<impl Layer<S>>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    let levels =
        PriorityMappings { info: Priority::Informational, debug: Priority::Debug, ..PriorityMappings::new() };
    let journal = tracing_journald::layer()?
        .with_syslog_identifier(applet.to_owned())
        .with_priority_mappings(levels)
        .with_field_prefix(None);
    Ok(journal.with_custom_fields(machine.map(|machine| ("SVC_MACHINE_ID", machine.to_string()))))
}

fn lines<S>(applet: &'static str) -> impl Layer<S>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    let terminal = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let clock = if terminal { Clock::Short } else { Clock::Full };
    fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(terminal && std::env::var_os("NO_COLOR").is_none_or(|set| set.is_empty()))
        .event_format(Line { applet, clock })
}

/// systemd sets `JOURNAL_STREAM` to the device and inode of the stream it gave us (systemd.exec(5)).
fn under_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    let Ok(stat) = nix::sys::stat::fstat(std::io::stderr().as_fd()) else { return false };
    stream == format!("{}:{}", stat.st_dev, stat.st_ino)
}
