//! Operations: their kinds, their steps, and an operator's decisions on them.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OperationKind {
    Provision,
    Recover,
    /// Takes a final backup of a deleted machine and powers its server off.
    Delete,
    Resize,
    /// Returns a machine to its slot.
    Reinstate,
    /// Deletes the server of a machine that left its slot.
    RemoveServer,
    /// Powers on the server of the slot's machine, and waits for its host.
    PowerOn,
    /// Shuts the host down and powers the server off, until an operator powers it on again.
    PowerOff,
    /// Restarts the host.
    Reboot,
}

/// One step of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// Stops the writers on the replaced or deleted host, and waits for a snapshot taken after that.
    FinalBackup,
    /// Raises the slot's fence to the epoch of the new or reinstated machine.
    Fence,
    /// Powers off the server of the replaced or deleted host.
    PowerOffServer,
    /// Deletes the predecessor's server if the operator chose that; otherwise it is kept.
    DeletePredecessor,
    CreateServer,
    AwaitRegistration,
    /// Deletes this machine's server.
    DeleteServer,
    /// Requests a shutdown of the operating system, and waits for it until a timeout; best effort.
    ShutDown,
    PowerOff,
    ChangeType,
    /// Powers the server on, even if changing its type failed.
    PowerOn,
    /// Waits until the host reports that it is healthy, and reads the server's type.
    AwaitHealth,
    /// Powers on the server of a reinstated machine.
    SwitchOn,
    /// Resumes the writers of a reinstated machine. If the machine is `failed` until its host has sent a healthy
    /// heartbeat under the new epoch, also waits for that heartbeat.
    AwaitHost,
    /// Powers on the server of the slot's machine.
    StartServer,
    /// Requests a shutdown, and cuts the power after a timeout.
    StopServer,
    RebootServer,
    /// Waits for a healthy heartbeat that is received after the step has started.
    AwaitHeartbeat,
}

/// A group of steps with its own share of the runner's capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// For steps that call the database, the store and the provider.
    General,
    /// For steps that call hosts: an unresponsive host uses part of this lane's capacity until the call times out.
    HostCalls,
}

/// An operator's decisions on an operation, made when it was created or later. Stored in `operations.options`.
/// Fields from a newer release are ignored.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct OperationOptions {
    /// Data that no snapshot contains may be lost if no final backup can be taken.
    pub accept_loss: bool,
    /// An operator accepted the loss during the final backup, so the step stops waiting for the backup.
    pub give_up_backup: bool,
    /// The loss had already been accepted when `give_up_backup` was set, so a retry of the backup keeps `accept_loss`.
    pub had_accepted_loss: bool,
    /// An unverified fence no longer blocks the operation, because an operator decided that a host forged it.
    pub disregard_fence: bool,
    /// The predecessor's server is deleted before the new one is created.
    pub replace_first: bool,
    /// The server of a deleted machine is not kept.
    pub now: bool,
}

impl OperationOptions {
    /// Stops waiting for the final backup, and accepts the loss.
    #[must_use]
    pub fn with_backup_given_up(self) -> Self {
        let had_accepted_loss = if self.give_up_backup { self.had_accepted_loss } else { self.accept_loss };
        Self { accept_loss: true, give_up_backup: true, had_accepted_loss, ..self }
    }

    /// Waits for the final backup again. If the loss was accepted only to stop waiting, it is no longer accepted.
    #[must_use]
    pub fn with_backup_retried(self) -> Self {
        let accept_loss = self.accept_loss && (!self.give_up_backup || self.had_accepted_loss);
        Self { accept_loss, give_up_backup: false, ..self }
    }
}

impl OperationKind {
    pub const ALL: [Self; 9] = [
        Self::Provision,
        Self::Recover,
        Self::Delete,
        Self::Resize,
        Self::Reinstate,
        Self::RemoveServer,
        Self::PowerOn,
        Self::PowerOff,
        Self::Reboot,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Provision => "provision",
            Self::Recover => "recover",
            Self::Delete => "delete",
            Self::Resize => "resize",
            Self::Reinstate => "reinstate",
            Self::RemoveServer => "remove_server",
            Self::PowerOn => "power_on",
            Self::PowerOff => "power_off",
            Self::Reboot => "reboot",
        }
    }

    /// Returns the kind as a noun, for messages.
    pub fn noun(self) -> &'static str {
        match self {
            Self::Provision => "provisioning",
            Self::Recover => "recovery",
            Self::Delete => "deletion",
            Self::Resize => "resize",
            Self::Reinstate => "reinstatement",
            Self::RemoveServer => "removal of the server",
            Self::PowerOn => "power-on",
            Self::PowerOff => "power-off",
            Self::Reboot => "reboot",
        }
    }

    /// Returns the steps, in order. A new machine's fence is set before its server is created.
    pub fn steps(self) -> &'static [Step] {
        match self {
            Self::Provision | Self::Recover => &[
                Step::FinalBackup,
                Step::Fence,
                Step::PowerOffServer,
                Step::DeletePredecessor,
                Step::CreateServer,
                Step::AwaitRegistration,
            ],
            Self::Delete => &[Step::FinalBackup, Step::PowerOffServer],
            Self::Resize => {
                &[Step::ShutDown, Step::PowerOff, Step::ChangeType, Step::PowerOn, Step::AwaitHealth]
            }
            Self::Reinstate => &[Step::Fence, Step::SwitchOn, Step::AwaitHost],
            Self::RemoveServer => &[Step::DeleteServer],
            Self::PowerOn => &[Step::StartServer, Step::AwaitHeartbeat],
            Self::PowerOff => &[Step::StopServer],
            Self::Reboot => &[Step::RebootServer, Step::AwaitHeartbeat],
        }
    }

    pub fn first_step(self) -> Step {
        self.steps()[0]
    }

    /// Returns the step after this one; `None` for the last step, and for a step of a different kind of operation.
    pub fn next_step(self, step: Step) -> Option<Step> {
        let steps = self.steps();
        let index = steps.iter().position(|candidate| *candidate == step)?;
        steps.get(index + 1).copied()
    }
}

impl FromStr for OperationKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let kind = Self::ALL.into_iter().find(|kind| kind.as_str() == text);
        kind.ok_or_else(|| format!("{text:?} is not an operation kind"))
    }
}

impl Step {
    pub const ALL: [Self; 18] = [
        Self::FinalBackup,
        Self::Fence,
        Self::PowerOffServer,
        Self::DeletePredecessor,
        Self::CreateServer,
        Self::AwaitRegistration,
        Self::DeleteServer,
        Self::SwitchOn,
        Self::AwaitHost,
        Self::ShutDown,
        Self::PowerOff,
        Self::ChangeType,
        Self::PowerOn,
        Self::AwaitHealth,
        Self::StartServer,
        Self::StopServer,
        Self::RebootServer,
        Self::AwaitHeartbeat,
    ];

    pub fn lane(self) -> Lane {
        match self {
            Self::FinalBackup | Self::AwaitHost => Lane::HostCalls,
            Self::Fence
            | Self::PowerOffServer
            | Self::DeletePredecessor
            | Self::CreateServer
            | Self::AwaitRegistration
            | Self::DeleteServer
            | Self::ShutDown
            | Self::PowerOff
            | Self::ChangeType
            | Self::PowerOn
            | Self::AwaitHealth
            | Self::SwitchOn
            | Self::StartServer
            | Self::StopServer
            | Self::RebootServer
            | Self::AwaitHeartbeat => Lane::General,
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::FinalBackup => "last_backup",
            Self::Fence => "fence",
            Self::PowerOffServer => "power_off_server",
            Self::SwitchOn => "switch_on",
            Self::AwaitHost => "await_host",
            Self::DeletePredecessor => "delete_predecessor",
            Self::CreateServer => "create_server",
            Self::AwaitRegistration => "await_registration",
            Self::DeleteServer => "delete_server",
            Self::ShutDown => "shut_down",
            Self::PowerOff => "power_off",
            Self::ChangeType => "change_type",
            Self::PowerOn => "power_on",
            Self::AwaitHealth => "await_health",
            Self::StartServer => "start_server",
            Self::StopServer => "stop_server",
            Self::RebootServer => "reboot_server",
            Self::AwaitHeartbeat => "await_heartbeat",
        }
    }
}

impl FromStr for Step {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let step = Self::ALL.into_iter().find(|step| step.as_str() == text);
        step.ok_or_else(|| format!("{text:?} is not a step"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backup_retry_keeps_only_earlier_accepted_loss() {
        let accepted = OperationOptions { accept_loss: true, ..OperationOptions::default() };
        for options in [OperationOptions::default(), accepted] {
            let given_up = options.with_backup_given_up();
            assert!(given_up.accept_loss && given_up.give_up_backup);
            for given_up in [given_up, given_up.with_backup_given_up()] {
                let retried = given_up.with_backup_retried();
                assert_eq!(retried.accept_loss, options.accept_loss);
                assert!(!retried.give_up_backup);
            }
        }
        assert!(accepted.with_backup_retried().accept_loss, "the earlier acceptance was dropped");
    }
}
