//! `svc-hook`: reports tool calls to the watcher, and installs itself as a hook in the agents' programs.
//!
//! As a hook, it never disrupts an agent: it prints nothing, exits within `HOOK_TIMEOUT`, and always exits with 0.
//! Undeliverable messages are saved to a file for the watcher.

mod input;
mod install;
mod settings;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};

use self::input::HookInput;
use super::protocol;
use super::protocol::{Message, SOCKET, UndeliveredHook};
use crate::records::entry::GapReason;
use crate::system::layout::Layout;
use crate::system::process_stat::{ProcessStat, TICKS_PER_SECOND};
use svc_base::applet::{self, Exit, OrExit};

/// Parses hook input for `tests/fuzz`. Returns `None` for events that aren't reported.
///
/// # Errors
/// The input is invalid or too large.
#[cfg(feature = "fuzzing")]
pub fn read_input(bytes: &[u8]) -> std::io::Result<Option<Message>> {
    Ok(HookInput::read(bytes)?.map(|input| input.into_message("")))
}

/// Time limit for the whole hook, from process start. A hook usually takes a few milliseconds; the limit allows for
/// busy machines and commands that change tens of thousands of files.
const HOOK_TIMEOUT: Duration = Duration::from_millis(500);
/// Part of `HOOK_TIMEOUT` reserved for saving an undelivered message.
const SAVE_RESERVE: Duration = Duration::from_millis(10);

#[derive(clap::Parser)]
#[command(
    name = "svc-hook",
    version = applet::version(),
    about = "Reports agents' tool calls to svc-watch, as a hook in the agents' programs",
    after_help = "Without a command, svc-hook acts as a hook: it reads the hook's JSON from stdin, prints nothing, and exits with 0.\n\nExample: svc-hook install"
)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Add the hook to the settings of Claude Code and Codex, and leave other settings unchanged
    Install(HomeArgs),
    /// Remove the hook, and nothing else, from the settings of Claude Code and Codex
    Uninstall(HomeArgs),
}

#[derive(clap::Args)]
struct HomeArgs {
    /// Home directory with `.claude` and `.codex` [default: the owner's]
    #[arg(long, value_name = "DIR")]
    home: Option<PathBuf>,
}

/// Returns the clap command, from which the reference pages are generated.
pub fn command() -> clap::Command {
    <Args as clap::CommandFactory>::command()
}

pub fn run(args: Vec<OsString>) -> ExitCode {
    let first = args.get(1).and_then(|arg| arg.to_str()).unwrap_or_default();
    let is_command =
        ["install", "uninstall", "help", "--help", "-h", "--version", "-V", "--write-man"].contains(&first);
    if is_command {
        return run_command(args);
    }
    run_hook(first.to_owned());
    ExitCode::SUCCESS
}

fn run_command(args: Vec<OsString>) -> ExitCode {
    let args = match applet::parse::<Args>(args) {
        Ok(args) => args,
        Err(code) => return code,
    };
    let Some(command) = args.command else {
        run_hook(String::new());
        return ExitCode::SUCCESS;
    };
    let layout = Layout::from_process();
    let result = match command {
        Command::Install(args) => {
            install::install(&args.home.unwrap_or_else(|| layout.user_home()), &layout.link("bin"))
        }
        Command::Uninstall(args) => install::uninstall(&args.home.unwrap_or_else(|| layout.user_home())),
    };
    match result.or_exit(Exit::Refused) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => applet::report("svc-hook", &failure),
    }
}

/// The parsed message. The main thread saves it if it can't be delivered.
type SharedMessage = Arc<Mutex<Option<Message>>>;

/// Returns the time since process start, accurate to 10 ms, or zero if unknown. On a busy machine, the process may have
/// waited for a CPU.
fn process_age() -> Duration {
    let Ok(stat) = ProcessStat::current() else { return Duration::ZERO };
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from);
    now.saturating_sub(Duration::from_millis(stat.start_ticks * 1000 / TICKS_PER_SECOND))
}

/// Runs the hook on a separate thread, so that it can be abandoned at the deadline.
fn run_hook(actor: String) {
    let deadline = Instant::now()
        + protocol::time_limit(HOOK_TIMEOUT).saturating_sub(process_age()).saturating_sub(SAVE_RESERVE);
    std::panic::set_hook(Box::new(|_| {}));
    let layout = Layout::from_process();
    let gap_file = layout.audit_gaps();
    let shared = SharedMessage::default();
    let (sender, receiver) = mpsc::channel();
    let thread_shared = Arc::clone(&shared);
    let spawned = std::thread::Builder::new().spawn(move || {
        // The receiver is gone after a timeout.
        let _ = sender.send(report_event(&layout, &actor, deadline, &thread_shared));
    });
    let failure = match spawned {
        Err(_) => Some(GapReason::Undelivered),
        Ok(_) => match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(failure) => failure,
            Err(mpsc::RecvTimeoutError::Timeout) => Some(GapReason::Late),
            // The thread panicked.
            Err(mpsc::RecvTimeoutError::Disconnected) => Some(GapReason::Unreadable),
        },
    };
    if let Some(reason) = failure {
        let message = shared.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Failures here can't be reported: the hook must not print anything.
        let _ = UndeliveredHook::new(reason, message).save(&gap_file);
    }
}

/// Parses the hook input and sends it to the watcher. Returns the gap reason on failure.
fn report_event(
    layout: &Layout,
    actor: &str,
    deadline: Instant,
    shared: &SharedMessage,
) -> Option<GapReason> {
    let input = match HookInput::read(std::io::stdin().lock()) {
        Ok(Some(input)) => input,
        // Not an event that we report.
        Ok(None) => return None,
        Err(_) => return Some(GapReason::Unreadable),
    };
    let message = input.into_message(actor);
    *shared.lock().unwrap_or_else(PoisonError::into_inner) = Some(message.clone());
    let remaining = deadline.saturating_duration_since(Instant::now());
    match protocol::send(&layout.watch_sockets().join(SOCKET), &message, remaining) {
        Ok(()) => None,
        Err(error) => match error.kind() {
            std::io::ErrorKind::TimedOut | std::io::ErrorKind::WouldBlock => Some(GapReason::Late),
            _ => Some(GapReason::Undelivered),
        },
    }
}
