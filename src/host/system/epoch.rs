//! This machine's epoch: the provisioned one, or a higher one from a heartbeat response. When a recovery is undone, the
//! platform raises the old machine's epoch above the slot's fence.
//!
//! Invariant: the epoch never decreases, unless its file becomes unreadable or invalid.

use serde::{Deserialize, Serialize};

use crate::system::layout::Layout;
use svc_base::error_chain::format_chain;
use svc_base::fsx::{self, FileError};
use svc_machine::epoch::Epoch;

const FORMAT_VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct RaisedEpoch {
    version: u32,
    epoch: Epoch,
}

/// Returns the higher of `provisioned` and the raised epoch. Falls back to `provisioned` if the file is unreadable or
/// invalid. The fence then rejects this machine's backups, so this fails safe.
pub fn current(layout: &Layout, provisioned: Epoch) -> Epoch {
    match read(layout) {
        Ok(raised) => raised.map_or(provisioned, |raised| raised.max(provisioned)),
        Err(error) => {
            tracing::error!(error = %format_chain(&error), "could not read the raised epoch");
            provisioned
        }
    }
}

fn read(layout: &Layout) -> Result<Option<Epoch>, FileError> {
    let text = fsx::read_if_exists(&layout.raised_epoch())?;
    let raised = text.and_then(|text| serde_json::from_slice::<RaisedEpoch>(&text).ok());
    Ok(raised.filter(|raised| raised.version == FORMAT_VERSION).map(|raised| raised.epoch))
}

/// Persists a platform-assigned epoch if it's higher than the current one.
pub fn raise(layout: &Layout, provisioned: Epoch, epoch: Epoch) -> Result<(), FileError> {
    let current_epoch = current(layout, provisioned);
    if epoch <= current_epoch {
        return Ok(());
    }
    let text = serde_json::to_vec(&RaisedEpoch { version: FORMAT_VERSION, epoch })
        .expect("plain fields serialize to JSON");
    fsx::write_atomic(&layout.raised_epoch(), &text, 0o644)?;
    tracing::warn!(%epoch, previous = %current_epoch, "platform raised this machine's epoch");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn current_never_decreases_unless_file_is_invalid() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        assert_eq!(current(&layout, Epoch(3)), Epoch(3));
        raise(&layout, Epoch(3), Epoch(5)).unwrap();
        raise(&layout, Epoch(3), Epoch(4)).unwrap();
        assert_eq!(current(&layout, Epoch(3)), Epoch(5));
        assert_eq!(
            current(&layout, Epoch(7)),
            Epoch(7),
            "the provisioned epoch is higher than the raised one"
        );
        fsx::write_atomic(&layout.raised_epoch(), b"{", 0o644).unwrap();
        assert_eq!(current(&layout, Epoch(3)), Epoch(3));
    }
}
