//! Stock `restic`, which must be able to read the repositories that `svc_files` writes.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::child;
use crate::packages::{Deb, DebTool, FetchedProgram};

const RESTIC: DebTool = DebTool {
    debs: &[Deb {
        name: "restic",
        version: "0.14.0-1+b5",
        sha256: "9d7e8c210736f3f15ed7cf425ab56aa5259b07d8422b958494bfd4359b5024d1",
    }],
    path: "usr/bin/restic",
};
const TIMEOUT: Duration = Duration::from_secs(300);

/// Runs `restic` on one repository.
pub struct Restic {
    program: FetchedProgram,
    /// A directory, or `s3:<endpoint>/<bucket>/<path>`.
    repository: String,
    password: String,
    environment: Vec<(String, String)>,
    cache: tempfile::TempDir,
}

impl Restic {
    /// Prepares `restic` for a repository in a directory. Fetches the program once into `target/tools`.
    ///
    /// # Errors
    /// Fails if apt-get cannot download the package, or if the architecture is not x86_64.
    pub fn for_directory(repository: &Path, password: &str) -> Result<Self> {
        Self::new(repository.display().to_string(), password, Vec::new())
    }

    /// Like [`Self::for_directory`], for a repository in an object store.
    ///
    /// # Errors
    /// Like [`Self::for_directory`].
    pub fn for_store(url: String, password: &str, access_key: &str, secret_key: &str) -> Result<Self> {
        let variables = [("AWS_ACCESS_KEY_ID", access_key), ("AWS_SECRET_ACCESS_KEY", secret_key)];
        let environment = variables.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        Self::new(url, password, environment)
    }

    fn new(repository: String, password: &str, environment: Vec<(String, String)>) -> Result<Self> {
        let (program, cache) = (RESTIC.locate_or_fetch()?, tempfile::tempdir()?);
        Ok(Self { program, repository, password: password.to_owned(), environment, cache })
    }

    /// Runs a command, and returns its output.
    ///
    /// # Errors
    /// Fails if `restic` cannot be started; fails with its output if the command fails or times out.
    pub fn run(&self, arguments: &[&str]) -> Result<String> {
        child::run(self.command(arguments), TIMEOUT)
            .with_context(|| format!("restic {}", arguments.join(" ")))
    }

    /// Builds a `restic` command for the repository.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.program.command();
        command.args(arguments).env("RESTIC_REPOSITORY", &self.repository);
        command.env("RESTIC_PASSWORD", &self.password).env("RESTIC_CACHE_DIR", self.cache.path());
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Checks the structure of the repository and the content of every pack.
    ///
    /// # Errors
    /// Fails if `restic` finds an error.
    pub fn check(&self) -> Result<()> {
        self.run(&["check", "--read-data"]).map(drop)
    }

    /// Restores a snapshot to `target`, and returns that directory.
    ///
    /// # Errors
    /// Fails if `restic` fails.
    pub fn restore(&self, snapshot: &str, target: &Path) -> Result<PathBuf> {
        self.run(&["restore", snapshot, "--target", &target.display().to_string()])?;
        Ok(target.to_owned())
    }
}
