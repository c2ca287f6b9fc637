//! When the gateway has to end although nobody asked it to: another machine has taken this one's place.

use std::path::PathBuf;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

const LOOK_EACH: Duration = Duration::from_secs(1);

/// Cancels `stop` once the file is there that says that another machine has taken this one's place.
pub async fn watch_superseded(file: PathBuf, stop: CancellationToken) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(LOOK_EACH) => {}
        }
        if tokio::fs::try_exists(&file).await.unwrap_or(false) {
            tracing::warn!("another machine has taken this one's place; stopping");
            stop.cancel();
        }
    }
}
