//! A program that writes to the home directory during saves.

use std::io::Read;
use std::process::{Child, Command, Stdio};

/// A running program, killed on drop.
pub(super) struct WriterProcess(Child);

impl WriterProcess {
    /// Starts the program and waits for it to print `ready`.
    pub(super) fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
        let mut ready = [0; 6];
        child.stdout.as_mut().unwrap().read_exact(&mut ready).unwrap();
        Self(child)
    }

    pub(super) fn is_running(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for WriterProcess {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}
