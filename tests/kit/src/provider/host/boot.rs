//! The simulated init: performs the power-on steps of cloud-init and systemd, with the same restore gate. The order is
//! the same, with two exceptions: the database starts before the release is installed, and the optional services start
//! before the gateway.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};

use super::HostSettings;
use super::disk::DatabaseRecord;
use super::oneshot::summarize;
use super::service::{Service, ServiceUnit};
use super::session::PowerSession;
use super::systemctl;
use crate::pg::{PgOptions, PgServer};

pub(super) const GATEWAY: &str = "svc-gateway";
pub(super) const SYNC_AGENT: &str = "svc-sync-agent";
pub(super) const SHELL: &str = "svc-shell";
pub(super) const CODE: &str = "svc-code";
/// Started with `--listen` here; systemd would start an instance for each connection to its socket.
pub(super) const AGENT: &str = "svc-agent";
pub(super) const WATCH: &str = "svc-watch";
/// `svc-sync-agent files`.
pub(super) const FILES: &str = "svc-files";
/// `svc-sync-agent history --listen`; systemd would start an instance for each connection to its socket.
pub(super) const HISTORY: &str = "svc-files-history";
/// All services except PostgreSQL.
pub(super) const SERVICES: [&str; 8] = [GATEWAY, SHELL, CODE, AGENT, SYNC_AGENT, WATCH, FILES, HISTORY];
const WATCH_PROGRAM: &str = "current/bin/svc-watch";
/// Services that are optional in a release, with the files they require. The boot does not wait for them.
const OPTIONAL_SERVICES: [(&str, &str); 6] = [
    (SHELL, "current/app/shell"),
    (CODE, "current/runtime/code-server"),
    // Missing from earlier releases.
    (AGENT, "current/bin/svc-agent"),
    (WATCH, WATCH_PROGRAM),
    (FILES, WATCH_PROGRAM),
    (HISTORY, WATCH_PROGRAM),
];

/// A path unit: the watched paths under `/var/lib/svc`, the unit they start, and its arguments.
type PathUnit = (&'static [&'static str], &'static str, &'static [&'static str]);
const PATH_UNITS: [PathUnit; 6] = [
    (&["requests/backup", "requests/accept"], "svc-db-backup", &["run", "--request"]),
    (&["requests/drill"], "svc-db-backup", &["drill", "--request"]),
    (&["requests/side"], "svc-db-backup", &["side", "serve"]),
    (&["requests/files-verify"], "svc-sync-agent", &["verify"]),
    (&["requests/files-restore"], "svc-sync-agent", &["serve-restore"]),
    (&["requests/update", "update/journal.json"], "svc-update", &["apply", "--request"]),
];
const PATH_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Retry interval while a watched path persists. systemd would restart the unit after its `RestartSec=`, or start it
/// again immediately until a limit is reached.
const PATH_RETRY_INTERVAL: Duration = Duration::from_secs(1);

const EX_TEMPFAIL: i32 = 75;
const REGISTER_RETRY_INTERVAL: Duration = Duration::from_millis(300);

/// A failed boot, with the platform's name for the stage.
#[derive(Debug)]
pub(super) struct BootFailure {
    pub(super) stage: &'static str,
    pub(super) error: anyhow::Error,
}

/// Runs the entire boot. Reports a failure to the platform if possible.
pub(super) async fn boot(
    session: &Arc<PowerSession>,
    settings: &HostSettings,
    user_data: &str,
) -> Result<(), BootFailure> {
    // This failure is not reported: without user-data, the host does not know its platform.
    session.disk.apply_user_data(user_data).map_err(boot_failure("user-data"))?;
    systemctl::serve(session, settings);
    let Err(failure) = run_units(session, settings).await else {
        run_path_units(session, settings);
        return Ok(());
    };
    if !session.off.is_cancelled() {
        report_failure(session, settings, &failure).await;
    }
    Err(failure)
}

async fn run_units(session: &Arc<PowerSession>, settings: &HostSettings) -> Result<(), BootFailure> {
    report_stage(session, settings, "database").await;
    tokio::select! {
        started = start_database(session, settings) => started.map_err(boot_failure("database"))?,
        () = session.off.cancelled() => return Err(boot_failure("database")(anyhow!("the power was cut"))),
    }
    if !session.disk.has_release() {
        report_stage(session, settings, "bundle").await;
        run_unit(session, settings, "svc-update", &["boot"]).await.map_err(boot_failure("bundle"))?;
    }
    report_stage(session, settings, "restore").await;
    if session.disk.opt_path(WATCH_PROGRAM).exists() {
        run_unit(session, settings, SYNC_AGENT, &["restore-home"]).await.map_err(boot_failure("restore"))?;
    }
    run_unit(session, settings, "svc-restore", &[]).await.map_err(boot_failure("restore"))?;
    report_stage(session, settings, "gateway").await;
    // Like `svc-apps.service`: ordered before the gateway, but not required by it.
    run_unit(session, settings, GATEWAY, &["install-apps"]).await.ok();
    if session.disk.program("svc-hook").exists() {
        run_unit(session, settings, "svc-hook", &["install"]).await.ok();
    }
    for (name, _) in OPTIONAL_SERVICES.iter().filter(|(_, required)| session.disk.opt_path(required).exists())
    {
        start_service(session, settings, name);
    }
    start_service(session, settings, GATEWAY).wait_until_ready().await.map_err(boot_failure("gateway"))?;
    report_stage(session, settings, "register").await;
    register(session, settings).await.map_err(boot_failure("register"))?;
    start_service(session, settings, SYNC_AGENT).wait_until_ready().await.map_err(boot_failure("register"))
}

fn boot_failure(stage: &'static str) -> impl FnOnce(anyhow::Error) -> BootFailure {
    move |error| BootFailure { stage, error }
}

/// Starts the host's PostgreSQL. The first boot creates it, with its password and the empty database `svc`.
pub(super) async fn start_database(session: &PowerSession, settings: &HostSettings) -> Result<()> {
    let disk = &session.disk;
    let dir = disk.database_dir();
    let server = match disk.database_record()? {
        Some(record) => PgServer::open(&settings.pg, &dir, record.port, &record.password).await?,
        None => {
            // An incomplete cluster is discarded.
            std::fs::remove_dir_all(&dir).ok();
            std::fs::create_dir_all(&dir)?;
            let options = PgOptions { data_dir: Some(dir), ..PgOptions::default() };
            let server = PgServer::start(&settings.pg, options).await?;
            server.create_database("svc").await?;
            let record = DatabaseRecord { port: server.port(), password: server.password().to_owned() };
            disk.save_database_record(&record, &server.url("svc"))?;
            server
        }
    };
    session.set_database(server);
    Ok(())
}

/// Returns a unit's command line: the release's program if installed, otherwise the bootstrap binary.
pub(super) fn command_line(session: &PowerSession, settings: &HostSettings, unit: &str) -> Vec<PathBuf> {
    let installed = session.disk.program(unit);
    if installed.exists() { vec![installed] } else { vec![settings.svc_binary.clone(), unit.into()] }
}

/// Runs `svc-db-backup-request.service`, which records its result itself.
pub(super) async fn run_requested_backup(session: &PowerSession, settings: &HostSettings) {
    run_unit(session, settings, "svc-db-backup", &["run", "--request"]).await.ok();
}

async fn run_unit(session: &PowerSession, settings: &HostSettings, unit: &str, args: &[&str]) -> Result<()> {
    let command_line = command_line(session, settings, unit);
    let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
    let output = session.run_oneshot(unit, &command_line, &args, &[], settings.unit_timeout).await?;
    ensure!(output.status.success(), "{unit}: {}", summarize(&output));
    Ok(())
}

pub(super) fn start_service(
    session: &Arc<PowerSession>,
    settings: &HostSettings,
    name: &'static str,
) -> Arc<Service> {
    let gate = (name == GATEWAY).then(|| session.disk.opt_path("restore-complete"));
    let (program, arguments): (_, &[&str]) = match name {
        AGENT => (AGENT, &["--listen"]),
        FILES => (SYNC_AGENT, &["files"]),
        HISTORY => (SYNC_AGENT, &["history", "--listen"]),
        _ => (name, &[]),
    };
    Service::start(
        session,
        ServiceUnit {
            name,
            command_line: [session.disk.program(program)]
                .into_iter()
                .chain(arguments.iter().map(PathBuf::from))
                .collect(),
            condition: gate,
            ready_timeout: settings.ready_timeout,
            stop_timeout: settings.stop_timeout,
        },
    )
}

/// Registers the machine; retries on exit code 75 (platform unreachable) until the timeout.
async fn register(session: &PowerSession, settings: &HostSettings) -> Result<()> {
    let (unit, command_line) = ("svc-register", command_line(session, settings, "svc-register"));
    let deadline = Instant::now() + settings.register_timeout;
    loop {
        let output = session.run_oneshot(unit, &command_line, &[], &[], settings.unit_timeout).await?;
        if output.status.success() {
            return Ok(());
        }
        if output.status.code() != Some(EX_TEMPFAIL) || Instant::now() >= deadline {
            bail!("{unit}: {}", summarize(&output));
        }
        tokio::select! {
            () = tokio::time::sleep(REGISTER_RETRY_INTERVAL) => {}
            () = session.stopping.cancelled() => bail!("{unit}: stopped"),
            () = session.off.cancelled() => bail!("{unit}: the power was cut"),
        }
    }
}

/// Returns the command line of `svc-register`, with the release's binary if installed, otherwise the bootstrap binary.
fn register_command_line(session: &PowerSession, settings: &HostSettings) -> [PathBuf; 2] {
    let current = session.disk.opt_path("current/bin/svc");
    let svc = if current.exists() { current } else { settings.svc_binary.clone() };
    [svc, "svc-register".into()]
}

/// Reports the boot stage to the platform; errors are ignored.
async fn report_stage(session: &PowerSession, settings: &HostSettings, stage: &str) {
    let args = ["stage", stage].map(str::to_owned);
    let command_line = register_command_line(session, settings);
    session.run_oneshot("svc-register", &command_line, &args, &[], settings.unit_timeout).await.ok();
}

async fn report_failure(session: &PowerSession, settings: &HostSettings, failure: &BootFailure) {
    let message: String = format!("{:#}", failure.error).chars().take(1000).collect();
    let args = ["failure", "--stage", failure.stage, "--message", &message].map(str::to_owned);
    let command_line = register_command_line(session, settings);
    let result = session.run_oneshot("svc-register", &command_line, &args, &[], settings.unit_timeout).await;
    if let Err(error) = result.context("cannot report the boot failure") {
        session.disk.append_log("init", format!("{error:#}\n").as_bytes()).ok();
    }
}

/// Runs the path units: each watched file starts its unit, which removes the file.
fn run_path_units(session: &Arc<PowerSession>, settings: &HostSettings) {
    for (paths, unit, args) in PATH_UNITS {
        let (task_session, settings) = (Arc::clone(session), settings.clone());
        session.tasks.spawn_on(
            async move {
                let session = task_session;
                let is_due = || paths.iter().any(|path| session.disk.state_path(path).exists());
                loop {
                    let delay = if is_due() {
                        run_unit(&session, &settings, unit, args).await.ok();
                        if is_due() { PATH_RETRY_INTERVAL } else { PATH_POLL_INTERVAL }
                    } else {
                        PATH_POLL_INTERVAL
                    };
                    tokio::select! {
                        () = tokio::time::sleep(delay) => {}
                        () = session.stopping.cancelled() => return,
                        () = session.off.cancelled() => return,
                    }
                }
            },
            crate::runtime::handle(),
        );
    }
}
