//! `cargo xtask dev`: the demo services, kept running for a developer.
//!
//! It starts all services, provisions an owner's machine with two apps, and runs until a signal stops it.
//! Invariants: at most one instance runs per directory, and no process outlives it.

mod guide;
mod instance_dir;
pub(crate) mod service_info;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tokio::signal::unix::{Signal, SignalKind, signal};

pub use self::instance_dir::{AlreadyRunning, DevLock};
use crate::bundle;
use crate::child;
use crate::scenario::first_machine::MachineRecord;
use crate::scenario::stack::{
    CONFIRM_FLAGS, HANDLE, IMAGE_VERSION, RouterTransport, Stack, USER, eventually,
};

/// The router loads a new machine within a second.
const ROUTE_TIMEOUT: Duration = Duration::from_secs(20);

/// Starts all services, prints how to use them, and runs until SIGINT, SIGTERM or SIGHUP.
///
/// # Errors
/// Fails if a service cannot be started, if the machine cannot be provisioned, or if the platform exits.
pub async fn run(lock: DevLock, svc: &Path, bundle: Option<&Path>) -> Result<()> {
    let started = Instant::now();
    let mut stop = StopSignals::listen()?;
    // In `/tmp`, because a Unix socket's path is limited to 107 bytes.
    let dir = tempfile::Builder::new()
        .prefix("svc-dev-")
        .tempdir_in("/tmp")
        .context("cannot create a directory for disks")?;
    child::remove_on_exit(dir.path());
    println!("dev: starting platform, router, provider, store, database, identity provider");
    let mut stack = tokio::select! {
        result = Stack::start(svc, dir.path(), RouterTransport::Plain) => result?.0,
        () = stop.wait_for_signal() => return Ok(()),
    };
    let result = tokio::select! {
        result = provision_and_wait(&mut stack, &lock, svc, bundle, started) => result,
        () = stop.wait_for_signal() => Ok(()),
    };
    if result.is_err() {
        stack.print_logs();
    }
    println!("dev: stopping");
    lock.unpublish();
    stack.stop().await;
    result
}

async fn provision_and_wait(
    stack: &mut Stack,
    lock: &DevLock,
    svc: &Path,
    bundle: Option<&Path>,
    started: Instant,
) -> Result<()> {
    println!("dev: provisioning {USER}'s machine");
    let machine = provision(stack, bundle).await?;
    let info = service_info::ServiceInfo::collect(stack, &machine)?;
    let files = lock.publish(&info, stack.operator_env(), svc)?;
    println!("{}", guide::render(stack, &info, &files, started.elapsed()));
    stack.wait_for_platform_exit().await
}

/// Provisions the demo owner's machine and waits until the owner can reach it through the router. Without `bundle`,
/// builds the minimal bundle.
pub(crate) async fn provision(stack: &Stack, bundle: Option<&Path>) -> Result<MachineRecord> {
    stack.svcctl(&["slot", "set", USER, "--plan", "max"]).await?.ensure_success()?;
    let (dir, version) = match bundle {
        Some(dir) => (dir.to_owned(), bundle::read_version(dir)?),
        None => {
            let (svc, out) = (stack.svc.clone(), stack.dir.join("bundle"));
            let build = move || bundle::build_minimal(&svc, IMAGE_VERSION, &out);
            (tokio::task::spawn_blocking(build).await??.dir, IMAGE_VERSION.to_owned())
        }
    };
    let dir = dir.display().to_string();
    stack.svcctl(&["bundle", "publish", &dir, "--image-version", &version]).await?.ensure_success()?;
    let args = ["--json", "provision", USER, "--handle", HANDLE, "--image-version", &version, "--wait=200"];
    let args = [&args[..], &CONFIRM_FLAGS].concat();
    let machine = MachineRecord::parse(&stack.svcctl(&args).await?.ensure_success()?.stdout)?;
    let owner = stack.owner_token();
    eventually("the owner reaches the machine", ROUTE_TIMEOUT, || async {
        let apps = stack.web.get("/api/apps", Some(&owner), "application/json").await?;
        ensure!(apps.status.is_success(), "GET /api/apps: {}: {}", apps.status, apps.excerpt());
        Ok(())
    })
    .await?;
    Ok(machine)
}

/// Returns the default directory, `target/dev`.
pub fn default_dir() -> PathBuf {
    crate::fetch::target_dir().join("dev")
}

/// The signals that stop the run.
struct StopSignals([Signal; 3]);

impl StopSignals {
    fn listen() -> Result<Self> {
        let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        let [interrupt, terminate, hangup] = kinds.map(signal);
        Ok(Self([interrupt?, terminate?, hangup?]))
    }

    async fn wait_for_signal(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}
