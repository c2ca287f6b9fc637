//! Finds this process's descendants by parent pid, and kills them.
//!
//! We are their subreaper: orphans become our children, even those in other sessions.

use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::Pid;

use crate::system::process_stat::ProcessStat;

/// Poll interval while waiting for processes to exit.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// Timeout for killing all descendants. systemd handles processes stuck in the kernel for longer.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// Makes this process the subreaper of its descendants.
///
/// # Errors
/// `prctl` failed.
pub fn adopt_orphans() -> nix::Result<()> {
    nix::sys::prctl::set_child_subreaper(true)
}

fn find_descendants(root: i32) -> Vec<Pid> {
    let mut parents: Vec<(i32, i32)> = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        if let Ok(stat) = ProcessStat::from_pid(pid) {
            parents.push((pid, stat.parent_pid));
        }
    }
    let mut tree = vec![root];
    let mut next = 0;
    while next < tree.len() {
        let parent_pid = tree[next];
        tree.extend(parents.iter().filter(|(_, parent)| *parent == parent_pid).map(|(pid, _)| *pid));
        next += 1;
    }
    tree.into_iter().skip(1).map(Pid::from_raw).collect()
}

/// Reaps exited children, except the agent, which the caller waits for.
pub fn reap_orphans(agent: u32) {
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
    while let Ok(status) = waitid(Id::All, flags) {
        match status.pid() {
            Some(pid) if u32::try_from(pid.as_raw()) != Ok(agent) => {
                // The process has exited, so this doesn't block.
                let _ = waitpid(pid, Some(WaitPidFlag::WNOHANG));
            }
            _ => return,
        }
    }
}

/// Kills all descendants and waits for them to exit, for at most `KILL_TIMEOUT`. No other task may wait for children
/// concurrently.
pub async fn kill_descendants() {
    let this = Pid::this().as_raw();
    let deadline = tokio::time::Instant::now() + KILL_TIMEOUT;
    loop {
        // Killing parents first would only create orphans sooner.
        for pid in find_descendants(this).into_iter().rev() {
            // The process may have exited already.
            let _ = kill(pid, Signal::SIGKILL);
        }
        loop {
            match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::StillAlive) => break,
                Ok(_) => {}
                // No children remain.
                Err(_) => return,
            }
        }
        if tokio::time::Instant::now() >= deadline {
            tracing::warn!("run process still alive after SIGKILL");
            return;
        }
        tokio::time::sleep(CHECK_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descendants_include_grandchildren() {
        let mut child =
            std::process::Command::new("sh").args(["-c", "sh -c 'sleep 60 & wait' & wait"]).spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        while find_descendants(pid).len() < 2 {
            assert!(std::time::Instant::now() < deadline, "timed out waiting for the grandchild");
            std::thread::sleep(CHECK_INTERVAL);
        }
        for descendant in find_descendants(pid) {
            kill(descendant, Signal::SIGKILL).unwrap();
        }
        child.wait().unwrap();
    }
}
