//! Who told the watcher something: what the kernel says of the process at the other end, and nothing that it sends.

use nix::unistd::geteuid;

use crate::host::audit::protocol::Process;
use crate::host::system::unix_socket::PeerCredentials;

/// The process that connected and those above it, as they were then.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Speaker {
    /// Root's or the gateway's own user's: the dispatcher's word counts, nobody else's.
    pub is_gateway: bool,
    /// Itself first, then its parent, and so on. Empty where it had ended before it could be looked at.
    processes: Vec<Process>,
}

impl Speaker {
    pub fn of(credentials: PeerCredentials) -> Self {
        let is_own = |uid: u32| uid == 0 || uid == geteuid().as_raw();
        let processes = credentials.pid.map(Process::with_those_above).unwrap_or_default();
        Self { is_gateway: credentials.uid.is_some_and(is_own), processes }
    }

    /// The process that runs the hook: an agent's program runs it as its own child.
    pub fn caller(&self) -> Option<Process> {
        self.processes.get(1).copied()
    }

    /// Whether it is this process, or was started by it or by something below it.
    pub fn is_below(&self, process: Process) -> bool {
        self.processes.contains(&process)
    }

    pub fn is_known(&self) -> bool {
        !self.processes.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_below_its_parents_and_below_nobody_else() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let speaker = Speaker::of(PeerCredentials { uid: Some(geteuid().as_raw()), pid: Some(pid) });
        let parent = Process::of(nix::unistd::getppid().as_raw());
        assert!(speaker.is_gateway && speaker.is_known());
        assert_eq!(speaker.caller(), Some(parent));
        assert!(speaker.is_below(Process::of(pid)) && speaker.is_below(parent));
        assert!(!speaker.is_below(Process { pid, started: 1 }));
        let nobody = Speaker::of(PeerCredentials { uid: Some(u32::MAX), pid: Some(i32::MAX) });
        assert!(!nobody.is_gateway && !nobody.is_known() && nobody.caller().is_none());
    }
}
