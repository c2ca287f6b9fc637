//! The story's parts, kept running for a developer: `cargo xtask dev`.
//!
//! Everything that the demo starts, with one owner's machine provisioned and its two apps in use, until a signal ends it.
//! The invariants: one per directory at a time, and after its end, however it ends, nothing of it runs.

mod guide;
pub(crate) mod handbill;
mod place;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tokio::signal::unix::{Signal, SignalKind, signal};

pub use self::place::{Claim, Taken};
use crate::bundle;
use crate::child;
use crate::story::first_life::Machine;
use crate::story::stack::{Front, HANDLE, IMAGE_VERSION, Stack, USER, eventually};

/// The router learns of a new machine within a second.
const ROUTED: Duration = Duration::from_secs(20);

/// Starts all of it, says how it is used, and keeps it until SIGINT, SIGTERM or SIGHUP.
///
/// # Errors
/// When it cannot start, or the platform ends by itself.
pub async fn run(claim: Claim, svc: &Path, bundle: Option<&Path>) -> Result<()> {
    let started = Instant::now();
    let mut stop = Stop::listen()?;
    // Short, and not below `target`: unix sockets lie in it, whose paths have room for 107 bytes.
    let dir =
        tempfile::Builder::new().prefix("svc-dev-").tempdir_in("/tmp").context("a directory for disks")?;
    child::remove_on_exit(dir.path());
    println!("dev: starting platform, router, provider, store, database, identity provider");
    let mut stack = tokio::select! {
        up = Stack::up(svc, dir.path(), Front::Plain) => up?.0,
        () = stop.asked() => return Ok(()),
    };
    let end = tokio::select! {
        end = keep(&mut stack, &claim, svc, bundle, started) => end,
        () = stop.asked() => Ok(()),
    };
    if end.is_err() {
        stack.print_logs();
    }
    println!("dev: stopping");
    claim.withdraw();
    stack.down().await;
    end
}

async fn keep(
    stack: &mut Stack,
    claim: &Claim,
    svc: &Path,
    bundle: Option<&Path>,
    started: Instant,
) -> Result<()> {
    println!("dev: provisioning the machine of {USER}");
    let machine = machine(stack, bundle).await?;
    let handbill = handbill::Handbill::of(stack, &machine)?;
    let files = claim.publish(&handbill, stack.operator_env(), svc)?;
    println!("{}", guide::text(stack, &handbill, &files, started.elapsed()));
    stack.platform_ended().await
}

/// The demo owner's machine, running, and reached through the router. Without a bundle it gets the smallest one.
pub(crate) async fn machine(stack: &Stack, bundle: Option<&Path>) -> Result<Machine> {
    stack.svcctl(&["slot", "set", USER, "--plan", "max"]).await?.good()?;
    let (dir, version) = match bundle {
        Some(dir) => (dir.to_owned(), bundle::version_of(dir)?),
        None => {
            let (svc, out) = (stack.svc.clone(), stack.dir.join("bundle"));
            let build = move || bundle::minimal(&svc, IMAGE_VERSION, &out);
            (tokio::task::spawn_blocking(build).await??.dir, IMAGE_VERSION.to_owned())
        }
    };
    let dir = dir.display().to_string();
    stack.svcctl(&["bundle", "publish", &dir, "--image-version", &version]).await?.good()?;
    let args = ["--json", "provision", USER, "--handle", HANDLE, "--image-version", &version, "--wait=200"];
    let machine = Machine::read(&stack.svcctl(&args).await?.good()?.stdout)?;
    let owner = stack.owner();
    eventually("the owner reaches the machine", ROUTED, || async {
        let apps = stack.web.get("/api/apps", Some(&owner), "application/json").await?;
        ensure!(apps.status.is_success(), "GET /api/apps: {}: {}", apps.status, apps.short());
        Ok(())
    })
    .await?;
    Ok(machine)
}

/// `target/dev`, or wherever it was asked to be.
pub fn default_dir() -> PathBuf {
    crate::fetch::target_dir().join("dev")
}

/// What asks for the end.
struct Stop([Signal; 3]);

impl Stop {
    fn listen() -> Result<Self> {
        let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        let [interrupt, terminate, hangup] = kinds.map(signal);
        Ok(Self([interrupt?, terminate?, hangup?]))
    }

    async fn asked(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}
