//! Arguments of the commands that manage machines.

use std::fmt;
use std::str::FromStr;

use clap::{Args as ClapArgs, Subcommand};

use super::Wait;
use svc_machine::id::MachineId;
use svc_machine::name::{Handle, IdpUserId, ImageVersion, Location, ServerType, Slot};
use svc_machine::state::Status;
use svc_wire::quote::{InvalidPrice, Price};

/// An operator-specified machine. A handle or slot selects the active machine, except in commands such as `undelete`
/// that act on machines no longer in their slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MachineTarget {
    Id(MachineId),
    /// The machine with this handle; an error if ambiguous.
    Handle(Handle),
    /// The machine in this slot; an error if ambiguous.
    Slot(IdpUserId, Slot),
}

impl FromStr for MachineTarget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(id) = text.parse() {
            return Ok(Self::Id(id));
        }
        if let Ok(handle) = text.parse() {
            return Ok(Self::Handle(handle));
        }
        let (user, slot) = match text.split_once('/') {
            Some((user, slot)) => (user, slot.parse()),
            None => (text, Ok(Slot::primary())),
        };
        match (user.parse(), slot) {
            (Ok(user), Ok(slot)) => Ok(Self::Slot(user, slot)),
            _ => Err("must be a machine's id, a handle, or USER/SLOT".to_owned()),
        }
    }
}

impl MachineTarget {
    /// Returns the machine-list query for this target; empty for an id.
    pub fn query(&self) -> Vec<(&'static str, String)> {
        match self {
            Self::Id(_) => Vec::new(),
            Self::Handle(handle) => vec![("handle", handle.to_string())],
            Self::Slot(user, slot) => vec![("idpUserId", user.to_string()), ("slot", slot.to_string())],
        }
    }

    /// Returns the command for listing the target's deleted and replaced machines.
    pub fn list_ended_command(&self) -> String {
        match self {
            Self::Id(_) => "`svcctl list --deleted`".to_owned(),
            Self::Handle(handle) => format!("`svcctl list --deleted --handle {handle}`"),
            Self::Slot(user, slot) => format!("`svcctl list --deleted --user {user} --slot {slot}`"),
        }
    }
}

impl fmt::Display for MachineTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Id(id) => id.fmt(f),
            Self::Handle(handle) => f.write_str(handle.as_str()),
            Self::Slot(user, slot) => write!(f, "{user}/{slot}"),
        }
    }
}

/// Maximum monthly cost accepted by `--confirm-cost`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CostLimit {
    Any,
    AtMost(Price),
}

impl FromStr for CostLimit {
    type Err = InvalidPrice;

    /// Parses an amount and currency, such as `12.00 EUR`; the space is optional. An empty string means no limit.
    fn from_str(text: &str) -> Result<Self, InvalidPrice> {
        if text.is_empty() {
            return Ok(Self::Any);
        }
        let amount = text.trim_end_matches(|letter: char| letter.is_ascii_uppercase());
        let currency = &text[amount.len()..];
        format!("{} {currency}", amount.trim_end()).parse().map(Self::AtMost)
    }
}

#[derive(Debug, ClapArgs)]
pub struct Provision {
    /// The user's id at the identity provider
    #[arg(value_name = "IDP_USER_ID")]
    pub user: IdpUserId,
    /// The public name of the user's machines
    #[arg(long)]
    pub handle: Handle,
    /// The user's slot
    #[arg(long, default_value_t)]
    pub slot: Slot,
    /// Server type; it must be in the slot's plan (default: the platform's)
    #[arg(long)]
    pub server_type: Option<ServerType>,
    /// Location at the provider, such as nbg1 (default: the platform's)
    #[arg(long)]
    pub location: Option<Location>,
    /// Locations to try if the chosen one has no capacity, such as hel1,fsn1 (default: the platform's list)
    #[arg(long, value_name = "LOCATION,…", value_delimiter = ',')]
    pub fallback_locations: Vec<Location>,
    /// Version of a published bundle (default: the platform's)
    #[arg(long)]
    pub image_version: Option<ImageVersion>,
    /// Create a preview machine, which is not billed
    #[arg(long)]
    pub preview: bool,
    /// Continue even if the host of a failed machine cannot take a final backup: changes that are in no snapshot are
    /// lost with its server
    #[arg(long)]
    pub accept_loss: bool,
    /// Start empty even though an earlier machine in the slot served traffic and left no snapshot: its data is
    /// abandoned
    #[arg(long)]
    pub allow_empty: bool,
    /// Accept the monthly cost without a prompt, up to a limit such as '12.00 EUR' if one is given. The cost must be
    /// accepted for a new customer, and for a server type other than the replaced machine's
    #[arg(long, value_name = "LIMIT", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    pub confirm_cost: Option<CostLimit>,
    /// Confirm that a new customer has explicitly opted in, without a prompt
    #[arg(long)]
    pub confirm_opt_in: bool,
    /// Show what would be created, its cost and the quota, and create nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Skip the confirmation for --accept-loss and --allow-empty, but not those for the cost and the opt-in
    #[arg(long)]
    pub yes: bool,
    #[command(flatten)]
    pub wait: Wait,
}

#[derive(Debug, ClapArgs)]
pub struct List {
    /// Only machines in this state: provisioning, running, recovering, resizing or failed
    #[arg(long)]
    pub status: Option<Status>,
    /// Only the machines of this user
    #[arg(long, value_name = "IDP_USER_ID")]
    pub user: Option<IdpUserId>,
    /// Only the machines in slots with this name, such as primary
    #[arg(long)]
    pub slot: Option<Slot>,
    /// Only the machines with this handle
    #[arg(long)]
    pub handle: Option<Handle>,
    /// List deleted and replaced machines instead
    #[arg(long)]
    pub deleted: bool,
    /// Machines per page, 1 to 500 (default: 100)
    #[arg(long)]
    pub limit: Option<u32>,
    /// Cursor from the previous page
    #[arg(long)]
    pub cursor: Option<String>,
}

#[derive(Debug, ClapArgs)]
pub struct Recover {
    /// The user's id at the identity provider
    #[arg(value_name = "IDP_USER_ID")]
    pub user: IdpUserId,
    /// The user's slot
    #[arg(long, default_value_t)]
    pub slot: Slot,
    /// Start with an empty database if there is no snapshot; only for a new user, or one whose data is intentionally
    /// empty
    #[arg(long)]
    pub allow_empty: bool,
    /// Restore this snapshot instead of the latest: its key, as shown by `svcctl backup list`
    #[arg(long, value_name = "KEY")]
    pub snapshot: Option<String>,
    /// Continue even if the old host cannot take a final backup: changes that are in no snapshot are lost with its
    /// server
    #[arg(long)]
    pub accept_loss: bool,
    /// Delete the old server before creating the new one, for a provider quota of one server. If the new machine does
    /// not start, there is no server to fall back to: the snapshot is the only copy
    #[arg(long)]
    pub replace_first: bool,
    /// Start without the owner's files, without trying to restore them: they stay in the file backup, and the machine
    /// saves no files until they are restored or given up
    #[arg(long)]
    pub without_files: bool,
    /// Use another server type, such as one with a larger disk; it must be in the slot's plan
    #[arg(long)]
    pub server_type: Option<ServerType>,
    /// Use a different location, such as hel1 if nbg1 has no capacity
    #[arg(long)]
    pub location: Option<Location>,
    /// Locations to try if the chosen one has no capacity, such as hel1,fsn1 (default: the platform's list)
    #[arg(long, value_name = "LOCATION,…", value_delimiter = ',')]
    pub fallback_locations: Vec<Location>,
    /// Use a different published bundle version
    #[arg(long)]
    pub image_version: Option<ImageVersion>,
    /// Skip the confirmation
    #[arg(long)]
    pub yes: bool,
    #[command(flatten)]
    pub wait: Wait,
}

#[derive(Debug, ClapArgs)]
pub struct Resize {
    /// A machine's id, its user's handle, or USER/SLOT
    pub machine: MachineTarget,
    /// New server type; it must be in the slot's plan, and its disk at least as large as the current one
    #[arg(value_name = "SERVER_TYPE")]
    pub server_type: ServerType,
    /// Skip the confirmation
    #[arg(long)]
    pub yes: bool,
    #[command(flatten)]
    pub wait: Wait,
}

#[derive(Debug, ClapArgs)]
pub struct Fail {
    /// A machine's id, its user's handle, or USER/SLOT
    pub machine: MachineTarget,
    /// Reason, for the record
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// Skip the confirmation
    #[arg(long)]
    pub yes: bool,
}

#[derive(Debug, ClapArgs)]
pub struct Delete {
    /// A machine's id, its user's handle, or USER/SLOT
    pub machine: MachineTarget,
    /// Delete the server right after the final backup, instead of keeping it for `undelete`
    #[arg(long)]
    pub now: bool,
    /// Continue even if the host cannot take a final backup: changes that are in no snapshot are lost with its server
    #[arg(long)]
    pub accept_loss: bool,
    /// Skip the confirmation
    #[arg(long)]
    pub yes: bool,
    #[command(flatten)]
    pub wait: Wait,
}

#[derive(Debug, ClapArgs)]
pub struct Undelete {
    /// A machine's id, its former handle, or USER/SLOT
    pub machine: MachineTarget,
    #[command(flatten)]
    pub wait: Wait,
}

#[derive(Debug, ClapArgs)]
pub struct Resume {
    /// A machine's id, its user's handle, or USER/SLOT
    pub machine: MachineTarget,
}

#[derive(Debug, Subcommand)]
pub enum MachineCommand {
    /// Rotate the token with which a machine's host authenticates to the platform
    #[command(
        after_help = "The host gets the new token with its next heartbeat. The old token stays valid for the platform's \
UPGRADE_TOKEN_OVERLAP_SECONDS after the first heartbeat with the new one. `svcctl status` shows the token's age. Tokens \
rotate automatically every UPGRADE_TOKEN_ROTATE_SECONDS.\n\n\
Example: svcctl machine rotate-token ada"
    )]
    RotateToken {
        /// A machine's id, its user's handle, or USER/SLOT
        #[arg(required_unless_present = "all", conflicts_with = "all")]
        machine: Option<MachineTarget>,
        /// Rotate the tokens of all active machines
        #[arg(long)]
        all: bool,
    },
}

#[derive(Debug, Subcommand)]
pub enum PowerCommand {
    /// Power on a machine's server; the operation ends when its host is healthy
    #[command(after_help = "Example: svcctl power on ada --wait")]
    On {
        /// A machine's id, its user's handle, or USER/SLOT
        machine: MachineTarget,
        #[command(flatten)]
        wait: Wait,
    },
    /// Shut down a machine and keep it off until `svcctl power on`
    #[command(
        after_help = "Requests a shutdown from the operating system, and cuts the power if the machine has not shut down \
after the platform's RESIZE_SHUTDOWN_SECONDS. The user sees a page stating that the machine is off. No backups are taken. \
The provider keeps billing the server.\n\n\
Example: svcctl power off ada --wait"
    )]
    Off {
        /// A machine's id, its user's handle, or USER/SLOT
        machine: MachineTarget,
        /// Skip the confirmation
        #[arg(long)]
        yes: bool,
        #[command(flatten)]
        wait: Wait,
    },
    /// Restart a machine's host
    #[command(
        after_help = "Requests a restart from the operating system. If the machine does not restart, run `svcctl power off`, \
then `svcctl power on`.\n\nExample: svcctl power reboot ada --wait"
    )]
    Reboot {
        /// A machine's id, its user's handle, or USER/SLOT
        machine: MachineTarget,
        /// Skip the confirmation
        #[arg(long)]
        yes: bool,
        #[command(flatten)]
        wait: Wait,
    },
}

#[derive(Debug, ClapArgs)]
pub struct Discard {
    /// The id of a replaced or deleted machine, its former handle, or USER/SLOT
    pub machine: MachineTarget,
    /// Delete the server even if it holds changes that are in no snapshot, or if no later machine has served traffic
    /// yet
    #[arg(long)]
    pub accept_loss: bool,
    /// Skip the confirmation
    #[arg(long)]
    pub yes: bool,
}
