//! systemd integration: finds `systemctl`, reports service state (ready, alive, stopping, status text) and feeds the
//! watchdog. Notifications are no-ops if systemd didn't start the service.

use std::ffi::OsString;
use std::path::Path;

use sd_notify::NotifyState;
use tokio_util::sync::CancellationToken;

use super::layout::Layout;
use super::vars;

/// Returns whether systemd manages the machine at the layout's root.
pub fn is_running(layout: &Layout) -> bool {
    layout.root().join("run/systemd/system").is_dir()
}

/// Returns the program in `SVC_SYSTEMCTL`, an override for roots without systemd. Otherwise returns `systemctl` if the
/// layout's root is `/` and systemd is running, or `None`.
pub fn find_systemctl(layout: &Layout) -> Option<OsString> {
    if let Some(program) = vars::SVC_SYSTEMCTL.env_value() {
        return Some(program);
    }
    let has_systemd = layout.root() == Path::new("/") && is_running(layout);
    has_systemd.then(|| "systemctl".into())
}

pub fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!(%error, "could not notify systemd");
    }
}

/// Feeds the systemd watchdog at half its interval, whenever `is_healthy` returns true, until `stop` is cancelled.
/// Returns immediately if the watchdog is disabled.
pub async fn feed_watchdog(stop: CancellationToken, is_healthy: impl AsyncFn() -> bool) {
    let Some(interval) = sd_notify::watchdog_enabled() else { return };
    loop {
        if is_healthy().await {
            notify(&[NotifyState::Watchdog]);
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(interval / 2) => {}
        }
    }
}
