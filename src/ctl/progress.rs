//! Progress output on standard error: one line per completed step and, on a terminal, a spinner for the current one.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use jiff::Timestamp;

use super::show::View;

pub struct Progress {
    spinner: Option<ProgressBar>,
    view: View,
}

impl Progress {
    pub fn start() -> Self {
        let is_terminal = std::io::stderr().is_terminal();
        let spinner = is_terminal.then(|| {
            let spinner = ProgressBar::new_spinner();
            if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} ({elapsed})") {
                spinner.set_style(style);
            }
            spinner.enable_steady_tick(Duration::from_millis(120));
            spinner
        });
        let view = View {
            has_colors: is_terminal && View::for_stdout().has_colors,
            now: Timestamp::now(),
            width: None,
        };
        Self { spinner, view }
    }

    /// Starts a progress bar for a transfer of `total` bytes.
    pub fn with_total_bytes(total: u64) -> Self {
        let progress = Self::start();
        let template = "{spinner} {bytes} of {total_bytes} {wide_bar} {binary_bytes_per_sec}, {eta} left";
        if let (Some(spinner), Ok(style)) = (&progress.spinner, ProgressStyle::with_template(template)) {
            spinner.set_length(total);
            spinner.set_style(style);
        }
        progress
    }

    pub fn set_bytes(&self, bytes: u64) {
        if let Some(spinner) = &self.spinner {
            spinner.set_position(bytes);
        }
    }

    /// Returns the view for formatting printed lines.
    pub fn view(&self) -> &View {
        &self.view
    }

    /// Prints a line above the spinner.
    pub fn print_line(&self, text: &str) {
        match &self.spinner {
            Some(spinner) => spinner.suspend(|| eprintln!("{text}")),
            None => eprintln!("{text}"),
        }
    }

    pub fn set_message(&self, text: String) {
        if let Some(spinner) = &self.spinner {
            spinner.set_message(text);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(spinner) = &self.spinner {
            spinner.finish_and_clear();
        }
    }
}
