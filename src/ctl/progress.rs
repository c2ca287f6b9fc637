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
