//! The gateway's life as systemd and the platform see it: ready, alive, superseded.

use std::path::PathBuf;
use std::time::Duration;

use sd_notify::NotifyState;
use tokio_util::sync::CancellationToken;

const LOOK_EACH: Duration = Duration::from_secs(1);

/// Tells systemd; without it nobody listens and nothing happens.
pub fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!(%error, "systemd was not told");
    }
}

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

/// Answers systemd's watchdog, where there is one, at half its time.
pub async fn feed_watchdog(stop: CancellationToken) {
    let Some(each) = sd_notify::watchdog_enabled() else { return };
    loop {
        tell(&[NotifyState::Watchdog]);
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(each / 2) => {}
        }
    }
}
