//! Locates `pg_dump` and `pg_restore` and builds their command lines.
//!
//! Passwords are only passed in the environment, never as arguments. Each command starts from an empty environment so
//! that inherited `PG*` variables can't affect it.

use std::collections::VecDeque;
use std::fmt;
use std::num::NonZero;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::str::FromStr;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::Command;
use tokio_postgres::config::Host;

use super::layout::Layout;
use super::postgres::PostgresServer;
use crate::system::vars;
use svc_base::config::Env;

const CONTAINER: &str = "svc-postgres";
/// Number of parallel jobs per load.
const RESTORE_JOBS: usize = 2;
/// Maximum bytes of a tool's stderr to keep, per line and in total.
const MAX_STDERR_BYTES: usize = 4096;
/// Prefixes of the tools' own messages. A line without one may continue a multi-line value.
const TOOL_PREFIXES: [&str; 2] = ["pg_dump:", "pg_restore:"];
/// Prefixes of message lines that quote rows or statements.
const QUOTING_PREFIXES: [&str; 5] = ["DETAIL:", "CONTEXT:", "HINT:", "Command was:", "COPY "];
/// Separator between summary lines.
const SEPARATOR: &str = "; ";
const PIPE_BYTES: i32 = 1 << 20;
const PROBE_TIMEOUT: Duration = Duration::from_secs(20);
/// Variables inherited by a tool: those needed to find the tool, its libraries and the container runtime.
const PASSED_VARIABLES: [&str; 5] = ["PATH", "HOME", "LD_LIBRARY_PATH", "XDG_RUNTIME_DIR", "LANG"];

/// Dump compression.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    None,
    /// gzip at this level, supported by every `pg_restore`.
    Gzip(u8),
    /// zstd at this level, for tools built with zstd support.
    Zstd(u8),
}

impl Compression {
    /// Supported by all tools, and fast enough.
    pub const DEFAULT: Self = Self::Gzip(1);

    /// Returns the maximum dump size as a multiple of the database's size on disk. Values can be longer as text than on
    /// disk, and without compression, NULLs and PostgreSQL-compressed values are written out in full.
    pub fn max_growth_factor(self) -> u64 {
        match self {
            Self::None => 32,
            Self::Gzip(_) | Self::Zstd(_) => 2,
        }
    }
}

impl FromStr for Compression {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const EXPECTED: &str = "must be none, gzip:1 to gzip:9, or zstd:1 to zstd:19";
        let parse_level = |text: &str, max: u8| match text.parse::<u8>() {
            Ok(level) if (1..=max).contains(&level) => Ok(level),
            _ => Err(EXPECTED),
        };
        match text.split_once(':') {
            None if text == "none" => Ok(Self::None),
            Some(("gzip", text)) => parse_level(text, 9).map(Self::Gzip),
            Some(("zstd", text)) => parse_level(text, 19).map(Self::Zstd),
            _ => Err(EXPECTED),
        }
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Gzip(level) => write!(f, "gzip:{level}"),
            Self::Zstd(level) => write!(f, "zstd:{level}"),
        }
    }
}

/// Location of the PostgreSQL 16 client tools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PgTools {
    /// Executables in a directory on this machine.
    Directory(PathBuf),
    /// The tools inside the database container.
    Container,
}

impl PgTools {
    /// Uses `SVC_PG_BIN_DIR` if set, then the tools in the release's runtime, then those in the container.
    pub fn locate(env: &mut Env, layout: &Layout) -> Self {
        if let Some(dir) = env.path(&vars::SVC_PG_BIN_DIR) {
            if !dir.join("pg_dump").is_file() {
                env.add_error(&vars::SVC_PG_BIN_DIR, "must be a directory that contains pg_dump");
            }
            return Self::Directory(dir);
        }
        let bundled = layout.link("runtime").join("postgres/bin");
        if bundled.join("pg_dump").is_file() { Self::Directory(bundled) } else { Self::Container }
    }

    /// Returns `compression` if the tools support it, or the default otherwise.
    pub async fn choose_compression(&self, compression: Compression) -> Compression {
        if !matches!(compression, Compression::Zstd(_)) {
            return compression;
        }
        // pg_dump checks this argument before connecting, so we don't need a server.
        let mut command = self.command("pg_dump", None);
        command.args([
            "-Fc",
            "-Z",
            &compression.to_string(),
            "--no-password",
            "-h",
            "/nonexistent",
            "nothing",
        ]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let output = tokio::time::timeout(PROBE_TIMEOUT, command.output()).await;
        let is_rejected = |stderr: &[u8]| String::from_utf8_lossy(stderr).contains("compression");
        match output {
            Ok(Ok(output)) if !is_rejected(&output.stderr) => compression,
            _ => Compression::DEFAULT,
        }
    }

    /// Builds a command to dump the exported snapshot to stdout in custom format.
    pub fn dump_command(&self, server: &PostgresServer, snapshot: &str, compression: Compression) -> Command {
        let mut command = self.command("pg_dump", Some(server));
        command
            .args(["-Fc", "-Z", &compression.to_string(), "--no-password", "--lock-wait-timeout=60s"])
            .arg(format!("--snapshot={snapshot}"))
            .arg(server.database())
            .stdin(Stdio::null());
        command
    }

    /// Builds a command to dump only these tables and views (`schema.name`, quoted where needed) and their dependent
    /// objects.
    pub fn dump_relations_command(
        &self,
        server: &PostgresServer,
        database: &str,
        relations: &[&str],
    ) -> Command {
        let mut command = self.command("pg_dump", Some(server));
        command.args(["-Fc", "-Z0", "--no-password", "--lock-wait-timeout=60s", "--strict-names"]);
        for relation in relations {
            command.args(["-t", relation]);
        }
        command.arg(database).stdin(Stdio::null()).stdout(Stdio::piped());
        command
    }

    /// Builds a command to load a dump from stdin into a database in a single transaction.
    pub fn load_in_transaction_command(&self, server: &PostgresServer, database: &str) -> Command {
        let mut vars = connection_vars(server);
        // The owner's settings may make transactions read-only by default.
        vars.push(("PGOPTIONS", "-c default_transaction_read_only=off".to_owned()));
        let mut command = self.command_with("pg_restore", vars);
        command
            .args(["--exit-on-error", "--single-transaction", "--no-password", "--no-tablespaces"])
            .args(["-d", database])
            .stdin(Stdio::piped())
            .stdout(Stdio::null());
        command
    }

    /// Builds a command to read a whole dump from stdin without loading it. It fails if the dump is corrupt.
    pub fn check_dump_command(&self) -> Command {
        let mut command = self.command("pg_restore", None);
        command.args(["-f", "/dev/null"]).stdin(Stdio::piped()).stdout(Stdio::null());
        command
    }

    /// Builds a command to load a dump file into a database. In the container, it reads the file from stdin, which
    /// rules out parallel jobs.
    ///
    /// # Errors
    /// If the file cannot be opened.
    pub fn load_command(
        &self,
        server: &PostgresServer,
        database: &str,
        dump: &Path,
    ) -> std::io::Result<Command> {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        let mut vars = connection_vars(server);
        vars.push(("PGOPTIONS", load_options(cores)));
        let mut command = self.command_with("pg_restore", vars);
        command.args(["--exit-on-error", "--no-password", "--no-tablespaces", "-d", database]);
        match self {
            Self::Directory(_) => command.arg(format!("-j{RESTORE_JOBS}")).arg(dump).stdin(Stdio::null()),
            Self::Container => command.stdin(std::fs::File::open(dump)?),
        };
        command.stdout(Stdio::null());
        Ok(command)
    }

    /// Builds a command to print a dump file's TOC to stdout, without connecting.
    pub fn list_command(&self, dump: &Path) -> Command {
        let mut command = self.command("pg_restore", None);
        command.arg("-l").arg(dump).stdin(Stdio::null()).stdout(Stdio::piped());
        command
    }

    /// Builds a command to load only the dump entries in `list` into a database. They will all be owned by the user in
    /// the server's configuration.
    pub fn load_listed_command(
        &self,
        server: &PostgresServer,
        database: &str,
        dump: &Path,
        list: &Path,
    ) -> Command {
        let mut command = self.command("pg_restore", Some(server));
        command.args([
            "--exit-on-error",
            "--no-password",
            "--no-tablespaces",
            "--no-owner",
            "--no-privileges",
        ]);
        command.args(["--no-security-labels", "--no-publications", "--no-subscriptions"]);
        command.args(["-d", database, &format!("-j{RESTORE_JOBS}"), "-L"]).arg(list).arg(dump);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command
    }

    /// Builds a command to load a dump from stdin as it arrives, over a single session. The database must have no other
    /// sessions.
    pub fn load_stream_command(&self, server: &PostgresServer, database: &str) -> Command {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        let mut vars = connection_vars(server);
        vars.push(("PGOPTIONS", load_options(cores)));
        let mut command = self.command_with("pg_restore", vars);
        command.args(["--exit-on-error", "--no-password", "--no-tablespaces", "-d", database]);
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        command
    }

    fn command(&self, tool: &str, server: Option<&PostgresServer>) -> Command {
        self.command_with(tool, server.map(connection_vars).unwrap_or_default())
    }

    fn command_with(&self, tool: &str, vars: Vec<(&'static str, String)>) -> Command {
        let mut command = match self {
            Self::Directory(dir) => Command::new(dir.join(tool)),
            Self::Container => {
                let mut command = Command::new("podman");
                command.args(["exec", "-i"]);
                for (name, _) in &vars {
                    // Pass only the name: podman reads the value from its own environment.
                    command.args(["-e", name]);
                }
                command.args([CONTAINER, tool]);
                command
            }
        };
        command.env_clear();
        command.envs(PASSED_VARIABLES.iter().filter_map(|name| Some((name, std::env::var_os(name)?))));
        command.envs(vars).stderr(Stdio::piped()).kill_on_drop(true);
        command
    }
}

fn connection_vars(server: &PostgresServer) -> Vec<(&'static str, String)> {
    let config = server.config();
    // A client encoding set by the owner might not be able to represent every row, and the dump would fail.
    let fixed = [("PGCONNECT_TIMEOUT", "10"), ("PGAPPNAME", "svc"), ("PGCLIENTENCODING", "UTF8")];
    let mut vars = Vec::from(fixed.map(|(name, value)| (name, value.to_owned())));
    match config.get_hosts().first() {
        Some(Host::Tcp(host)) => vars.push(("PGHOST", host.clone())),
        Some(Host::Unix(dir)) => vars.push(("PGHOST", dir.display().to_string())),
        None => {}
    }
    if let Some(port) = config.get_ports().first() {
        vars.push(("PGPORT", port.to_string()));
    }
    if let Some(user) = config.get_user() {
        vars.push(("PGUSER", user.to_owned()));
    }
    if let Some(password) = config.get_password() {
        vars.push(("PGPASSWORD", String::from_utf8_lossy(password).into_owned()));
    }
    vars
}

/// Returns session options for loading a database that isn't in use yet. Commits don't wait for the disk: the next
/// synchronous commit, before the database is used, makes everything durable. If the jobs already use all cores,
/// indexes are built without parallel workers, which would only slow down the other job. `maintenance_work_mem` stays
/// at the server's setting, because larger sorts exceed the CPU caches and are slower.
fn load_options(cores: usize) -> String {
    let workers = if cores <= RESTORE_JOBS { " -c max_parallel_maintenance_workers=0" } else { "" };
    format!("-c synchronous_commit=off{workers}")
}

/// Reads a tool's stderr to the end, since the tool would otherwise block or be killed. Returns the last lines joined
/// into one, with quoted row values removed.
pub async fn read_stderr_tail(stderr: Option<impl AsyncRead + Unpin>) -> String {
    let Some(mut stderr) = stderr else { return String::new() };
    let mut summary = StderrSummary::default();
    let mut buffer = [0; 1024];
    while let Ok(read @ 1..) = stderr.read(&mut buffer).await {
        summary.push(&buffer[..read]);
    }
    summary.finish()
}

/// The last lines of a tool's stderr, with quoted row values removed. Lines are filtered as they arrive: whether one
/// quotes a value depends only on its beginning and on the lines before it.
#[derive(Default)]
struct StderrSummary {
    /// Beginning of the current, incomplete line.
    line: Vec<u8>,
    /// Whether the line may continue a quoted value.
    is_in_quote: bool,
    lines: VecDeque<String>,
    /// Number of bytes in `lines`, including separators.
    bytes: usize,
}

impl StderrSummary {
    fn push(&mut self, output: &[u8]) {
        for &byte in output {
            if byte == b'\n' {
                self.end_line();
            } else if self.line.len() < MAX_STDERR_BYTES {
                self.line.push(byte);
            }
        }
    }

    fn end_line(&mut self) {
        let line = std::mem::take(&mut self.line);
        let line = String::from_utf8_lossy(&line);
        if TOOL_PREFIXES.iter().any(|prefix| line.starts_with(prefix)) {
            self.is_in_quote = false;
        }
        let line = line.trim();
        self.is_in_quote |= QUOTING_PREFIXES.iter().any(|prefix| line.starts_with(prefix));
        if self.is_in_quote || line.is_empty() {
            return;
        }
        // `invalid input syntax for type integer: "…"`
        let (unquoted, is_quoting) = line.split_once(": \"").map_or((line, false), |(line, _)| (line, true));
        self.is_in_quote = is_quoting;
        self.bytes += unquoted.len() + SEPARATOR.len();
        self.lines.push_back(unquoted.to_owned());
        while self.bytes > MAX_STDERR_BYTES && self.lines.len() > 1 {
            let removed = self.lines.pop_front().unwrap_or_default();
            self.bytes -= removed.len() + SEPARATOR.len();
        }
    }

    /// Joins the lines into one.
    fn finish(mut self) -> String {
        self.end_line();
        Vec::from(self.lines).join(SEPARATOR)
    }
}

/// Enlarges the pipe to reduce wake-ups. Best effort: the pipe keeps its size if the kernel refuses.
pub fn enlarge_pipe(pipe: impl AsFd) {
    let _ = nix::fcntl::fcntl(pipe, nix::fcntl::FcntlArg::F_SETPIPE_SZ(PIPE_BYTES));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn read_stderr_tail_reads_everything() {
        let mut tool = Command::new("sh");
        tool.args(["-c", "yes x | head -c 1000000 >&2 && echo 'the end' >&2 && exit 3"]);
        let mut tool = tool.stderr(Stdio::piped()).spawn().unwrap();
        let tail = read_stderr_tail(tool.stderr.take()).await;
        assert!(tail.ends_with("; x; the end") && tail.len() <= MAX_STDERR_BYTES, "{tail}");
        assert_eq!(tool.wait().await.unwrap().code(), Some(3), "the tool was not interrupted");
    }

    fn summarize_stderr(output: &str) -> String {
        let mut summary = StderrSummary::default();
        // Lines may be split across reads.
        output.as_bytes().chunks(7).for_each(|chunk| summary.push(chunk));
        summary.finish()
    }

    #[test]
    fn summarize_stderr_drops_multiline_values() {
        let output = "pg_restore: error: could not execute query: ERROR:  could not create unique index \"i\"\n\
                    DETAIL:  Key (title)=(first\nmine\n\n  mine too) is duplicated.\n\
                    Command was: CREATE UNIQUE INDEX\n  ON mine;\n\
                    pg_restore: error: invalid input syntax for type integer: \"first\nmine\"\n\
                    pg_restore: error: ended";
        assert_eq!(
            summarize_stderr(output),
            "pg_restore: error: could not execute query: ERROR:  could not create unique index \"i\"; \
             pg_restore: error: invalid input syntax for type integer; pg_restore: error: ended"
        );
    }

    #[test]
    fn summarize_stderr_drops_long_value_and_keeps_error() {
        let value = "mine ".repeat(2 * MAX_STDERR_BYTES);
        let output = format!("pg_restore: error: duplicate key\nDETAIL:  Key (title)=({value}) exists.\n");
        assert_eq!(summarize_stderr(&output), "pg_restore: error: duplicate key");
    }

    #[test]
    fn summarize_stderr_keeps_other_programs_messages() {
        let output = "Error: no container with name \"svc-postgres\"\nError: exit status 125\n";
        assert_eq!(
            summarize_stderr(output),
            "Error: no container with name \"svc-postgres\"; Error: exit status 125"
        );
    }

    #[test]
    fn summarize_stderr_drops_row_values() {
        let output = "pg_restore: error: COPY failed for table \"notes\": ERROR:  invalid input syntax for type integer: \"mine\"\n\
                    CONTEXT:  COPY notes, line 1, column rank: \"mine\"\n\
                    DETAIL:  Key (title)=(mine) is duplicated.\npg_restore: error: ended\n";
        let lines = summarize_stderr(output);
        assert!(!lines.contains("mine"), "{lines}");
        assert!(
            lines.contains("COPY failed for table \"notes\"")
                && lines.ends_with("; pg_restore: error: ended"),
            "{lines}"
        );
    }

    #[test]
    fn load_uses_workers_only_with_spare_cores() {
        assert!(load_options(1).contains("workers=0") && load_options(2).contains("workers=0"));
        assert_eq!(load_options(4), "-c synchronous_commit=off");
    }

    #[test]
    fn compression_round_trips_through_text() {
        for text in ["none", "gzip:1", "gzip:9", "zstd:1", "zstd:19"] {
            assert_eq!(text.parse::<Compression>().unwrap().to_string(), text);
        }
        for invalid in ["", "gzip", "gzip:0", "gzip:10", "zstd:20", "lz4:1", "gzip:1:long", "none:1"] {
            assert!(invalid.parse::<Compression>().is_err(), "{invalid}");
        }
    }

    #[test]
    fn dump_passes_password_only_in_environment() {
        let server = PostgresServer::new("postgres://me:hunter2@127.0.0.1:5433/svc".parse().unwrap());
        for tools in [PgTools::Directory("/pg".into()), PgTools::Container] {
            let command = tools.dump_command(&server, "00000003-1", Compression::DEFAULT);
            let command = command.as_std();
            let mut args = command.get_args().map(|arg| arg.to_string_lossy());
            assert!(!args.any(|arg| arg.contains("hunter2")));
            let mut vars = command.get_envs();
            assert!(vars.any(|(name, value)| name == "PGPASSWORD" && value.is_some_and(|v| v == "hunter2")));
        }
    }
}
