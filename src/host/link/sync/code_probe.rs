//! Health probe for the owner's code-server, if the release includes it.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::net::UnixStream;

use crate::system::layout::Layout;
use svc_wire::host::ComponentStatus;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Longer than the 90 s startup timeout in `svc-code`.
const STARTUP_TIMEOUT: Duration = Duration::from_secs(120);

/// Probes code-server and tracks how long it has been down.
#[derive(Default)]
pub struct CodeProbe {
    down_since: Mutex<Option<Instant>>,
}

impl CodeProbe {
    /// Returns `None` if the release doesn't include code-server, or if it may still be starting.
    pub async fn check(&self, layout: &Layout) -> Option<ComponentStatus> {
        let is_installed = layout.runtime().join("code-server").exists();
        let is_up = is_installed && accepts_connections(layout).await;
        self.assess(is_installed, is_up, Instant::now())
    }

    fn assess(&self, is_installed: bool, is_up: bool, now: Instant) -> Option<ComponentStatus> {
        let mut down_since = self.down_since.lock().unwrap_or_else(PoisonError::into_inner);
        if !is_installed || is_up {
            *down_since = None;
            return is_up.then_some(ComponentStatus::Ok);
        }
        let since = *down_since.get_or_insert(now);
        (now.duration_since(since) >= STARTUP_TIMEOUT).then_some(ComponentStatus::Failing)
    }
}

async fn accepts_connections(layout: &Layout) -> bool {
    let connect = UnixStream::connect(layout.owner_sockets().join("code.sock"));
    matches!(tokio::time::timeout(CONNECT_TIMEOUT, connect).await, Ok(Ok(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assess_reports_failing_after_startup_timeout() {
        let probe = CodeProbe::default();
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        assert_eq!(probe.assess(false, false, at(0)), None);
        assert_eq!(probe.assess(true, false, at(1)), None, "code-server may still be starting");
        assert_eq!(probe.assess(true, false, at(120)), None);
        assert_eq!(probe.assess(true, false, at(121)), Some(ComponentStatus::Failing));
        assert_eq!(probe.assess(true, true, at(122)), Some(ComponentStatus::Ok));
        assert_eq!(probe.assess(true, false, at(500)), None);
        assert_eq!(probe.assess(false, false, at(900)), None, "the current release has no code-server");
        assert_eq!(probe.assess(true, false, at(901)), None);
    }

    #[tokio::test]
    async fn check_connects_only_to_installed_code_server() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let probe = CodeProbe::default();
        std::fs::create_dir_all(layout.owner_sockets()).unwrap();
        let _listener = tokio::net::UnixListener::bind(layout.owner_sockets().join("code.sock")).unwrap();
        assert_eq!(probe.check(&layout).await, None, "the release has no code-server");
        std::fs::create_dir_all(layout.runtime().join("code-server")).unwrap();
        assert_eq!(probe.check(&layout).await, Some(ComponentStatus::Ok));
    }
}
