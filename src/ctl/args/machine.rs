//! The arguments of the commands that are about one machine, or all.

use std::fmt;
use std::str::FromStr;

use clap::{Args as ClapArgs, Subcommand};

use super::Wait;
use crate::machine::id::MachineId;
use crate::machine::name::{Handle, IdpUserId, ImageVersion, Location, ServerType, Slot};
use crate::machine::state::Status;

/// A machine as a person names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    Id(MachineId),
    /// The one machine that is active under it.
    Handle(Handle),
    /// The machine that is active in it.
    Slot(IdpUserId, Slot),
}

impl FromStr for Target {
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

impl Target {
    /// What selects its machines in the list; an id needs no list.
    pub fn query(&self) -> Vec<(&'static str, String)> {
        match self {
            Self::Id(_) => Vec::new(),
            Self::Handle(handle) => vec![("handle", handle.to_string())],
            Self::Slot(user, slot) => vec![("idpUserId", user.to_string()), ("slot", slot.to_string())],
        }
    }

    /// The command that lists its ended machines.
    pub fn list_of_ended(&self) -> String {
        match self {
            Self::Id(_) => "`svcctl list --deleted`".to_owned(),
            Self::Handle(handle) => format!("`svcctl list --deleted --handle {handle}`"),
            Self::Slot(user, slot) => format!("`svcctl list --deleted --user {user} --slot {slot}`"),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Id(id) => id.fmt(f),
            Self::Handle(handle) => f.write_str(handle.as_str()),
            Self::Slot(user, slot) => write!(f, "{user}/{slot}"),
        }
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
    /// Which of the user's slots
    #[arg(long, default_value_t)]
    pub slot: Slot,
    /// A type of the slot's plan; else the platform's default
    #[arg(long)]
    pub server_type: Option<ServerType>,
    /// The provider's name of a location, such as nbg1; else the platform's default
    #[arg(long)]
    pub location: Option<Location>,
    /// Where to create the server when the provider has no capacity there, such as hel1,fsn1; else the platform's list
    #[arg(long, value_name = "LOCATION,…", value_delimiter = ',')]
    pub fallback_locations: Vec<Location>,
    /// A published bundle; else the platform's default
    #[arg(long)]
    pub image_version: Option<ImageVersion>,
    /// An operator's preview machine, outside of billing
    #[arg(long)]
    pub preview: bool,
    /// Go ahead where the host of a failed machine cannot make a last backup: what no snapshot holds is lost with its
    /// server
    #[arg(long)]
    pub accept_loss: bool,
    /// Start empty though a machine of the slot has served and left no snapshot: its data is given up
    #[arg(long)]
    pub allow_empty: bool,
    /// Do not ask; only --accept-loss and --allow-empty do
    #[arg(long)]
    pub yes: bool,
    #[command(flatten)]
    pub wait: Wait,
}

#[derive(Debug, ClapArgs)]
pub struct List {
    /// Only these: provisioning, running, recovering, resizing or failed
    #[arg(long)]
    pub status: Option<Status>,
    /// Only the machines of this user
    #[arg(long, value_name = "IDP_USER_ID")]
    pub user: Option<IdpUserId>,
    /// Only the machines of this slot, such as primary
    #[arg(long)]
    pub slot: Option<Slot>,
    /// Only the machines of this handle
    #[arg(long)]
    pub handle: Option<Handle>,
    /// The deleted ones instead
    #[arg(long)]
    pub deleted: bool,
    /// Machines of one page
    #[arg(long)]
    pub limit: Option<u32>,
    /// Where an earlier page ended
    #[arg(long)]
    pub cursor: Option<String>,
}

#[derive(Debug, ClapArgs)]
pub struct Recover {
    /// The user's id at the identity provider
    #[arg(value_name = "IDP_USER_ID")]
    pub user: IdpUserId,
    /// Which of the user's slots
    #[arg(long, default_value_t)]
    pub slot: Slot,
    /// Start empty when there is no snapshot; only for a new or intentionally empty user
    #[arg(long)]
    pub allow_empty: bool,
    /// Begin with this snapshot instead of the latest: its key, as `svcctl backup list` shows it
    #[arg(long, value_name = "KEY")]
    pub snapshot: Option<String>,
    /// Go ahead where the old host cannot make a last backup: what no snapshot holds is lost with its server
    #[arg(long)]
    pub accept_loss: bool,
    /// Delete the old server before the new one is created, where the provider has quota for only one. If the new
    /// machine does not start, there is no server to go back to: the snapshot is the only copy
    #[arg(long)]
    pub replace_first: bool,
    /// Another type of the slot's plan than the machine has, such as one with a larger disk
    #[arg(long)]
    pub server_type: Option<ServerType>,
    /// Another location than the machine's, such as hel1 when nbg1 has no capacity
    #[arg(long)]
    pub location: Option<Location>,
    /// Where to create the server when the provider has no capacity there, such as hel1,fsn1; else the platform's list
    #[arg(long, value_name = "LOCATION,…", value_delimiter = ',')]
    pub fallback_locations: Vec<Location>,
    /// Another published bundle than the slot runs
    #[arg(long)]
    pub image_version: Option<ImageVersion>,
    /// Do not ask
    #[arg(long)]
    pub yes: bool,
    #[command(flatten)]
    pub wait: Wait,
}

#[derive(Debug, ClapArgs)]
pub struct Resize {
    /// A machine's id, its user's handle, or USER/SLOT
    pub machine: Target,
    /// Contained in the slot's plan, with a disk that is no smaller
    #[arg(value_name = "SERVER_TYPE")]
    pub server_type: ServerType,
    /// Do not ask
    #[arg(long)]
    pub yes: bool,
    #[command(flatten)]
    pub wait: Wait,
}

#[derive(Debug, ClapArgs)]
pub struct Fail {
    /// A machine's id, its user's handle, or USER/SLOT
    pub machine: Target,
    /// Why, for whoever looks at it later
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// Do not ask
    #[arg(long)]
    pub yes: bool,
}

#[derive(Debug, ClapArgs)]
pub struct Delete {
    /// A machine's id, its user's handle, or USER/SLOT
    pub machine: Target,
    /// Delete its server as soon as the last backup is taken, instead of keeping it for `undelete`
    #[arg(long)]
    pub now: bool,
    /// Go ahead where its host cannot make a last backup: what no snapshot holds is lost with its server
    #[arg(long)]
    pub accept_loss: bool,
    /// Do not ask
    #[arg(long)]
    pub yes: bool,
    #[command(flatten)]
    pub wait: Wait,
}

#[derive(Debug, ClapArgs)]
pub struct Undelete {
    /// A machine's id, the handle that it had, or USER/SLOT
    pub machine: Target,
    #[command(flatten)]
    pub wait: Wait,
}

#[derive(Debug, ClapArgs)]
pub struct Resume {
    /// A machine's id, its user's handle, or USER/SLOT
    pub machine: Target,
}

#[derive(Debug, Subcommand)]
pub enum MachineCommand {
    /// Rotate the token by which a machine's host reaches the platform
    #[command(
        after_help = "The host gets the next token with its next heartbeat. The one before is accepted for \
UPGRADE_TOKEN_OVERLAP_SECONDS of the platform after the first heartbeat with the next one; then a copy of it is worth \
nothing. `svcctl status` shows the age. Tokens rotate by themselves each UPGRADE_TOKEN_ROTATE_SECONDS.\n\n\
Example: svcctl machine rotate-token ada"
    )]
    RotateToken {
        /// A machine's id, its user's handle, or USER/SLOT
        #[arg(required_unless_present = "all", conflicts_with = "all")]
        machine: Option<Target>,
        /// Rotate the tokens of all machines that hold their slots
        #[arg(long)]
        all: bool,
    },
}

#[derive(Debug, Subcommand)]
pub enum PowerCommand {
    /// Switch the server of a machine on and wait for its host
    #[command(after_help = "Example: svcctl power on ada --wait")]
    On {
        /// A machine's id, its user's handle, or USER/SLOT
        machine: Target,
        #[command(flatten)]
        wait: Wait,
    },
    /// Shut a machine down and keep it off until `svcctl power on`
    #[command(
        after_help = "The host is asked to shut down; its power is cut when it has not after RESIZE_SHUTDOWN_SECONDS of the \
platform. Its user gets a page that says so, no backups are taken, and the provider keeps billing the server.\n\n\
Example: svcctl power off ada --wait"
    )]
    Off {
        /// A machine's id, its user's handle, or USER/SLOT
        machine: Target,
        /// Do not ask
        #[arg(long)]
        yes: bool,
        #[command(flatten)]
        wait: Wait,
    },
    /// Restart the host of a machine
    #[command(
        after_help = "Requests a restart from the operating system. If it does not react: `svcctl power off`, then \
`svcctl power on`.\n\nExample: svcctl power reboot ada --wait"
    )]
    Reboot {
        /// A machine's id, its user's handle, or USER/SLOT
        machine: Target,
        /// Do not ask
        #[arg(long)]
        yes: bool,
        #[command(flatten)]
        wait: Wait,
    },
}

#[derive(Debug, ClapArgs)]
pub struct Discard {
    /// The id of a replaced or deleted machine, the handle that it had, or USER/SLOT
    pub machine: Target,
    /// Delete its server even where it holds what no snapshot does, or where no later machine has served yet
    #[arg(long)]
    pub accept_loss: bool,
    /// Do not ask
    #[arg(long)]
    pub yes: bool,
}
