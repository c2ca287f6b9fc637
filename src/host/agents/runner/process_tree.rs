//! Finds the descendants of this process by their parent process ids, and kills them.
//!
//! This process is the subreaper of its descendants: orphans become its children, even those in other sessions.

use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::Pid;

use crate::system::process_stat::ProcessStat;

/// Interval between checks for remaining processes.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// Timeout for the kill; systemd handles a process that is stuck in the kernel for longer.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// Makes orphaned descendants children of this process.
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

/// Reaps children that have ended, except the agent, for which the caller waits.
pub fn reap_orphans(agent: u32) {
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
    while let Ok(status) = waitid(Id::All, flags) {
        match status.pid() {
            Some(pid) if u32::try_from(pid.as_raw()) != Ok(agent) => {
                // The process has ended, so this does not block.
                let _ = waitpid(pid, Some(WaitPidFlag::WNOHANG));
            }
            _ => return,
        }
    }
}

/// Kills all descendants and waits until they have ended, for at most `KILL_TIMEOUT`. No other task may wait for
/// children in the meantime.
pub async fn kill_descendants() {
    let this = Pid::this().as_raw();
    let deadline = tokio::time::Instant::now() + KILL_TIMEOUT;
    loop {
        // Killing parents first would only create orphans sooner.
        for pid in find_descendants(this).into_iter().rev() {
            // It is not an error if the process has already ended.
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
            tracing::warn!("a process of the run has not ended after SIGKILL");
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
            assert!(std::time::Instant::now() < deadline, "no grandchild before the deadline");
            std::thread::sleep(CHECK_INTERVAL);
        }
        for descendant in find_descendants(pid) {
            kill(descendant, Signal::SIGKILL).unwrap();
        }
        child.wait().unwrap();
    }
}
