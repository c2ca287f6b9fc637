//! Whose process is behind a connection to one of the machine's own sockets: what the kernel says, and nothing that is
//! sent.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;

use crate::host::system::unix_socket::PeerCredentials;

/// The slice of the units that run agents (`systemd/system/svc-agent@.service`).
const AGENTS_SLICE: &str = "svcagents.slice";

/// What a process of this machine may be taken for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// Root's or the gateway's own user's: svcctl, the doctor, the machine's services.
    Machine,
    /// The owner's user's: a terminal, the editor, the shell.
    OwnersProcess,
    /// One that a dispatched agent started, whatever it has become.
    Agent,
    /// Anybody else's.
    Stranger,
}

/// By what processes are told apart.
pub struct Peers {
    own: u32,
    /// It belongs to the owner's user, and lies where only root can change that.
    owners_dir: PathBuf,
    proc: PathBuf,
}

impl Peers {
    pub fn new(owners_dir: PathBuf) -> Self {
        Self { own: geteuid().as_raw(), owners_dir, proc: PathBuf::from("/proc") }
    }

    /// A connection of which nothing is known is a stranger's.
    pub fn judge(&self, credentials: Option<PeerCredentials>) -> Peer {
        let Some(PeerCredentials { uid: Some(uid), pid }) = credentials else { return Peer::Stranger };
        if uid == 0 || uid == self.own {
            return Peer::Machine;
        }
        if fs::metadata(&self.owners_dir).is_ok_and(|meta| meta.uid() == uid) {
            return if self.is_agents(pid) { Peer::Agent } else { Peer::OwnersProcess };
        }
        Peer::Stranger
    }

    /// A process cannot leave its control group. One that has ended since it connected is not asked any more, and counts
    /// as an agent's, which has fewer rights.
    fn is_agents(&self, pid: Option<i32>) -> bool {
        let Some(pid) = pid else { return true };
        let groups = fs::read_to_string(self.proc.join(pid.to_string()).join("cgroup"));
        groups.map_or(true, |groups| is_in_agents_slice(&groups))
    }
}

/// `groups` is the text of `/proc/PID/cgroup`: lines `hierarchy:controllers:path`.
fn is_in_agents_slice(groups: &str) -> bool {
    let paths = groups.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    paths.map(Path::new).any(|path| path.components().any(|part| part.as_os_str() == AGENTS_SLICE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_told_apart_by_user_and_control_group() {
        let dir = tempfile::tempdir().unwrap();
        let owner = fs::metadata(dir.path()).unwrap().uid();
        for (pid, group) in
            [(7, "0::/svc.slice/svc-code.service"), (8, "0::/svcagents.slice/svc-agent@1.service")]
        {
            fs::create_dir(dir.path().join(pid.to_string())).unwrap();
            fs::write(dir.path().join(format!("{pid}/cgroup")), format!("{group}\n")).unwrap();
        }
        // The owner of the directory has the part of the owner's user; the gateway that of another.
        let peers = Peers { own: owner + 1, owners_dir: dir.path().to_owned(), proc: dir.path().to_owned() };
        let judge = |uid, pid| peers.judge(Some(PeerCredentials { uid: Some(uid), pid }));
        assert_eq!(judge(owner + 1, Some(7)), Peer::Machine);
        assert_eq!(judge(owner + 2, Some(7)), Peer::Stranger);
        assert_eq!(peers.judge(None), Peer::Stranger);
        if owner == 0 {
            assert_eq!(judge(0, Some(8)), Peer::Machine);
            return;
        }
        assert_eq!(judge(owner, Some(7)), Peer::OwnersProcess);
        for agents in [Some(8), Some(9), None] {
            assert_eq!(judge(owner, agents), Peer::Agent, "{agents:?}");
        }
    }

    #[test]
    fn the_slice_is_a_part_of_the_path_and_not_of_a_name() {
        assert!(is_in_agents_slice("0::/svcagents.slice/svc-agent@3-1.service\n"));
        assert!(is_in_agents_slice("12:pids:/x\n1:name=systemd:/svcagents.slice/a:b\n"));
        assert!(!is_in_agents_slice("0::/system.slice/not-svcagents.slice.service\n"));
        assert!(!is_in_agents_slice(""));
    }
}
