//! Common applet plumbing: dispatch, runtime and exit codes.
//!
//! Applets are selected by exact name, through `argv[0]` or `svc <name>`.

use std::ffi::OsString;
use std::fmt;
use std::future::Future;
use std::io::{self, Write};
use std::path::Path;
use std::process::{ExitCode, ExitStatus};
use std::sync::OnceLock;

use crate::error_chain::format_chain;
use crate::manual;

/// Program version and commit. Only the binary crate embeds the commit, so a new commit doesn't rebuild its
/// dependencies.
#[derive(Debug, Clone, Copy)]
pub struct Build {
    /// `0.1.0 (commit 0123456789ab, 2026-11-21)`.
    pub version: &'static str,
    pub commit: &'static str,
}

static BUILD: OnceLock<Build> = OnceLock::new();

/// Returns the build passed to [`dispatch`]. Processes that never call it, such as tests, get the package version and
/// an unknown commit.
pub fn build() -> Build {
    let unknown =
        Build { version: concat!(env!("CARGO_PKG_VERSION"), " (commit unknown)"), commit: "unknown" };
    BUILD.get().copied().unwrap_or(unknown)
}

/// Printed by every applet's `--version`.
pub fn version() -> &'static str {
    build().version
}

/// A program in the multi-call binary. Like `main`, `run` gets the full argument list, including the program name.
pub struct Applet {
    pub name: &'static str,
    pub about: &'static str,
    /// Builds the command-line definition.
    pub command: fn() -> clap::Command,
    pub run: fn(Vec<OsString>) -> ExitCode,
}

/// Declares the exit codes along with their meanings, so no list can miss one.
macro_rules! exit_codes {
    ($($name:ident = $code:literal, $meaning:literal;)+) => {
        /// Exit codes, after sysexits(3).
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u8)]
        pub enum Exit {
            $(#[doc = $meaning] $name = $code),+
        }

        impl Exit {
            pub const ALL: &[Self] = &[$(Self::$name),+];

            /// The meaning, as listed in `docs/reference/exit-codes.md`.
            pub fn meaning(self) -> &'static str {
                match self { $(Self::$name => $meaning),+ }
            }
        }
    };
}

exit_codes! {
    Usage = 64, "The command line is invalid.";
    Refused = 65,
        "The request was refused, an input such as a bundle or a snapshot is not usable, or a check found a \
         problem. A retry fails until the input or the state changes.";
    Unavailable = 69,
        "A required service is unreachable, or an operation that the command waited for failed.";
    Internal = 70,
        "An unexpected error: a failed system operation, such as writing a file, or a bug in svc.";
    TryAgain = 75,
        "Retry later, or make the decision that the operation is waiting for.";
    Permission = 77, "Permission denied, or, on a host, this machine has been replaced or deleted.";
    Config = 78, "The configuration is invalid. All errors are reported at once.";
}

impl Exit {
    /// Returns the exit code of a failed child applet, or `Internal` if it was killed by a signal or its code isn't
    /// listed here.
    pub fn from_child(status: ExitStatus) -> Self {
        let code = status.code().unwrap_or_default();
        Self::ALL.iter().copied().find(|exit| *exit as i32 == code).unwrap_or(Self::Internal)
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// A failed run: the exit code, plus the error chain to print to stderr.
pub struct Failure {
    pub exit: Exit,
    pub error: anyhow::Error,
}

impl Failure {
    pub fn new(exit: Exit, error: impl Into<anyhow::Error>) -> Self {
        Self { exit, error: error.into() }
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {:#}", self.exit, self.error)
    }
}

/// Unclassified errors are internal (exit code 70).
impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self { exit: Exit::Internal, error }
    }
}

impl From<crate::config::ConfigError> for Failure {
    fn from(error: crate::config::ConfigError) -> Self {
        Self { exit: Exit::Config, error: error.into() }
    }
}

/// Attaches an exit code to an error.
pub trait OrExit<T> {
    fn or_exit(self, exit: Exit) -> Result<T, Failure>;
}

impl<T, E: Into<anyhow::Error>> OrExit<T> for Result<T, E> {
    fn or_exit(self, exit: Exit) -> Result<T, Failure> {
        self.map_err(|error| Failure::new(exit, error))
    }
}

/// Writes man pages for a command and its subcommands to a directory instead of running the command.
const WRITE_MAN: &str = "--write-man";

/// Parses the command line. `Err` is the exit code: 0 after `--help`, `--version` or `--write-man`, 64 for an invalid
/// command line, 70 if the man pages can't be written.
pub fn parse<A: clap::Parser>(args: Vec<OsString>) -> Result<A, ExitCode> {
    if let [_, flag, dir] = args.as_slice()
        && flag == WRITE_MAN
    {
        let result = manual::write_pages(A::command(), Path::new(dir));
        return Err(result.map_or_else(
            |error| report(A::command().get_name(), &Failure::new(Exit::Internal, error)),
            |()| ExitCode::SUCCESS,
        ));
    }
    A::try_parse_from(args).map_err(|error| {
        let is_requested = matches!(
            error.kind(),
            clap::error::ErrorKind::DisplayHelp | clap::error::ErrorKind::DisplayVersion
        );
        // Ignore a closed stdout or stderr.
        let _ = error.print();
        if is_requested { ExitCode::SUCCESS } else { Exit::Usage.into() }
    })
}

/// Runs an applet to completion on a new runtime, prints any failure, and returns the exit code.
pub fn block_on(name: &str, work: impl Future<Output = Result<(), Failure>>) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return report(name, &Failure::new(Exit::Internal, error)),
    };
    let result = runtime.block_on(work);
    runtime.shutdown_timeout(std::time::Duration::from_secs(1));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => report(name, &failure),
    }
}

/// Prints a failure and returns its exit code.
pub fn report(name: &str, failure: &Failure) -> ExitCode {
    // Ignore a closed stderr: the exit code still reports the failure.
    let _ = writeln!(io::stderr(), "{name}: {}", format_chain(failure.error.as_ref()));
    failure.exit.into()
}

/// Runs the applet selected by the command line, or handles `svc`'s own options.
pub fn dispatch(build: Build, applets: &'static [Applet], mut args: Vec<OsString>) -> ExitCode {
    BUILD.get_or_init(|| build);
    let program = args.first().map(Path::new).and_then(Path::file_name).unwrap_or_default().to_owned();
    if let Some(applet) = find_applet(applets, &program) {
        return (applet.run)(args);
    }
    let Some(argument) = args.get(1).cloned() else {
        let _ = write!(io::stderr(), "{}", usage(applets));
        return Exit::Usage.into();
    };
    if let Some(applet) = find_applet(applets, &argument) {
        args.remove(0);
        return (applet.run)(args);
    }
    let text: String = match argument.to_str() {
        Some("--list") => applets.iter().map(|applet| format!("{}\n", applet.name)).collect(),
        Some("--help" | "-h" | "help") => usage(applets),
        Some("--version" | "-V") => format!("svc {}\n", version()),
        _ => {
            let _ = writeln!(
                io::stderr(),
                "svc: unknown applet {argument:?}; run `svc --list` to list all applets"
            );
            return Exit::Usage.into();
        }
    };
    // Like clap, ignore a closed or full stdout.
    let _ = io::stdout().write_all(text.as_bytes());
    ExitCode::SUCCESS
}

fn find_applet(applets: &'static [Applet], name: &std::ffi::OsStr) -> Option<&'static Applet> {
    applets.iter().find(|applet| name == applet.name)
}

fn usage(applets: &[Applet]) -> String {
    let mut text = format!(
        "svc {}\nOne VPS for each paying user: provisioned, reachable, backed up, replaceable.\n\n\
         Usage: svc <APPLET> [ARGUMENTS]   or through a link named after the applet\n       \
         svc --list | --help | --version\n\nApplets:\n",
        version()
    );
    for applet in applets {
        text.push_str(&format!("  {:<16} {}\n", applet.name, applet.about));
    }
    text.push_str("\nRun `svc <APPLET> --help` for an applet's help.\n");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn succeed(_: Vec<OsString>) -> ExitCode {
        ExitCode::SUCCESS
    }

    static TABLE: &[Applet] =
        &[Applet { name: "svc-a", about: "a", command: || clap::Command::new("svc-a"), run: succeed }];

    fn call(args: &[&str]) -> ExitCode {
        dispatch(build(), TABLE, args.iter().map(OsString::from).collect())
    }

    #[test]
    fn dispatch_matches_exact_names_only() {
        assert_eq!(call(&["/opt/svc/bin/svc-a"]), ExitCode::SUCCESS);
        assert_eq!(call(&["svc", "svc-a"]), ExitCode::SUCCESS);
        assert_eq!(call(&["svc", "svc-ab"]), ExitCode::from(Exit::Usage));
        assert_eq!(call(&["svc"]), ExitCode::from(Exit::Usage));
        assert_eq!(call(&["svc", "--list"]), ExitCode::SUCCESS);
    }
}
