//! The question before something that cannot be taken back: typed on a terminal, or answered by `--yes`, never assumed.

use std::io::{self, BufRead, IsTerminal, Write};

use anyhow::anyhow;

use crate::applet::{Exit, Failure};

/// Whether there is a question to ask: no after `--yes`.
///
/// # Errors
/// [`Exit::Usage`] where there is nobody to ask. Nothing has been done or looked at by then.
pub fn is_due(what: &str, said_yes: bool) -> Result<bool, Failure> {
    if said_yes {
        return Ok(false);
    }
    if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        let error = anyhow!("{what}\n  next: there is no terminal to ask on; add --yes if that is meant");
        return Err(Failure::new(Exit::Usage, error));
    }
    Ok(true)
}

/// Goes on only when the operator types `word`.
///
/// # Errors
/// [`Exit::Refused`] after another answer.
pub fn ask(what: &str, word: &str) -> Result<(), Failure> {
    eprint!("{what}\nType {word} to go on: ");
    io::stderr().flush().map_err(anyhow::Error::from)?;
    let mut typed = String::new();
    io::stdin().lock().read_line(&mut typed).map_err(anyhow::Error::from)?;
    if typed.trim() == word {
        return Ok(());
    }
    Err(Failure::new(Exit::Refused, anyhow!("not confirmed; nothing was done")))
}
