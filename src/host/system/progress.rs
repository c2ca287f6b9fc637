//! The progress of a long run: reported to systemd as its status, shown as a bar on a terminal, and published to
//! subscribers.

use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use sd_notify::NotifyState;
use tokio::sync::watch;

use super::systemd;
use svc_wire::registration::StageProgress;

/// Minimum time between two status updates to systemd.
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

    /// Starts a phase of unknown length.
    pub fn start_phase(&self, phase: &'static str) {
        systemd::notify(&[NotifyState::Status(phase)]);
        self.show("{spinner} {msg} ({elapsed})", phase);
    }

    /// Starts a phase of `total` bytes.
    pub fn start_bytes_phase(&self, phase: &'static str, total: u64) {
        systemd::notify(&[NotifyState::Status(phase)]);
        self.show(
            "{spinner} {msg}: {bytes} of {total_bytes} {wide_bar} {binary_bytes_per_sec}, {eta} left",
            phase,
        );
        if let Some(bar) = &self.bar {
            bar.set_length(total);
        }
    }

    /// Reports the number of bytes processed so far.
    pub fn report_bytes(&self, phase: &'static str, done: u64, total: u64) {
        let progress = Some(StageProgress::of_bytes(done, total));
        // An unchanged value is not progress.
        self.progress.send_if_modified(|current| std::mem::replace(current, progress) != progress);
        if let Some(bar) = &self.bar {
            bar.set_position(done);
        }
        let mut last_status = self.last_status.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if last_status.elapsed() >= STATUS_INTERVAL {
            *last_status = Instant::now();
            let percent = done.saturating_mul(100).checked_div(total).unwrap_or(100).min(100);
            systemd::notify(&[NotifyState::Status(&format!("{phase}: {percent}% of {} MiB", total >> 20))]);
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
