//! `system/vps-meta.json`, as the current epoch's host keeps it.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::Settings;
use super::heartbeat;
use super::server::Server;
use crate::clock;
use crate::host::system::quiesce::Quiesce;
use crate::store::StoreError;
use crate::store::meta::{self, MetaError, VpsMeta};
use crate::store::pointer_io;

/// Shorter than the pause between two writes.
const DEADLINE: Duration = Duration::from_secs(120);

#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    #[error(transparent)]
    Meta(#[from] MetaError),
    #[error("no answer in time")]
    Silent,
}

/// What was written last, and when.
#[derive(Debug, Default)]
pub struct Written(Option<(VpsMeta, Instant)>);

impl Written {
    /// Whether `now` says anything else, or the last write is old.
    fn is_due(&self, now: &VpsMeta, at_least_each: Duration) -> bool {
        let Some((last, at)) = &self.0 else { return true };
        let same = VpsMeta { heartbeat_at: last.heartbeat_at, last_backup: last.last_backup, ..now.clone() };
        same != *last || at.elapsed() >= at_least_each
    }
}

/// Writes the metadata when it has changed, and daily else. Times alone are no change: 288 writes a day for each machine
/// would cost more than its database.
///
/// # Errors
/// [`WriteError`]; `Fenced` when a later machine of the slot has written.
pub async fn write(settings: &Settings, written: &mut Written) -> Result<(), WriteError> {
    let mut meta = describe(settings);
    if !written.is_due(&meta, settings.meta_at_least_each) {
        return Ok(());
    }
    tokio::time::timeout(DEADLINE, try_write(settings, &mut meta))
        .await
        .map_err(|_| WriteError::Silent)??;
    written.0 = Some((meta, Instant::now()));
    Ok(())
}

async fn try_write(settings: &Settings, meta: &mut VpsMeta) -> Result<(), WriteError> {
    meta.last_backup = last_backup(settings).await.map_err(MetaError::Store)?;
    Ok(meta::write(&settings.bucket, &settings.slot, meta).await?)
}

fn describe(settings: &Settings) -> VpsMeta {
    let identity = &settings.identity;
    let server = Server::read(&settings.layout);
    let listening = match settings.listen.ip() {
        IpAddr::V4(ip) if !ip.is_unspecified() => Some(ip),
        _ => None,
    };
    // One that cannot be read stops no writer either.
    let quiesced = Quiesce::read(&settings.layout).ok().flatten();
    VpsMeta {
        version: meta::FORMAT,
        idp_user_id: identity.user.clone(),
        slot: identity.slot.clone(),
        machine_id: identity.machine,
        epoch: settings.epoch(),
        provider_server_id: server.id,
        image_version: heartbeat::image_version(settings),
        status: if quiesced.is_some() { "quiesced" } else { "running" }.to_owned(),
        public_ipv4: server.public_ipv4.or(listening),
        heartbeat_at: clock::now_ms(),
        last_backup: None,
    }
}

/// When the snapshot was taken that the pointer names, whoever took it.
async fn last_backup(settings: &Settings) -> Result<Option<jiff::Timestamp>, StoreError> {
    match pointer_io::read(&settings.bucket, &settings.slot).await {
        Ok(pointer) => Ok(pointer.and_then(|read| read.value.snapshot).map(|snapshot| snapshot.taken_at)),
        // Nobody can say it; that the machine lives is true all the same.
        Err(StoreError::Corrupt { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
