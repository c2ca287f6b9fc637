//! `system/vps-meta.json`: the machine's metadata and heartbeat, written only by the host with the current epoch.

use std::net::Ipv4Addr;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::bucket::{Bucket, Condition, StoreError};
use super::key::SlotPrefix;
use super::pointer::FencedError;
use svc_base::clock;
use svc_machine::epoch::Epoch;
use svc_machine::id::MachineId;
use svc_machine::name::{IdpUserId, ImageVersion, Slot};

pub const FORMAT_VERSION: u32 = 1;

/// Maximum number of attempts to write if other writers interfere.
const MAX_ATTEMPTS: u32 = 4;

/// The content of `system/vps-meta.json` (contract, part 4).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VpsMeta {
    pub version: u32,
    pub idp_user_id: IdpUserId,
    pub slot: Slot,
    pub machine_id: MachineId,
    pub epoch: Epoch,
    pub provider_server_id: Option<String>,
    pub image_version: ImageVersion,
    pub status: String,
    pub public_ipv4: Option<Ipv4Addr>,
    #[serde(with = "clock::wire")]
    pub heartbeat_at: Timestamp,
    /// When the last verified backup was taken.
    #[serde(with = "clock::wire_option")]
    pub last_backup: Option<Timestamp>,
}

/// The reason the metadata was not written.
#[derive(Debug, thiserror::Error)]
pub enum VpsMetaError {
    #[error(transparent)]
    Fenced(#[from] FencedError),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Writes the metadata unless a host with a higher epoch, or another host with the same epoch, has written it. As
/// with the pointer, a write whose response was lost is resolved by reading the object back.
///
/// # Errors
/// `Fenced` if a host with a higher epoch, or another host with the same epoch, has written the metadata; `Store` if
/// the store fails, or, with `Precondition`, if other writers interfered in every attempt.
pub async fn write(bucket: &Bucket, slot: &SlotPrefix, meta: &VpsMeta) -> Result<(), VpsMetaError> {
    let key = slot.vps_meta();
    let mut ambiguous_error = None;
    for _ in 0..MAX_ATTEMPTS {
        let current = match bucket.get_json::<VpsMeta>(&key).await {
            Ok(current) => current,
            Err(StoreError::Corrupt { .. }) => {
                // An unreadable object is overwritten, because each heartbeat writes all of the metadata again.
                // Its version comes from a HEAD request, because its content can be of any size.
                let head = bucket.head(&key).await?;
                let condition = head.as_ref().map_or(Condition::Absent, Condition::unchanged);
                match bucket.put_json_if(&key, meta, condition).await {
                    Err(StoreError::Precondition { .. }) => continue,
                    result => return Ok(result?),
                }
            }
            Err(error) => return Err(ambiguous_error.unwrap_or(error).into()),
        };
        let condition = match current {
            None => Condition::Absent,
            Some(read) if read.value == *meta => return Ok(()),
            Some(read) if read.value.epoch > meta.epoch => {
                return Err(FencedError {
                    fence_epoch: read.value.epoch,
                    holder: None,
                    writer_epoch: meta.epoch,
                }
                .into());
            }
            Some(read) if read.value.epoch == meta.epoch && read.value.machine_id != meta.machine_id => {
                let holder = Some(read.value.machine_id);
                return Err(
                    FencedError { fence_epoch: read.value.epoch, holder, writer_epoch: meta.epoch }.into()
                );
            }
            Some(read) => Condition::Unchanged(read.version),
        };
        match bucket.put_json_if(&key, meta, condition).await {
            Ok(()) => return Ok(()),
            Err(StoreError::Precondition { .. }) => {}
            // The write may have succeeded: the next attempt reads the object back.
            Err(error) if error.is_transient() && ambiguous_error.is_none() => ambiguous_error = Some(error),
            Err(error) => return Err(error.into()),
        }
    }
    Err(StoreError::Precondition { key: key.to_string() }.into())
}
