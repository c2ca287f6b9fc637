//! A service's life as systemd sees it: ready, alive, stopping. Outside systemd nobody listens and nothing happens.

use std::ffi::OsString;
use std::path::Path;

use sd_notify::NotifyState;
use tokio_util::sync::CancellationToken;

use super::layout::Layout;

/// Whether systemd runs on the machine below a root.
pub fn runs(layout: &Layout) -> bool {
    layout.root().join("run/systemd/system").is_dir()
}

/// The `systemctl` of this machine; `SVC_SYSTEMCTL` names another, for a root that no systemd runs.
pub fn systemctl(layout: &Layout) -> Option<OsString> {
    if let Some(named) = std::env::var_os("SVC_SYSTEMCTL").filter(|path| !path.is_empty()) {
        return Some(named);
    }
    let runs = layout.root() == Path::new("/") && runs(layout);
    runs.then(|| "systemctl".into())
}

pub fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!(%error, "systemd was not told");
    }
}

/// Answers systemd's watchdog, where there is one, at half its time, while `is_well` says so.
pub async fn feed_watchdog(stop: CancellationToken, is_well: impl AsyncFn() -> bool) {
    let Some(each) = sd_notify::watchdog_enabled() else { return };
    loop {
        if is_well().await {
            tell(&[NotifyState::Watchdog]);
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(each / 2) => {}
        }
    }
}
