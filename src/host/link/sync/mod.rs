//! `svc-sync-agent`: says to the platform and to the object store that this machine lives, and obeys what the platform
//! answers: newer proof keys, or that another machine has taken this one's place.

mod apply_answer;
mod heartbeat;
mod meta;
mod server;
mod vitals;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::anyhow;
use sd_notify::NotifyState;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::MissedTickBehavior;

use crate::applet::{self, Exit, Failure, OrExit};
use crate::chain::chain;
use crate::config::Env;
use crate::host::system::config;
use crate::host::system::config::{DatabaseUrl, Identity, PlatformLink, begin_log};
use crate::host::system::epoch;
use crate::host::system::layout::Layout;
use crate::host::system::postgres::Server;
use crate::host::system::probe;
use crate::host::system::quiesce::Quiesce;
use crate::host::system::store::StoreLink;
use crate::host::system::store_credentials::{DuringOutage, Renewed};
use crate::http::request_id;
use crate::machine::epoch::Epoch;
use crate::machine::name::ImageVersion;
use crate::store::Bucket;
use crate::store::key::SlotPrefix;
use apply_answer::Superseded;
use heartbeat::Heart;

#[derive(clap::Parser)]
#[command(
    name = "svc-sync-agent",
    version = applet::VERSION,
    about = "Keeps platform and object store told that this machine lives"
)]
struct Args {}

/// What the agent needs.
pub(crate) struct Settings {
    layout: Layout,
    identity: Identity,
    platform: PlatformLink,
    slot: SlotPrefix,
    bucket: Bucket,
    /// Where the store's credentials run out.
    credentials: Option<Arc<Renewed>>,
    server: Server,
    listen: SocketAddr,
    /// The release of user-data; the current one's is asked first.
    image_version: ImageVersion,
    heartbeat_each: Duration,
    meta_each: Duration,
    meta_at_least_each: Duration,
}

impl Settings {
    fn read(layout: Layout) -> Result<Self, Failure> {
        let mut env = config::environment(&layout);
        let identity = Identity::read(&mut env);
        let platform = PlatformLink::read(&mut env, &layout);
        let store = StoreLink::read(&mut env, &layout);
        let database = DatabaseUrl::read(&mut env);
        let image_version = config::image_version(&mut env);
        let listen = env.or("GATEWAY_LISTEN", probe::DEFAULT_LISTEN);
        let heartbeat_each = seconds(&mut env, "HEARTBEAT_SECONDS", 30);
        let meta_each = seconds(&mut env, "VPS_META_SECONDS", 300);
        let meta_at_least_each = seconds(&mut env, "VPS_META_AT_LEAST_SECONDS", 86_400);
        let parts = identity.zip(platform).zip(store).zip(database).zip(image_version);
        let ((((identity, platform), store), database), image_version) = env.finish(parts)?;
        let (bucket, credentials) = store.open_with_source(DuringOutage::Wait).or_exit(Exit::Config)?;
        Ok(Self {
            slot: SlotPrefix::new(&identity.user, &identity.slot),
            bucket,
            credentials,
            server: Server::new(database.config()?),
            layout,
            identity,
            platform,
            listen,
            image_version,
            heartbeat_each,
            meta_each,
            meta_at_least_each,
        })
    }

    /// The machine's epoch of now: a heartbeat may have raised it.
    fn epoch(&self) -> Epoch {
        epoch::current(&self.layout, self.identity.epoch)
    }
}

fn seconds(env: &mut Env, name: &str, default: u64) -> Duration {
    let seconds = env.or(name, default);
    if seconds == 0 {
        env.mistake(name, "must be at least 1");
    }
    Duration::from_secs(seconds.max(1))
}

pub fn run(args: Vec<OsString>) -> ExitCode {
    if let Err(code) = applet::parse::<Args>(args) {
        return code;
    }
    begin_log("svc-sync-agent", &Layout::from_process());
    applet::block_on("svc-sync-agent", async {
        let settings = Settings::read(Layout::from_process())?;
        if settings.layout.superseded().exists() {
            let why = anyhow!("another machine has taken this one's place: nothing is to be done here");
            return Err(Failure::new(Exit::Permission, why));
        }
        settings.platform.upgrade_token.make_durable().or_exit(Exit::Internal)?;
        let heart = Heart::new(&settings).or_exit(Exit::Config)?;
        let mut term = signal(SignalKind::terminate()).or_exit(Exit::Internal)?;
        let mut int = signal(SignalKind::interrupt()).or_exit(Exit::Internal)?;
        // Outside systemd there is nobody to tell.
        let _ = sd_notify::notify(&[NotifyState::Ready]);
        tokio::select! {
            superseded = beat(&settings, &heart) => {
                superseded.record(&settings.layout).or_exit(Exit::Internal)?;
                tracing::warn!(epoch = ?superseded.epoch, "another machine has taken this one's place: the agent ends");
            }
            never = tell_store(&settings) => match never {},
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        let _ = sd_notify::notify(&[NotifyState::Stopping]);
        Ok(())
    })
}

/// How long the first beat waits for a host that starts.
const SETTLING: Duration = Duration::from_secs(10);

/// Beats until the platform says that this machine has been replaced. A beat that fails is not repeated before its
/// time: the next one says the same.
async fn beat(settings: &Settings, heart: &Heart<'_>) -> Superseded {
    settle(settings).await;
    let mut ticks = ticks(settings.heartbeat_each);
    loop {
        ticks.tick().await;
        let quiesced = Quiesce::read(&settings.layout).ok().flatten();
        match request_id::own(heart.beat()).await {
            Ok(answer) => {
                if let Some(before) = quiesced.filter(|_| !answer.superseded)
                    && let Err(error) =
                        apply_answer::resume_writers(settings, &before, answer.quiesce.as_deref()).await
                {
                    tracing::error!(error = %chain(&error), "could not start the writers again");
                }
                match apply_answer::obey(settings, answer) {
                    Ok(None) => {}
                    Ok(Some(superseded)) => return superseded,
                    Err(error) => tracing::error!(%error, "could not keep what the platform delivered"),
                }
            }
            Err(error) => tracing::warn!(error = %crate::http::problem::chain(&error), "heartbeat failed"),
        }
    }
}

/// A gateway that has only just started is not failing: what the first beat says stands until the second.
async fn settle(settings: &Settings) {
    let well = async {
        while !vitals::health(settings).await.0.is_ok() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    // How it is after that is how it is.
    let _ = tokio::time::timeout(settings.heartbeat_each.min(SETTLING), well).await;
}

async fn tell_store(settings: &Settings) -> std::convert::Infallible {
    let mut ticks = ticks(settings.meta_each);
    let mut written = meta::Written::default();
    loop {
        ticks.tick().await;
        if let Some(credentials) = &settings.credentials
            && let Err(error) = credentials.refresh().await
        {
            tracing::warn!(%error, "could not renew the credentials for the object store");
        }
        if let Err(error) = meta::write(settings, &mut written).await {
            tracing::warn!(error = %crate::http::problem::chain(&error), "could not write vps-meta.json");
        }
    }
}

fn ticks(each: Duration) -> tokio::time::Interval {
    let mut ticks = tokio::time::interval(each);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}
