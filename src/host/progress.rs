//! How far a long run is: to systemd as its status, and to a person at a terminal as a bar.

use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use sd_notify::NotifyState;

use super::systemd;

/// systemd need not hear of every chunk.
const EACH: Duration = Duration::from_secs(1);

pub struct Progress {
    bar: Option<ProgressBar>,
    told: Mutex<Instant>,
}

impl Default for Progress {
    fn default() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new_spinner();
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        Self { bar, told: Mutex::new(Instant::now()) }
    }
}

impl Progress {
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
