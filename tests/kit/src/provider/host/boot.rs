//! The init: what cloud-init and systemd do on a real machine at power-on, in the same order and behind the same gate.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};

use super::HostSettings;
use super::disk::DatabaseRecord;
use super::oneshot::words;
use super::service::{Service, ServiceUnit};
use super::session::Session;
use super::systemctl;
use crate::pg::{PgOptions, PgServer};

/// Services, in the order of their start.
pub(super) const GATEWAY: &str = "svc-gateway";
pub(super) const SYNC_AGENT: &str = "svc-sync-agent";
pub(super) const SHELL: &str = "svc-shell";
pub(super) const CODE: &str = "svc-code";
/// Where systemd would start an instance for each connection of its socket, it listens by itself.
pub(super) const AGENT: &str = "svc-agent";
pub(super) const WATCH: &str = "svc-watch";
pub(super) const SERVICES: [&str; 6] = [GATEWAY, SHELL, CODE, AGENT, SYNC_AGENT, WATCH];
/// Services that a release may do without, and what of it they need. The boot does not wait for them.
const OPTIONAL: [(&str, &str); 4] = [
    (SHELL, "current/app/shell"),
    (CODE, "current/runtime/code-server"),
    // An earlier release has neither.
    (AGENT, "current/bin/svc-agent"),
    (WATCH, "current/bin/svc-watch"),
];

/// A path unit: what it looks for below `/var/lib/svc`, the unit that it starts, and its arguments.
type PathUnit = (&'static [&'static str], &'static str, &'static [&'static str]);
const PATH_UNITS: [PathUnit; 4] = [
    (&["requests/backup"], "svc-db-backup", &["run", "--request"]),
    (&["requests/drill"], "svc-db-backup", &["drill", "--request"]),
    (&["requests/side"], "svc-db-backup", &["side", "serve"]),
    (&["requests/update", "update/journal.json"], "svc-update", &["apply", "--request"]),
];
const PATH_POLL: Duration = Duration::from_millis(50);
/// systemd stops to trigger a path unit that leaves its path behind; we only slow down.
const PATH_REST: Duration = Duration::from_secs(1);

const EX_TEMPFAIL: i32 = 75;
const REGISTER_RETRY: Duration = Duration::from_millis(300);

/// A boot that stopped, with the stage as the platform knows it.
#[derive(Debug)]
pub(super) struct BootFailure {
    pub(super) stage: &'static str,
    pub(super) error: anyhow::Error,
}

/// Plays the whole boot; a failure is reported to the platform, as far as that goes.
pub(super) async fn boot(
    session: &Arc<Session>,
    settings: &HostSettings,
    user_data: &str,
) -> Result<(), BootFailure> {
    // Without its user-data a machine does not know whom to tell.
    session.disk.first_boot(user_data).map_err(at("user-data"))?;
    systemctl::serve(session, settings);
    let Err(failure) = units(session, settings).await else {
        watch_requests(session, settings);
        return Ok(());
    };
    if !session.off.is_cancelled() {
        report(session, settings, &failure).await;
    }
    Err(failure)
}

async fn units(session: &Arc<Session>, settings: &HostSettings) -> Result<(), BootFailure> {
    comes_to(session, settings, "database").await;
    tokio::select! {
        started = database(session, settings) => started.map_err(at("database"))?,
        () = session.off.cancelled() => return Err(at("database")(anyhow!("the power was cut"))),
    }
    if !session.disk.has_release() {
        comes_to(session, settings, "bundle").await;
        run(session, settings, "svc-update", &["boot"]).await.map_err(at("bundle"))?;
    }
    comes_to(session, settings, "restore").await;
    run(session, settings, "svc-restore", &[]).await.map_err(at("restore"))?;
    comes_to(session, settings, "gateway").await;
    // As `svc-apps.service`, which is ordered before the gateway and not required by it.
    run(session, settings, GATEWAY, &["install-apps"]).await.ok();
    if session.disk.program("svc-hook").exists() {
        run(session, settings, "svc-hook", &["install"]).await.ok();
    }
    for (name, _) in OPTIONAL.iter().filter(|(_, needed)| session.disk.opt(needed).exists()) {
        service(session, settings, name);
    }
    service(session, settings, GATEWAY).ready().await.map_err(at("gateway"))?;
    comes_to(session, settings, "register").await;
    register(session, settings).await.map_err(at("register"))?;
    service(session, settings, SYNC_AGENT).ready().await.map_err(at("register"))
}

fn at(stage: &'static str) -> impl FnOnce(anyhow::Error) -> BootFailure {
    move |error| BootFailure { stage, error }
}

/// Starts the machine's own PostgreSQL; at the first boot it is made, with its password and the empty database `svc`.
pub(super) async fn database(session: &Session, settings: &HostSettings) -> Result<()> {
    let disk = &session.disk;
    let dir = disk.database_dir();
    let server = match disk.database_record()? {
        Some(kept) => PgServer::open(&settings.pg, &dir, kept.port, &kept.password).await?,
        None => {
            // One that was cut off half-way is not worth keeping.
            std::fs::remove_dir_all(&dir).ok();
            std::fs::create_dir_all(&dir)?;
            let options = PgOptions { data_dir: Some(dir), ..PgOptions::default() };
            let server = PgServer::start(&settings.pg, options).await?;
            server.create_database("svc").await?;
            let record = DatabaseRecord { port: server.port(), password: server.password().to_owned() };
            disk.keep_database(&record, &server.url("svc"))?;
            server
        }
    };
    session.set_database(server);
    Ok(())
}

/// Where a unit's program is: in the release, or, before there is one, in the bootstrap binary of the image.
pub(super) fn program(session: &Session, settings: &HostSettings, unit: &str) -> Vec<PathBuf> {
    let installed = session.disk.program(unit);
    if installed.exists() { vec![installed] } else { vec![settings.svc_binary.clone(), unit.into()] }
}

/// As `svc-db-backup-request.service`; how it ended is on record.
pub(super) async fn back_up(session: &Session, settings: &HostSettings) {
    run(session, settings, "svc-db-backup", &["run", "--request"]).await.ok();
}

async fn run(session: &Session, settings: &HostSettings, unit: &str, args: &[&str]) -> Result<()> {
    let program = program(session, settings, unit);
    let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
    let finished = session.run_oneshot(unit, &program, &args, &[], settings.unit_deadline).await?;
    ensure!(finished.status.success(), "{unit}: {}", words(&finished));
    Ok(())
}

pub(super) fn service(session: &Arc<Session>, settings: &HostSettings, name: &'static str) -> Arc<Service> {
    let gate = (name == GATEWAY).then(|| session.disk.opt("restore-complete"));
    let listening = (name == AGENT).then(|| PathBuf::from("--listen"));
    Service::start(
        session,
        ServiceUnit {
            name,
            program: vec![session.disk.program(name)].into_iter().chain(listening).collect(),
            condition: gate,
            ready_deadline: settings.ready_deadline,
            stop_deadline: settings.stop_deadline,
        },
    )
}

/// Registers; 75 says that the platform could not be reached, so it is tried again until the deadline.
async fn register(session: &Session, settings: &HostSettings) -> Result<()> {
    let (unit, program) = ("svc-register", program(session, settings, "svc-register"));
    let until = Instant::now() + settings.register_deadline;
    loop {
        let finished = session.run_oneshot(unit, &program, &[], &[], settings.unit_deadline).await?;
        if finished.status.success() {
            return Ok(());
        }
        if finished.status.code() != Some(EX_TEMPFAIL) || Instant::now() >= until {
            bail!("{unit}: {}", words(&finished));
        }
        tokio::select! {
            () = tokio::time::sleep(REGISTER_RETRY) => {}
            () = session.stopping.cancelled() => bail!("{unit}: stopped"),
            () = session.off.cancelled() => bail!("{unit}: the power was cut"),
        }
    }
}

/// The release's `svc`, else the image's.
fn svc_register(session: &Session, settings: &HostSettings) -> [PathBuf; 2] {
    let current = session.disk.opt("current/bin/svc");
    let svc = if current.exists() { current } else { settings.svc_binary.clone() };
    [svc, "svc-register".into()]
}

/// Tells the platform how far the boot is; the boot goes on whatever becomes of it.
async fn comes_to(session: &Session, settings: &HostSettings, stage: &str) {
    let args = ["stage", stage].map(str::to_owned);
    let program = svc_register(session, settings);
    session.run_oneshot("svc-register", &program, &args, &[], settings.unit_deadline).await.ok();
}

async fn report(session: &Session, settings: &HostSettings, failure: &BootFailure) {
    let message: String = format!("{:#}", failure.error).chars().take(1000).collect();
    let args = ["failure", "--stage", failure.stage, "--message", &message].map(str::to_owned);
    let program = svc_register(session, settings);
    let told = session.run_oneshot("svc-register", &program, &args, &[], settings.unit_deadline).await;
    if let Err(error) = told.context("report the boot failure") {
        session.disk.append_log("init", format!("{error:#}\n").as_bytes()).ok();
    }
}

/// The path units: a request file that appears starts its unit, which removes the file.
fn watch_requests(session: &Arc<Session>, settings: &HostSettings) {
    for (paths, unit, args) in PATH_UNITS {
        let (session_of_task, settings) = (Arc::clone(session), settings.clone());
        session.tasks.spawn_on(
            async move {
                let session = session_of_task;
                let is_due = || paths.iter().any(|path| session.disk.state(path).exists());
                loop {
                    let rest = if is_due() {
                        run(&session, &settings, unit, args).await.ok();
                        if is_due() { PATH_REST } else { PATH_POLL }
                    } else {
                        PATH_POLL
                    };
                    tokio::select! {
                        () = tokio::time::sleep(rest) => {}
                        () = session.stopping.cancelled() => return,
                        () = session.off.cancelled() => return,
                    }
                }
            },
            crate::runtime::servers(),
        );
    }
}
