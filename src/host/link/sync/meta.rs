//! Writes `system/vps-meta.json`, which only the machine with the slot's latest epoch may write.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::config::SyncConfig;
use super::heartbeat;
use super::server::{self, CloudServer};
use crate::system::quiesce::Quiesce;
use svc_base::clock;
use svc_store::StoreError;
use svc_store::meta::{self, VpsMeta, VpsMetaError};
use svc_store::pointer_io;

/// Write timeout, shorter than the default interval between checks for changes.
const WRITE_TIMEOUT: Duration = Duration::from_secs(120);

#[derive(Debug, thiserror::Error)]
pub enum MetaWriteError {
    #[error(transparent)]
    Meta(#[from] VpsMetaError),
    #[error("timed out")]
    Timeout,
}

/// The metadata last written, and when it was written.
#[derive(Debug, Default)]
pub struct LastWrite(Option<(VpsMeta, Instant)>);

impl LastWrite {
    /// Returns whether the metadata has changed (ignoring timestamps) or needs a periodic refresh.
    fn is_due(&self, current: &VpsMeta, refresh_interval: Duration) -> bool {
        let Some((last, at)) = &self.0 else { return true };
        let comparable =
            VpsMeta { heartbeat_at: last.heartbeat_at, last_backup: last.last_backup, ..current.clone() };
        comparable != *last || at.elapsed() >= refresh_interval
    }
}

/// Writes the metadata if it has changed, and at least once per refresh interval. New timestamps alone don't trigger a
/// write: writing on every check, 288 times a day, would cost more per machine than storing its database.
///
/// # Errors
/// [`MetaWriteError::Timeout`] after [`WRITE_TIMEOUT`]; [`MetaWriteError::Meta`] if the store can't be read or written,
/// or as `Fenced` if the metadata was written by a machine with a higher epoch or by another machine with the same
/// epoch.
pub async fn write_if_due(config: &SyncConfig, last_write: &mut LastWrite) -> Result<(), MetaWriteError> {
    let mut meta = build_meta(config);
    if !last_write.is_due(&meta, config.meta_refresh_interval) {
        return Ok(());
    }
    tokio::time::timeout(WRITE_TIMEOUT, try_write(config, &mut meta))
        .await
        .map_err(|_| MetaWriteError::Timeout)??;
    last_write.0 = Some((meta, Instant::now()));
    Ok(())
}

async fn try_write(config: &SyncConfig, meta: &mut VpsMeta) -> Result<(), MetaWriteError> {
    meta.last_backup = read_last_backup(config).await.map_err(VpsMetaError::Store)?;
    Ok(meta::write(&config.bucket, &config.slot, meta).await?)
}

fn build_meta(config: &SyncConfig) -> VpsMeta {
    let identity = &config.identity;
    let cloud_server = CloudServer::read(&config.layout);
    let listen_ip = match config.listen.ip() {
        IpAddr::V4(ip) if !ip.is_unspecified() => Some(ip),
        _ => None,
    };
    // Don't let an unreadable quiesce file block the metadata write; report `running` instead.
    let quiesced = Quiesce::read(&config.layout).ok().flatten();
    VpsMeta {
        version: meta::FORMAT_VERSION,
        idp_user_id: identity.user.clone(),
        slot: identity.slot.clone(),
        machine_id: identity.machine,
        epoch: config.epoch(),
        provider_server_id: cloud_server.id,
        image_version: heartbeat::current_image_version(config),
        status: if quiesced.is_some() { "quiesced" } else { "running" }.to_owned(),
        public_ipv4: cloud_server.public_ipv4.or(listen_ip).or_else(server::find_public_source_ipv4),
        heartbeat_at: clock::now_ms(),
        last_backup: None,
    }
}

/// Reads the timestamp of the snapshot referenced by the pointer, regardless of which machine took it.
async fn read_last_backup(config: &SyncConfig) -> Result<Option<jiff::Timestamp>, StoreError> {
    match pointer_io::read(&config.bucket, &config.slot).await {
        Ok(pointer) => Ok(pointer.and_then(|read| read.value.snapshot).map(|snapshot| snapshot.taken_at)),
        // A corrupt pointer must not block the metadata write.
        Err(StoreError::Corrupt { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
