//! Progress reporting for long runs: a systemd status text, a progress bar on a terminal, and a watch channel for
//! subscribers.

use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use sd_notify::NotifyState;
use tokio::sync::watch;

use super::systemd;
use svc_base::quantity::format_bytes;
use svc_wire::registration::StageProgress;

/// Minimum interval between status updates to systemd.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);

pub struct Progress {
    bar: Option<ProgressBar>,
    last_status: Mutex<Instant>,
    progress: watch::Sender<Option<StageProgress>>,
}

impl Default for Progress {
    fn default() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new_spinner();
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        Self { bar, last_status: Mutex::new(Instant::now()), progress: watch::Sender::new(None) }
    }
}

impl Progress {
    /// Subscribes to progress changes.
    pub fn subscribe(&self) -> watch::Receiver<Option<StageProgress>> {
        self.progress.subscribe()
    }

    /// Reports the number of rows counted so far.
    pub fn report_rows(&self, done: u64, total: u64) {
        self.progress.send_replace(Some(StageProgress::of_rows(done, total)));
    }

    /// Starts a phase with no known total.
    pub fn start_phase(&self, phase: &'static str) {
        systemd::notify(&[NotifyState::Status(phase)]);
        self.show("{spinner} {msg} ({elapsed})", phase);
    }

    /// Starts a phase measured in bytes. `total` is `None` if unknown.
    pub fn start_bytes_phase(&self, phase: &'static str, total: Option<u64>) {
        systemd::notify(&[NotifyState::Status(phase)]);
        let Some(total) = total else {
            self.show("{spinner} {msg}: {bytes}, {binary_bytes_per_sec} ({elapsed})", phase);
            return;
        };
        self.show(
            "{spinner} {msg}: {bytes} of {total_bytes} {wide_bar} {binary_bytes_per_sec}, {eta} left",
            phase,
        );
        if let Some(bar) = &self.bar {
            bar.set_length(total);
        }
    }

    /// Reports the number of bytes processed so far.
    pub fn report_bytes(&self, phase: &'static str, done: u64, total: Option<u64>) {
        let progress = Some(StageProgress::of_bytes(done, total));
        // Don't wake subscribers for unchanged values.
        self.progress.send_if_modified(|current| std::mem::replace(current, progress) != progress);
        if let Some(bar) = &self.bar {
            bar.set_position(done);
        }
        let mut last_status = self.last_status.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if last_status.elapsed() >= STATUS_INTERVAL {
            *last_status = Instant::now();
            systemd::notify(&[NotifyState::Status(&format!("{phase}: {}", format_progress(done, total)))]);
        }
    }

    fn show(&self, template: &str, phase: &'static str) {
        if let (Some(bar), Ok(style)) = (&self.bar, ProgressStyle::with_template(template)) {
            bar.reset();
            bar.set_style(style);
            bar.set_message(phase);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Formats progress as `42% of 1.2 GiB`, or just `1.2 GiB` if the total is unknown.
fn format_progress(done: u64, total: Option<u64>) -> String {
    match total {
        Some(total) if total > 0 => {
            let percent = (done.saturating_mul(100) / total).min(100);
            format!("{percent}% of {}", format_bytes(total))
        }
        _ => format_bytes(done),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn format_progress_has_percentage_only_with_total() {
        assert_eq!(format_progress(1 << 19, Some(1 << 20)), "50% of 1.0 MiB");
        assert_eq!(format_progress(3000, Some(2000)), "100% of 2.0 KiB");
        for total in [None, Some(0)] {
            assert_eq!(format_progress(5 << 20, total), "5.0 MiB");
        }
    }
}
