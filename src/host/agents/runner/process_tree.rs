//! All processes below this one: found by their parents, ended whole.
//!
//! This process is its descendants' subreaper: whatever an agent starts and leaves, in whatever session, comes to it.

use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::Pid;

/// How often what is left is looked for.
const LOOK: Duration = Duration::from_millis(20);
/// A process that the kernel holds for longer than this is left to systemd.
const PATIENCE: Duration = Duration::from_secs(10);

/// From now on, orphans below this process are its own children.
///
/// # Errors
/// The kernel's.
pub fn adopt_orphans() -> nix::Result<()> {
    nix::sys::prctl::set_child_subreaper(true)
}

/// The descendants of a process.
fn descendants(of: i32) -> Vec<Pid> {
    let mut parents: Vec<(i32, i32)> = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        if let Ok(stat) = std::fs::read_to_string(entry.path().join("stat"))
            && let Some(parent) = parent(&stat)
        {
            parents.push((pid, parent));
        }
    }
    let mut found = vec![of];
    let mut next = 0;
    while next < found.len() {
        let above = found[next];
        found.extend(parents.iter().filter(|(_, parent)| *parent == above).map(|(pid, _)| *pid));
        next += 1;
    }
    found.into_iter().skip(1).map(Pid::from_raw).collect()
}

/// The fourth field; the second is a name in parentheses that may hold anything.
fn parent(stat: &str) -> Option<i32> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

/// Lets go of adopted processes that have ended. The agent's own end is somebody else's to hear.
pub fn reap(agent: u32) {
    let look = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
    while let Ok(status) = waitid(Id::All, look) {
        match status.pid() {
            Some(pid) if u32::try_from(pid.as_raw()) != Ok(agent) => {
                // It has ended: this takes no time.
                let _ = waitpid(pid, Some(WaitPidFlag::WNOHANG));
            }
            _ => return,
        }
    }
}

/// Kills all that is left below this process and waits until it is gone. Only when nobody else waits for children.
pub async fn end() {
    let this = Pid::this().as_raw();
    let until = tokio::time::Instant::now() + PATIENCE;
    loop {
        // Those above first would only make orphans faster.
        for pid in descendants(this).into_iter().rev() {
            // One that is gone meanwhile is what is wanted.
            let _ = kill(pid, Signal::SIGKILL);
        }
        loop {
            match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::StillAlive) => break,
                Ok(_) => {}
                // No children: nothing is left.
                Err(_) => return,
            }
        }
        if tokio::time::Instant::now() >= until {
            tracing::warn!("a process of the run does not end");
            return;
        }
        tokio::time::sleep(LOOK).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parent_is_found_whatever_a_process_calls_itself() {
        assert_eq!(parent("12 (a) b) S 7 12 12 0"), Some(7));
        assert_eq!(parent("12 (sh) R 1"), Some(1));
        assert_eq!(parent("nothing"), None);
    }

    #[test]
    fn children_of_children_are_found() {
        let mut child = std::process::Command::new("sh").args(["-c", "sleep 60 & wait"]).spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let until = std::time::Instant::now() + Duration::from_secs(10);
        while descendants(pid).is_empty() {
            assert!(std::time::Instant::now() < until, "in vain");
            std::thread::sleep(LOOK);
        }
        for below in descendants(pid) {
            kill(below, Signal::SIGKILL).unwrap();
        }
        child.wait().unwrap();
    }
}
