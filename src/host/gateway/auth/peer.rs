//! Identifies peer processes on the machine's own sockets, using only kernel data.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;

use svc_host::system::unix_socket::PeerCredentials;

/// Slice of the agent units (`systemd/system/svc-agent@.service`).
const AGENTS_SLICE: &str = "svcagents.slice";

/// A local process's trust class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// A process running as root or as the gateway's user, such as `svcctl doctor` or one of the machine's services.
    Machine,
    /// A process running as the owner's user: a terminal, the editor, the shell.
    OwnerProcess,
    /// A dispatched agent's process or one of its descendants.
    Agent,
    /// A process running as any other user.
    Untrusted,
}

/// Classifies local processes by trust.
pub struct PeerClassifier {
    gateway_uid: u32,
    /// A directory owned by the owner's user, inside one that only root can write to.
    owners_dir: PathBuf,
    proc: PathBuf,
}

impl PeerClassifier {
    pub fn new(owners_dir: PathBuf) -> Self {
        Self { gateway_uid: geteuid().as_raw(), owners_dir, proc: PathBuf::from("/proc") }
    }

    /// Classifies a connection's peer process. Without credentials, it's untrusted.
    pub fn classify(&self, credentials: Option<PeerCredentials>) -> Peer {
        let Some(PeerCredentials { uid: Some(uid), pid }) = credentials else { return Peer::Untrusted };
        if uid == 0 || uid == self.gateway_uid {
            return Peer::Machine;
        }
        if fs::metadata(&self.owners_dir).is_ok_and(|meta| meta.uid() == uid) {
            return if self.is_agent(pid) { Peer::Agent } else { Peer::OwnerProcess };
        }
        Peer::Untrusted
    }

    /// Processes can't leave their cgroup. One that has already exited can't be checked, so it's treated as an agent,
    /// which has fewer permissions.
    fn is_agent(&self, pid: Option<i32>) -> bool {
        let Some(pid) = pid else { return true };
        let groups = fs::read_to_string(self.proc.join(pid.to_string()).join("cgroup"));
        groups.map_or(true, |groups| is_in_agents_slice(&groups))
    }
}

/// `groups` is the contents of `/proc/PID/cgroup`: `hierarchy:controllers:path` lines.
fn is_in_agents_slice(groups: &str) -> bool {
    let paths = groups.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    paths.map(Path::new).any(|path| path.components().any(|part| part.as_os_str() == AGENTS_SLICE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classify_uses_uid_and_cgroup() {
        let dir = tempfile::tempdir().unwrap();
        let owner = fs::metadata(dir.path()).unwrap().uid();
        for (pid, group) in
            [(7, "0::/svc.slice/svc-code.service"), (8, "0::/svcagents.slice/svc-agent@1.service")]
        {
            fs::create_dir(dir.path().join(pid.to_string())).unwrap();
            fs::write(dir.path().join(format!("{pid}/cgroup")), format!("{group}\n")).unwrap();
        }
        // The directory's owner stands in for the owner's user; the gateway is a different user.
        let peers = PeerClassifier {
            gateway_uid: owner + 1,
            owners_dir: dir.path().to_owned(),
            proc: dir.path().to_owned(),
        };
        let classify = |uid, pid| peers.classify(Some(PeerCredentials { uid: Some(uid), pid }));
        assert_eq!(classify(owner + 1, Some(7)), Peer::Machine);
        assert_eq!(classify(owner + 2, Some(7)), Peer::Untrusted);
        assert_eq!(peers.classify(None), Peer::Untrusted);
        if owner == 0 {
            assert_eq!(classify(0, Some(8)), Peer::Machine);
            return;
        }
        assert_eq!(classify(owner, Some(7)), Peer::OwnerProcess);
        for pid in [Some(8), Some(9), None] {
            assert_eq!(classify(owner, pid), Peer::Agent, "{pid:?}");
        }
    }

    #[test]
    fn agents_slice_matches_whole_path_component() {
        assert!(is_in_agents_slice("0::/svcagents.slice/svc-agent@3-1.service\n"));
        assert!(is_in_agents_slice("12:pids:/x\n1:name=systemd:/svcagents.slice/a:b\n"));
        assert!(!is_in_agents_slice("0::/system.slice/not-svcagents.slice.service\n"));
        assert!(!is_in_agents_slice(""));
    }
}
