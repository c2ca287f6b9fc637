//! Prints command output, tolerating readers such as `head` that close stdout early.

use std::io::{self, ErrorKind, Write};

use anyhow::Context;

use crate::applet::{Exit, Failure, OrExit};

/// Whether anyone is still reading the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputState {
    Open,
    Closed,
}

/// Prints to stdout. A broken pipe isn't an error.
///
/// # Errors
/// If writing to stdout fails for any other reason.
pub fn print(text: &str) -> Result<OutputState, Failure> {
    write(&mut io::stdout().lock(), text)
}

fn write(out: &mut impl Write, text: &str) -> Result<OutputState, Failure> {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(OutputState::Open),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(OutputState::Closed),
        Err(error) => Err(error).context("cannot write to standard output").or_exit(Exit::Internal),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn write_tolerates_closed_pipe() {
        let (reader, mut writer) = io::pipe().unwrap();
        assert_eq!(write(&mut writer, "first\n").unwrap(), OutputState::Open);
        drop(reader);
        assert_eq!(write(&mut writer, "second\n").unwrap(), OutputState::Closed);
    }
}
