//! The commands below `slot`, `backup` and `bundle`.

use std::fmt;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use jiff::Timestamp;

use super::{Target, Wait};
use crate::machine::name::{IdpUserId, ImageVersion, Slot};
use crate::machine::plan::Plan;
use crate::store::key::SnapshotKey;

fn plans() -> String {
    let one = |plan: Plan| format!("{plan} ({})", plan.server_types().join(", "));
    format!("What is paid for, with its server types: {}", Plan::ALL.map(one).join(", "))
}

#[derive(Debug, Subcommand)]
pub enum SlotCommand {
    /// Set the subscription of a slot
    #[command(
        after_help = "Example: svcctl slot set user_1 --plan builder --period-end 2027-01-31T00:00:00Z"
    )]
    Set {
        /// The user's id at the identity provider
        #[arg(value_name = "IDP_USER_ID")]
        user: IdpUserId,
        /// Which of the user's slots
        #[arg(long, default_value_t)]
        slot: Slot,
        #[arg(long, value_name = "starter|builder|max", help = plans())]
        plan: Plan,
        /// Whether it is paid for: only an active one is provisioned
        #[arg(long, value_enum, default_value = "active")]
        status: Subscription,
        /// End of the paid period, RFC 3339
        #[arg(long, value_name = "TIME")]
        period_end: Option<Timestamp>,
    },
    /// List the slots of a user
    #[command(after_help = "Example: svcctl slot list user_1")]
    List {
        /// The user's id at the identity provider
        #[arg(value_name = "IDP_USER_ID")]
        user: IdpUserId,
    },
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Subscription {
    Active,
    Inactive,
}

impl Subscription {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Inactive => "inactive",
        }
    }
}

#[derive(Debug, Subcommand)]
pub enum AlarmCommand {
    /// Let through what a fuse holds back
    #[command(
        after_help = "servers_missing: for an hour, machines whose servers the provider does not show fail. \
unknown_servers: the servers of this moment that no machine is known for are deleted, with their disks, each \
ORPHAN_GRACE_SECONDS of the platform after it was first seen; one that appears later is held back. Other alarms inform: \
they hold nothing back and end by themselves.\n\n\
Example: svcctl alarm release servers_missing"
    )]
    Release {
        /// Its name, as `svcctl fleet` shows it
        alarm: String,
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
}

#[derive(Debug, Subcommand)]
pub enum BackupCommand {
    /// Ask a running machine for a backup now
    #[command(after_help = "With --wait it ends when a new snapshot is verified and is the latest.\n\n\
Example: svcctl backup now ada --wait")]
    Now {
        /// A machine's id, its user's handle, or USER/SLOT
        machine: Target,
        #[command(flatten)]
        wait: Wait,
    },
    /// Ask a running machine to restore its latest snapshot on trial
    #[command(
        after_help = "It goes into a database of its own, is compared with its record, and dropped. Machines do it \
weekly by themselves. With --wait it ends when the machine has told how it went; exits 65 where the snapshot did not \
become what it was.\n\nExample: svcctl backup drill ada --wait"
    )]
    Drill {
        /// A machine's id, its user's handle, or USER/SLOT
        machine: Target,
        #[command(flatten)]
        wait: Wait,
    },
    /// Make the snapshot that a machine holds back the latest
    #[command(
        after_help = "A snapshot whose database has shrunk much is held back: `svcctl status` says what is missing. Accept it \
where that is meant. Else recover with an earlier one: `svcctl recover USER --snapshot KEY`.\n\n\
Example: svcctl backup accept ada"
    )]
    Accept {
        /// A machine's id, the handle of its user, or USER/SLOT; while a machine is being replaced, its slot stands for it
        machine: Target,
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
    /// List the verified snapshots of a machine's slot, the newest first
    #[command(after_help = "Example: svcctl backup list ada --limit 5")]
    List {
        /// A machine's id, its user's handle, or USER/SLOT
        machine: Target,
        /// Snapshots per page, 1 to 200 (default 50)
        #[arg(long)]
        limit: Option<u32>,
        /// Where an earlier page ended
        #[arg(long)]
        cursor: Option<String>,
    },
    /// Download a snapshot, for `pg_restore`
    #[command(after_help = "Its SHA-256 is checked. What an interrupted download left is gone on with.\n\n\
Example: svcctl backup download ada 2026-01-02T03-04-05.678Z-1.dump --output ada.dump")]
    Download {
        /// A machine's id, its user's handle, or USER/SLOT
        machine: Target,
        /// Its key, or the last part of that; without it, the latest
        #[arg(value_name = "SNAPSHOT")]
        key: Option<String>,
        /// The file to write; without it, the last part of the key, here
        #[arg(long, short)]
        output: Option<PathBuf>,
    },
    /// Read a snapshot in full and compare it with its record
    #[command(
        after_help = "It comes here for that, and stays nowhere: a recovery would get these bytes.\n\n\
Example: svcctl backup verify ada"
    )]
    Verify {
        /// A machine's id, its user's handle, or USER/SLOT
        machine: Target,
        /// Its key, or the last part of that; without it, the latest
        #[arg(value_name = "SNAPSHOT")]
        key: Option<String>,
    },
}

/// A slot as a person names it.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct SlotTarget {
    /// The user's id at the identity provider
    #[arg(value_name = "IDP_USER_ID")]
    pub user: IdpUserId,
    /// Which of the user's slots
    #[arg(long, default_value_t)]
    pub slot: Slot,
}

impl SlotTarget {
    /// As a command takes it.
    pub fn arguments(&self) -> String {
        slot_arguments(self.user.as_str(), self.slot.as_str())
    }
}

/// A user, and the slot where it is not the primary one, as a command takes them.
pub fn slot_arguments(user: &str, slot: &str) -> String {
    if slot == Slot::primary().as_str() { user.to_owned() } else { format!("{user} --slot {slot}") }
}

impl fmt::Display for SlotTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.user, self.slot)
    }
}

#[derive(Debug, Subcommand)]
pub enum PointerCommand {
    /// Show what the pointer names, whether that can be restored, and what a rebuild would name
    #[command(after_help = "Example: svcctl pointer show user_1 --slot second")]
    Show {
        #[command(flatten)]
        slot: SlotTarget,
    },
    /// Write the pointer again, from the records of the slot's snapshots
    #[command(
        after_help = "For a pointer that was lost, is unreadable, or names a snapshot that is not whole. It never \
lowers the fence of a replaced machine. What was unreadable is kept in the audit.\n\n\
Example: svcctl pointer rebuild user_1"
    )]
    Rebuild {
        #[command(flatten)]
        slot: SlotTarget,
        /// The snapshot to name; else the newest whole one of the highest epoch
        #[arg(long, value_name = "KEY")]
        to: Option<SnapshotKey>,
        /// Name no snapshot: a recovery with --allow-empty then starts without any. Nothing is deleted
        #[arg(long, conflicts_with = "to")]
        empty: bool,
        /// Replace a pointer that is sound, or with --empty, leave out snapshots that are whole
        #[arg(long)]
        force: bool,
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
}

#[derive(Debug, Subcommand)]
pub enum BundleCommand {
    /// Publish a built bundle to the object store
    #[command(after_help = "A published version never changes.\n\n\
Example: svcctl bundle publish ./out --image-version 2026.11.1")]
    Publish {
        /// Directory with svc-host-bundle.tar.gz and its .sha256
        dir: PathBuf,
        /// The version to publish it under: the one that it was built with
        #[arg(long)]
        image_version: ImageVersion,
    },
    /// List what is published, the newest first
    #[command(after_help = "Example: svcctl bundle list")]
    List,
    /// Show which machines trust which keys of releases
    #[command(
        after_help = "A new key can sign once no machine is listed as not trusting it; an old one is gone once no machine \
trusts it. A machine reports its keys with its heartbeats.\n\n\
Example: svcctl bundle keys"
    )]
    Keys,
}
