//! `svc-hook`: what agents' programs run before and after each tool call, and what installs itself there.
//!
//! As a hook it tells the watcher where a tool call is, and nothing else: it prints nothing, takes no longer than
//! `LIMIT`, and always exits with 0, for an agent must not mind that it is there. What it could tell nobody it leaves in
//! a file for later.

mod input;
mod install;
mod settings;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use self::input::Input;
use super::protocol;
use super::protocol::{Message, SOCKET, Untold};
use crate::applet::{self, Exit, OrExit};
use crate::failpoint;
use crate::host::records::entry::Why;
use crate::host::system::layout::Layout;

/// What the watcher would be sent of a hook's input, as `tests/fuzz` reaches it; `None` for what changes no file.
///
/// # Errors
/// When it is no hook's input, or too large.
#[cfg(feature = "fuzzing")]
pub fn read_input(bytes: &[u8]) -> std::io::Result<Option<Message>> {
    Ok(Input::read(bytes)?.map(|input| input.message("")))
}

/// All of it, from its start.
const LIMIT: Duration = Duration::from_millis(100);
/// What is kept of it to leave a word where there was no answer.
const LAST_WORD: Duration = Duration::from_millis(10);

#[derive(clap::Parser)]
#[command(
    name = "svc-hook",
    version = applet::VERSION,
    about = "The hook of agents' programs that tells svc-watch of their tool calls",
    after_help = "Without a command it is a hook: it reads the hook's JSON on stdin, prints nothing, and exits with 0.\n\nExample: svc-hook install"
)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Adds the hook to the settings of Claude Code and Codex, and leaves all else there as it is.
    Install(Place),
    /// Takes the hook, and nothing else, out of these settings.
    Uninstall(Place),
}

#[derive(clap::Args)]
struct Place {
    /// The home that has `.claude` and `.codex`; the owner's, where none is said.
    #[arg(long, value_name = "DIR")]
    home: Option<PathBuf>,
}

pub fn run(args: Vec<OsString>) -> ExitCode {
    let word = args.get(1).and_then(|word| word.to_str()).unwrap_or_default();
    let is_command =
        ["install", "uninstall", "help", "--help", "-h", "--version", "-V", "--write-man"].contains(&word);
    if is_command {
        return command(args);
    }
    hook(word.to_owned());
    ExitCode::SUCCESS
}

fn command(args: Vec<OsString>) -> ExitCode {
    let args = match applet::parse::<Args>(args) {
        Ok(args) => args,
        Err(code) => return code,
    };
    let layout = Layout::from_process();
    let done = match args.command {
        Command::Install(place) => {
            install::install(&place.home.unwrap_or_else(|| layout.owner()), &layout.link("bin"))
        }
        Command::Uninstall(place) => install::uninstall(&place.home.unwrap_or_else(|| layout.owner())),
    };
    match done.or_exit(Exit::Refused) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => applet::report("svc-hook", &failure),
    }
}

/// What is known of the call so far, for the word that is left where time runs out.
type SoFar = Arc<Mutex<Option<Message>>>;

/// Tests of what is recorded run on machines that stand still; `hook.patient` waits for these.
fn limit() -> Duration {
    if failpoint::pass("hook.patient").is_err() { LIMIT * 300 } else { LIMIT }
}

/// All of it happens in a thread that nobody waits for longer than is left.
fn hook(actor: String) {
    let end = Instant::now() + limit() - LAST_WORD;
    std::panic::set_hook(Box::new(|_| {}));
    let layout = Layout::from_process();
    let gaps = layout.audit_gaps();
    let so_far = SoFar::default();
    let (done, ends) = mpsc::channel();
    let known = Arc::clone(&so_far);
    let started = std::thread::Builder::new().spawn(move || {
        // Nobody listens any more where it took too long.
        let _ = done.send(tell(&layout, &actor, end, &known));
    });
    let untold = match started {
        Err(_) => Some(Why::Unheard),
        Ok(_) => match ends.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(untold) => untold,
            Err(mpsc::RecvTimeoutError::Timeout) => Some(Why::Late),
            Err(mpsc::RecvTimeoutError::Disconnected) => Some(Why::Unreadable),
        },
    };
    if let Some(why) = untold {
        let message = so_far.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Where not even this can be written, nobody can be told.
        let _ = Untold::new(why, message).leave(&gaps);
    }
}

/// Reads, tells, waits. What it gives is why it came to nothing.
fn tell(layout: &Layout, actor: &str, end: Instant, so_far: &SoFar) -> Option<Why> {
    let input = match Input::read(std::io::stdin().lock()) {
        Ok(Some(input)) => input,
        // Of a tool, or a moment, that changes nothing.
        Ok(None) => return None,
        Err(_) => return Some(Why::Unreadable),
    };
    let message = input.message(actor);
    *so_far.lock().unwrap_or_else(PoisonError::into_inner) = Some(message.clone());
    let left = end.saturating_duration_since(Instant::now());
    match protocol::tell(&layout.watch_sockets().join(SOCKET), &message, left) {
        Ok(()) => None,
        Err(error) => match error.kind() {
            std::io::ErrorKind::TimedOut | std::io::ErrorKind::WouldBlock => Some(Why::Late),
            _ => Some(Why::Unheard),
        },
    }
}
