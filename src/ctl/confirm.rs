//! Confirmation of risky commands: typed at a terminal or given as an option such as `--yes`, never assumed.

use std::io::{self, BufRead, IsTerminal, Write};

use anyhow::anyhow;

use svc_base::applet::{Exit, Failure};

/// Whether the operator must confirm the command's `effect` at the terminal. `false` with `--yes`.
///
/// # Errors
/// [`Exit::Usage`] if a confirmation is required and there is no terminal.
pub fn is_required(effect: &str, yes: bool) -> Result<bool, Failure> {
    is_required_without(effect, if yes { &[] } else { &["--yes"] })
}

/// Whether the operator must confirm at the terminal because of `missing_options`. `false` if there are none.
///
/// # Errors
/// [`Exit::Usage`] if a confirmation is required and there is no terminal.
pub fn is_required_without(effect: &str, missing_options: &[&str]) -> Result<bool, Failure> {
    if missing_options.is_empty() {
        return Ok(false);
    }
    if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        let options = missing_options.join(" and ");
        let error =
            anyhow!("{effect}\n  next: add {options} to confirm, because there is no terminal for a prompt");
        return Err(Failure::new(Exit::Usage, error));
    }
    Ok(true)
}

/// Prompts the operator to type `expected`.
///
/// # Errors
/// [`Exit::Refused`] on any other input; [`Exit::Internal`] on terminal I/O errors.
pub fn prompt(message: &str, expected: &str) -> Result<(), Failure> {
    eprint!("{message}\nType {expected} to continue: ");
    io::stderr().flush().map_err(anyhow::Error::from)?;
    let mut typed = String::new();
    io::stdin().lock().read_line(&mut typed).map_err(anyhow::Error::from)?;
    if typed.trim() == expected {
        return Ok(());
    }
    Err(Failure::new(Exit::Refused, anyhow!("not confirmed; nothing was done")))
}
