//! A child process that is killed when its handle is dropped.

use std::io;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{AtExit, kill_on_exit, unregister, wait_until};

const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A child that is killed and reaped when it is dropped, and killed when this process ends.
#[derive(Debug)]
pub struct OwnedChild(Child);

impl OwnedChild {
    /// # Errors
    /// Fails if the program cannot be started.
    pub fn spawn(command: &mut Command) -> io::Result<Self> {
        let child = command.spawn()?;
        kill_on_exit(child.id(), AtExit::Kill);
        Ok(Self(child))
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// # Errors
    /// Fails if the signal cannot be sent, for example because the process has been reaped.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill(Pid::from_raw(i32::try_from(self.pid())?), signal)
            .with_context(|| format!("cannot send {signal}"))
    }

    /// Returns the child's standard output, if it is piped and has not been taken.
    pub fn stdout(&mut self) -> Option<&mut ChildStdout> {
        self.0.stdout.as_mut()
    }

    pub fn take_stdin(&mut self) -> Option<ChildStdin> {
        self.0.stdin.take()
    }

    pub fn take_stdout(&mut self) -> Option<ChildStdout> {
        self.0.stdout.take()
    }

    /// Returns the exit status, if the child has exited.
    pub fn status(&mut self) -> Option<ExitStatus> {
        self.0.try_wait().ok().flatten()
    }

    /// Waits until the child exits; returns `None` after the timeout.
    pub fn wait(&mut self, timeout: Duration) -> Option<ExitStatus> {
        wait_until(&mut self.0, Instant::now() + timeout)
    }

    /// Like [`Self::wait`], without blocking the thread.
    pub async fn wait_async(&mut self, timeout: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + timeout;
        loop {
            let status = self.status();
            if status.is_some() || Instant::now() >= deadline {
                return status;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Kills the child, unless it has exited, and reaps it.
    ///
    /// # Errors
    /// Fails if the child cannot be reaped.
    pub fn kill(&mut self) -> io::Result<ExitStatus> {
        self.0.kill().ok();
        self.0.wait()
    }
}

impl Drop for OwnedChild {
    fn drop(&mut self) {
        self.kill().ok();
        unregister(self.pid());
    }
}
