//! `quiesce.json`: marks this machine's writers as stopped for a platform operation.
//!
//! The gateway writes the file, acts on it, and removes it at the platform's request. The sync agent removes it once
//! the platform no longer lists the operation. Both do so under the same lock, so the sync agent can't remove a file
//! the gateway has just written.

use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::system::layout::Layout;
use crate::system::lock::{Lock, LockError};
use svc_base::clock;
use svc_base::fsx::{self, FileError};
use svc_machine::id::OperationId;

const FORMAT_VERSION: u32 = 1;
/// Lock timeout. Holders only write one small file.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// Contents of `quiesce.json`: the operation the writers are stopped (or stopping) for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Quiesce {
    version: u32,
    pub operation_id: OperationId,
    #[serde(with = "clock::wire")]
    pub requested_at: Timestamp,
    /// When the last writer stopped; `None` while any is still running.
    #[serde(with = "clock::wire_option")]
    pub quiesced_at: Option<Timestamp>,
}

/// Errors from updating the quiesce file.
#[derive(Debug, thiserror::Error)]
pub enum QuiesceError {
    #[error("cannot lock the writers' state")]
    Lock(#[from] LockError),
    #[error(transparent)]
    File(#[from] FileError),
}

impl Quiesce {
    pub fn new(operation_id: OperationId) -> Self {
        Self { version: FORMAT_VERSION, operation_id, requested_at: clock::now_ms(), quiesced_at: None }
    }

    /// Reads the file. Returns `None` if writes are allowed. Our own writes are atomic, so an invalid file must come
    /// from another program and is ignored.
    ///
    /// # Errors
    /// If the file exists but can't be read.
    pub fn read(layout: &Layout) -> Result<Option<Self>, FileError> {
        let text = fsx::read_if_exists(&layout.quiesce())?;
        let quiesce = text.and_then(|text| match serde_json::from_slice::<Self>(&text) {
            Ok(quiesce) if quiesce.version == FORMAT_VERSION => Some(quiesce),
            Ok(_) => None,
            Err(error) => {
                tracing::error!(%error, "ignoring invalid quiesce.json");
                None
            }
        });
        Ok(quiesce)
    }

    pub fn write(&self, layout: &Layout, _lock: &Lock) -> Result<(), FileError> {
        let text = serde_json::to_vec(self).expect("plain fields serialize to JSON");
        fsx::write_atomic(&layout.quiesce(), &text, 0o644)
    }
}

/// Waits for the lock protecting the file.
pub async fn acquire_lock(layout: &Layout) -> Result<Lock, LockError> {
    Lock::wait(&layout.quiesce_lock(), LOCK_TIMEOUT).await
}

/// Resumes the writers if they're stopped for this operation, and returns whether they were.
pub async fn resume(layout: &Layout, operation: OperationId) -> Result<bool, QuiesceError> {
    let _lock = acquire_lock(layout).await?;
    let is_for_operation = Quiesce::read(layout)?.is_some_and(|quiesce| quiesce.operation_id == operation);
    if is_for_operation {
        fsx::remove_if_exists(&layout.quiesce())?;
    }
    Ok(is_for_operation)
}
