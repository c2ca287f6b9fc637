//! The question before something that cannot be taken back: typed on a terminal, or answered by `--yes`, never assumed.

use std::io::{self, BufRead, IsTerminal, Write};

use anyhow::anyhow;

use crate::applet::{Exit, Failure};

/// Goes on only when the operator types `word`, or has said `--yes`.
///
/// # Errors
/// [`Exit::Usage`] without a terminal, [`Exit::Refused`] after another answer.
pub fn ask(what: &str, word: &str, said_yes: bool) -> Result<(), Failure> {
    if said_yes {
        return Ok(());
    }
    if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        let error = anyhow!("{what}\n  next: there is no terminal to ask on; add --yes if that is meant");
        return Err(Failure::new(Exit::Usage, error));
    }
    eprint!("{what}\nType {word} to go on: ");
    io::stderr().flush().map_err(anyhow::Error::from)?;
    let mut typed = String::new();
    io::stdin().lock().read_line(&mut typed).map_err(anyhow::Error::from)?;
    if typed.trim() == word {
        return Ok(());
    }
    Err(Failure::new(Exit::Refused, anyhow!("not confirmed; nothing was done")))
}
