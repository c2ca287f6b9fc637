//! Stops the gateway when this machine has been replaced or deleted.

use std::path::PathBuf;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Cancels `stop` once `file`, which marks this machine as superseded, exists.
pub async fn watch_superseded(file: PathBuf, stop: CancellationToken) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(CHECK_INTERVAL) => {}
        }
        if tokio::fs::try_exists(&file).await.unwrap_or(false) {
            tracing::warn!("this machine has been replaced or deleted; stopping");
            stop.cancel();
        }
    }
}
