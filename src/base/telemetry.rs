//! Logging: to the journal under systemd, otherwise as human-readable lines on stderr.
//!
//! Errors are logged once, where they're handled. Invariant: journal entries for a request carry `SVC_REQUEST_ID`, and
//! those for a machine `SVC_MACHINE_ID`.

use std::ffi::OsStr;
use std::os::fd::AsFd;

use tracing::{Level, Metadata, Subscriber};
use tracing_journald::{Priority, PriorityMappings};
use tracing_subscriber::filter::{ParseError, filter_fn};
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, fmt};

use crate::log_line::{LogFormat, TimeFormat};
use crate::vars::{NO_COLOR, RUST_LOG};
use svc_machine::id::MachineId;

/// Initializes logging for an applet. `RUST_LOG` sets the filter; the default is `info`.
pub fn init(applet: &'static str) {
    start(applet, None);
}

/// Like [`init`], but tags journal entries with the machine id as `SVC_MACHINE_ID`.
pub fn init_on_machine(applet: &'static str, machine: Option<MachineId>) {
    start(applet, machine);
}

fn start(applet: &'static str, machine: Option<MachineId>) {
    let (filter, filter_error) = match parse_filter(RUST_LOG.env_value().as_deref()) {
        Ok(filter) => (filter, None),
        Err(error) => (RUST_LOG.default_value(), Some(error)),
    };
    let registry = tracing_subscriber::registry().with(filter).with(filter_fn(is_loggable));
    let journal = is_stderr_journal().then(|| journal_layer(applet, machine)).and_then(Result::ok);
    let started = match journal {
        Some(journal) => registry.with(journal).try_init(),
        None => registry.with(stderr_layer(applet)).try_init(),
    };
    // Ignore a second initialization in the same process, as in tests.
    drop(started);
    if let Some(error) = filter_error {
        let default = RUST_LOG.default_value::<String>();
        tracing::warn!("invalid RUST_LOG: {error}; using {default}");
    }
}

/// Parses `RUST_LOG`. If unset, returns the default filter, since an empty filter would match nothing.
fn parse_filter(value: Option<&OsStr>) -> Result<EnvFilter, String> {
    let Some(value) = value else { return Ok(RUST_LOG.default_value()) };
    let value = value.to_str().ok_or("not UTF-8")?;
    value.parse().map_err(|error: ParseError| error.to_string())
}

/// Whether an event may be logged. Database driver events below `WARN` may not, regardless of `RUST_LOG`, because they
/// quote statements with row values.
fn is_loggable(metadata: &Metadata<'_>) -> bool {
    !metadata.target().starts_with("tokio_postgres") || *metadata.level() <= Level::WARN
}

/// The journal layer upper-cases field names: `svc_request_id` becomes `SVC_REQUEST_ID`.
fn journal_layer<S>(applet: &str, machine: Option<MachineId>) -> std::io::Result<impl Layer<S>>
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

fn stderr_layer<S>(applet: &'static str) -> impl Layer<S>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    let is_terminal = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let time_format = if is_terminal { TimeFormat::Short } else { TimeFormat::Full };
    fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(is_terminal && NO_COLOR.env_value().is_none())
        .event_format(LogFormat { applet, time_format })
}

/// Whether stderr goes to the journal. systemd sets `JOURNAL_STREAM` to the device and inode of the journal stream; see
/// systemd.exec(5).
fn is_stderr_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    let Ok(stat) = nix::sys::stat::fstat(std::io::stderr().as_fd()) else { return false };
    stream == format!("{}:{}", stat.st_dev, stat.st_ino)
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn parse_filter_defaults_to_info_and_rejects_invalid_values() {
        assert_eq!(parse_filter(None).unwrap().to_string(), "info");
        assert_eq!(parse_filter(Some(OsStr::new("svc=debug"))).unwrap().to_string(), "svc=debug");
        for invalid in [OsStr::new("svc=loud"), OsStr::from_bytes(b"\xff")] {
            assert!(parse_filter(Some(invalid)).is_err(), "{invalid:?}");
        }
    }
}
