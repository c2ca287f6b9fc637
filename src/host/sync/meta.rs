//! `system/vps-meta.json`, as the current epoch's host keeps it.

use std::net::IpAddr;
use std::time::Duration;

use super::Settings;
use super::heartbeat;
use crate::clock;
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

/// # Errors
/// [`WriteError`]; `Fenced` when a later machine of the slot has written.
pub async fn write(settings: &Settings) -> Result<(), WriteError> {
    tokio::time::timeout(DEADLINE, try_write(settings)).await.map_err(|_| WriteError::Silent)?
}

async fn try_write(settings: &Settings) -> Result<(), WriteError> {
    let identity = &settings.identity;
    let address = match settings.listen.ip() {
        IpAddr::V4(ip) if !ip.is_unspecified() => Some(ip),
        _ => None,
    };
    let meta = VpsMeta {
        version: meta::FORMAT,
        idp_user_id: identity.user.clone(),
        slot: identity.slot.clone(),
        machine_id: identity.machine,
        epoch: settings.epoch(),
        provider_server_id: None,
        image_version: heartbeat::image_version(settings),
        status: "running".to_owned(),
        public_ipv4: address,
        heartbeat_at: clock::now_ms(),
        last_backup: last_backup(settings).await.map_err(MetaError::Store)?,
    };
    Ok(meta::write(&settings.bucket, &settings.slot, &meta).await?)
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
