//! `systemctl` of a host whose init is this process: a program that hands its words over by files and waits for the answer.
//!
//! It restarts what the init runs, for real, and says of a service what the init knows. Units that are installed below
//! the root and that the init does not run are not loaded here.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};

use super::HostSettings;
use super::boot::{SERVICES, back_up, service};
use super::service::ServiceState;
use super::session::Session;

const POLL: Duration = Duration::from_millis(30);
/// As systemd's own, for a unit that is not loaded.
const NOT_LOADED: i32 = 5;

const PROGRAM: &str = r#"#!/bin/sh
ask=$(mktemp "DIR/ask.XXXXXX") || exit 1
printf '%s\n' "$*" >"$ask"
mv "$ask" "$ask.asked"
while [ ! -e "$ask.answer" ]; do [ -d "DIR" ] || exit 1; sleep 0.05; done
code=$(head -n 1 "$ask.answer")
tail -n +2 "$ask.answer"
rm -f "$ask.answer"
exit "$code"
"#;

/// Writes the program; what it asks is answered by [`serve`].
pub(super) fn install(run_dir: &Path) -> Result<PathBuf> {
    let program = run_dir.join("systemctl");
    fs::write(&program, PROGRAM.replace("DIR", &run_dir.display().to_string())).context("systemctl")?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    Ok(program)
}

/// Answers until the power goes.
pub(super) fn serve(session: &Arc<Session>, settings: &HostSettings) {
    let (session_of_task, settings) = (Arc::clone(session), settings.clone());
    session.tasks.spawn_on(
        async move {
            let session = session_of_task;
            loop {
                for ask in asked(session.run_dir()) {
                    let (session_of_answer, settings) = (Arc::clone(&session), settings.clone());
                    session.tasks.spawn_on(
                        async move { answer(&session_of_answer, &settings, &ask).await.unwrap_or_default() },
                        crate::runtime::servers(),
                    );
                }
                tokio::select! {
                    () = tokio::time::sleep(POLL) => {}
                    () = session.off.cancelled() => return,
                }
            }
        },
        crate::runtime::servers(),
    );
}

fn asked(run_dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(run_dir).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.filter(|path| path.extension().is_some_and(|extension| extension == "asked")).collect()
}

async fn answer(session: &Arc<Session>, settings: &HostSettings, ask: &Path) -> Result<()> {
    let words = fs::read_to_string(ask)?;
    fs::remove_file(ask)?;
    let (code, said) = tokio::select! {
        done = obey(session, settings, words.trim()) => done,
        () = session.off.cancelled() => return Ok(()),
    };
    session.disk.append_log("systemctl", format!("[init] {}: {code}\n", words.trim()).as_bytes())?;
    let (place, whole) = (ask.with_extension("answer"), ask.with_extension("whole"));
    fs::write(&whole, format!("{code}\n{said}"))?;
    Ok(fs::rename(whole, place)?)
}

async fn obey(session: &Arc<Session>, settings: &HostSettings, words: &str) -> (i32, String) {
    let mut words = words.split_whitespace().filter(|word| !word.starts_with("--"));
    let verb = words.next().unwrap_or_default();
    let unit = words.next().unwrap_or_default().trim_end_matches(".service");
    let name = SERVICES.into_iter().find(|name| *name == unit);
    match (verb, name) {
        ("daemon-reload", _) => (0, String::new()),
        ("start", None) if unit.ends_with(".target") => (0, String::new()),
        ("start", None) if unit == "svc-db-backup-request" => {
            let (session_of_task, settings) = (Arc::clone(session), settings.clone());
            session.tasks.spawn_on(
                async move { back_up(&session_of_task, &settings).await },
                crate::runtime::servers(),
            );
            (0, String::new())
        }
        ("restart", Some(name)) => {
            let running = session.services().get(name).cloned();
            if let Some(running) = running {
                running.stop.cancel();
                running.ended().await;
            }
            match service(session, settings, name).ready().await {
                Ok(()) => (0, String::new()),
                Err(_) => (1, String::new()),
            }
        }
        ("show", Some(name)) => {
            let state = session.services().get(name).map(|service| service.state.borrow().clone());
            let (active, result) = match state {
                Some(ServiceState::Starting) => ("activating", "success"),
                Some(ServiceState::Ready) => ("active", "success"),
                Some(ServiceState::Ended(words)) if is_in_order(&words) => ("inactive", "success"),
                Some(ServiceState::Ended(_)) => ("failed", "exit-code"),
                None => ("inactive", "success"),
            };
            (0, format!("ActiveState={active}\nResult={result}\nNRestarts=0\n"))
        }
        ("show", None) => (0, "ActiveState=inactive\nResult=success\nNRestarts=0\n".to_owned()),
        _ => (NOT_LOADED, String::new()),
    }
}

fn is_in_order(words: &str) -> bool {
    words.contains("was stopped")
        || words.contains("condition is not met")
        || words.contains("exit status: 0")
}
