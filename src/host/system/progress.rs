//! How far a long run is: to systemd as its status, and to a person at a terminal as a bar.

use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use sd_notify::NotifyState;
use tokio::sync::watch;

use super::boot_progress::Amount;
use super::systemd;

/// systemd need not hear of every chunk.
const EACH: Duration = Duration::from_secs(1);

pub struct Progress {
    bar: Option<ProgressBar>,
    told: Mutex<Instant>,
    amount: watch::Sender<Option<Amount>>,
}

impl Default for Progress {
    fn default() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new_spinner();
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        Self { bar, told: Mutex::new(Instant::now()), amount: watch::Sender::new(None) }
    }
}

impl Progress {
    /// Each change of how much is done.
    pub fn subscribe(&self) -> watch::Receiver<Option<Amount>> {
        self.amount.subscribe()
    }

    /// So many rows of all have been counted.
    pub fn rows(&self, so_far: u64, whole: u64) {
        self.amount.send_replace(Some(Amount::of_rows(so_far, whole)));
    }

    /// Something begins whose end is not known.
    pub fn at(&self, what: &'static str) {
        systemd::tell(&[NotifyState::Status(what)]);
        self.show("{spinner} {msg} ({elapsed})", what);
    }

    /// Something begins that is over after so many bytes.
    pub fn of_bytes(&self, what: &'static str, whole: u64) {
        systemd::tell(&[NotifyState::Status(what)]);
        self.show(
            "{spinner} {msg}: {bytes} of {total_bytes} {wide_bar} {binary_bytes_per_sec}, {eta} left",
            what,
        );
        if let Some(bar) = &self.bar {
            bar.set_length(whole);
        }
    }

    /// So many of them are there.
    pub fn bytes(&self, what: &'static str, so_far: u64, whole: u64) {
        let amount = Some(Amount::of_bytes(so_far, whole));
        // What has not changed is no progress.
        self.amount.send_if_modified(|now| std::mem::replace(now, amount) != amount);
        if let Some(bar) = &self.bar {
            bar.set_position(so_far);
        }
        let mut told = self.told.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if told.elapsed() >= EACH {
            *told = Instant::now();
            let percent = so_far.saturating_mul(100).checked_div(whole).unwrap_or(100).min(100);
            systemd::tell(&[NotifyState::Status(&format!("{what}: {percent} % of {} MiB", whole >> 20))]);
        }
    }

    fn show(&self, template: &str, what: &'static str) {
        if let (Some(bar), Ok(style)) = (&self.bar, ProgressStyle::with_template(template)) {
            bar.reset();
            bar.set_style(style);
            bar.set_message(what);
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
