//! Identifies the peer of a hook connection from kernel credentials, never from what it sends.

use nix::unistd::geteuid;

use crate::audit::protocol::Process;
use crate::system::unix_socket::PeerCredentials;

/// The connected process and its ancestors, captured when it connected.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Peer {
    /// Whether the process runs as root or the gateway user, the only users allowed to report dispatches.
    pub may_report_dispatches: bool,
    /// The process, its parent, and so on. Empty if the process had already exited.
    processes: Vec<Process>,
}

impl Peer {
    pub fn from_credentials(credentials: PeerCredentials) -> Self {
        let is_trusted = |uid: u32| uid == 0 || uid == geteuid().as_raw();
        let processes = credentials.pid.map(Process::with_ancestors).unwrap_or_default();
        Self { may_report_dispatches: credentials.uid.is_some_and(is_trusted), processes }
    }

    /// The hook's parent process: the agent program.
    pub fn caller(&self) -> Option<Process> {
        self.processes.get(1).copied()
    }

    /// Whether the peer is `process` or one of its descendants.
    pub fn is_in_tree_of(&self, process: Process) -> bool {
        self.processes.contains(&process)
    }

    /// Whether the process was still running when its connection was accepted.
    pub fn is_identified(&self) -> bool {
        !self.processes.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_in_tree_of_matches_only_peer_and_ancestors() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let peer = Peer::from_credentials(PeerCredentials { uid: Some(geteuid().as_raw()), pid: Some(pid) });
        let parent = Process::from_pid(nix::unistd::getppid().as_raw());
        assert!(peer.may_report_dispatches && peer.is_identified());
        assert_eq!(peer.caller(), Some(parent));
        assert!(peer.is_in_tree_of(Process::from_pid(pid)) && peer.is_in_tree_of(parent));
        assert!(!peer.is_in_tree_of(Process { pid, started: 1 }));
        let exited = Peer::from_credentials(PeerCredentials { uid: Some(u32::MAX), pid: Some(i32::MAX) });
        assert!(!exited.may_report_dispatches && !exited.is_identified() && exited.caller().is_none());
    }
}
