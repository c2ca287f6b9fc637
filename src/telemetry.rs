//! Where log lines go: the journal under systemd, readable lines on stderr otherwise.

use std::os::fd::AsFd;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Starts logging for one applet. `RUST_LOG` filters; the default is `info`.
pub fn init(applet: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let registry = tracing_subscriber::registry().with(filter);
    let started = if under_journal() {
        match tracing_journald::layer() {
            Ok(journal) => registry.with(journal.with_syslog_identifier(applet.to_owned())).try_init(),
            Err(_) => registry.with(lines()).try_init(),
        }
    } else {
        registry.with(lines()).try_init()
    };
    // A second start in one process (tests) keeps the first.
    drop(started);
}

fn lines<S>() -> tracing_subscriber::fmt::Layer<
    S,
    tracing_subscriber::fmt::format::DefaultFields,
    tracing_subscriber::fmt::format::Format,
    fn() -> std::io::Stderr,
>
where
    S: tracing::Subscriber + for<'a> tracing_subscriber::registry::LookupSpan<'a>,
{
    let stderr: fn() -> std::io::Stderr = std::io::stderr;
    let colour = std::io::IsTerminal::is_terminal(&std::io::stderr());
    tracing_subscriber::fmt::layer().with_writer(stderr).with_ansi(colour).with_target(false)
}

/// systemd sets `JOURNAL_STREAM` to the device and inode of the stream it gave us (systemd.exec(5)).
fn under_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    let Ok(stat) = nix::sys::stat::fstat(std::io::stderr().as_fd()) else { return false };
    stream == format!("{}:{}", stat.st_dev, stat.st_ino)
}
