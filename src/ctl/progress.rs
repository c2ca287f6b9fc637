//! What happens while somebody waits, on standard error: a line for what is over, and on a terminal a moving one for
//! what goes on.

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
        let terminal = std::io::stderr().is_terminal();
        let spinner = terminal.then(|| {
            let spinner = ProgressBar::new_spinner();
            if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} ({elapsed})") {
                spinner.set_style(style);
            }
            spinner.enable_steady_tick(Duration::from_millis(120));
            spinner
        });
        let view =
            View { colours: terminal && View::of_stdout().colours, now: Timestamp::now(), width: None };
        Self { spinner, view }
    }

    /// Of so many bytes.
    pub fn of_bytes(whole: u64) -> Self {
        let progress = Self::start();
        let bar = "{spinner} {bytes} of {total_bytes} {wide_bar} {binary_bytes_per_sec}, {eta} left";
        if let (Some(spinner), Ok(style)) = (&progress.spinner, ProgressStyle::with_template(bar)) {
            spinner.set_length(whole);
            spinner.set_style(style);
        }
        progress
    }

    /// So many of them.
    pub fn bytes(&self, so_far: u64) {
        if let Some(spinner) = &self.spinner {
            spinner.set_position(so_far);
        }
    }

    /// How the lines look.
    pub fn view(&self) -> &View {
        &self.view
    }

    /// Something is over.
    pub fn line(&self, text: &str) {
        match &self.spinner {
            Some(spinner) => spinner.suspend(|| eprintln!("{text}")),
            None => eprintln!("{text}"),
        }
    }

    /// Something goes on.
    pub fn at(&self, text: String) {
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
