//! Subcommands of `svcctl slot`, `alarm`, `backup`, `files`, `pointer` and `bundle`.

use std::fmt;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use jiff::Timestamp;

use super::{MachineTarget, Wait};
use svc_machine::name::{IdpUserId, ImageVersion, Slot};
use svc_machine::plan::Plan;
use svc_store::key::SnapshotKey;

fn plan_help() -> String {
    let describe = |plan: Plan| format!("{plan} ({})", plan.server_types().join(", "));
    format!(
        "The plan, with its server types: {}",
        Plan::ALL.iter().copied().map(describe).collect::<Vec<_>>().join(", ")
    )
}

#[derive(Debug, Subcommand)]
pub enum SlotCommand {
    /// Set a slot's subscription
    #[command(
        after_help = "Example: svcctl slot set user_1 --plan builder --period-end 2027-01-31T00:00:00Z"
    )]
    Set {
        /// The user's id at the identity provider
        #[arg(value_name = "IDP_USER_ID")]
        user: IdpUserId,
        /// The user's slot
        #[arg(long, default_value_t)]
        slot: Slot,
        #[arg(long, value_name = "starter|builder|max", help = plan_help())]
        plan: Plan,
        /// State of the subscription; only an active slot can be provisioned
        #[arg(long, value_enum, default_value = "active")]
        status: SubscriptionStatus,
        /// End of the paid period, RFC 3339
        #[arg(long, value_name = "TIME")]
        period_end: Option<Timestamp>,
        /// Mark the slot as a test slot, or with `--test=false` as a customer's. Recoveries and rollbacks of a test
        /// slot count as exercises (default: unchanged)
        #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        test: Option<bool>,
    },
    /// List a user's slots
    #[command(after_help = "Example: svcctl slot list user_1")]
    List {
        /// The user's id at the identity provider
        #[arg(value_name = "IDP_USER_ID")]
        user: IdpUserId,
        /// Cursor from the previous page
        #[arg(long)]
        cursor: Option<String>,
    },
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum SubscriptionStatus {
    Active,
    Inactive,
}

impl SubscriptionStatus {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Inactive => "inactive",
        }
    }
}

#[derive(Debug, Subcommand)]
pub enum AlarmCommand {
    /// Release an alarm, which allows the work that it blocks
    #[command(
        after_help = "servers_missing: for one hour, machines whose servers are missing at the provider are marked as failed. \
unknown_servers: each server that currently belongs to no machine is deleted, with its disk, once the platform's \
ORPHAN_GRACE_SECONDS have passed since it was first seen; the deletion of servers that appear later stays blocked. Other alarms \
cannot be released: docs/operating/on-call.md describes when each of them ends.\n\n\
Example: svcctl alarm release servers_missing"
    )]
    Release {
        /// Name of the alarm, as shown by `svcctl fleet`
        alarm: String,
        /// Skip the confirmation
        #[arg(long)]
        yes: bool,
    },
}

#[derive(Debug, Subcommand)]
pub enum BackupCommand {
    /// Request a backup from a running machine now
    #[command(after_help = "--wait waits until a new snapshot is verified and is the latest.\n\n\
Example: svcctl backup now ada --wait")]
    Now {
        /// A machine's id, its user's handle, or USER/SLOT
        machine: MachineTarget,
        #[command(flatten)]
        wait: Wait,
    },
    /// Request a restore drill: a running machine restores its latest snapshot as a test
    #[command(
        after_help = "The snapshot is restored into a separate database, compared with its sidecar, and dropped. Machines \
do this automatically every week. --wait waits until the machine has reported the result, and exits 65 if the restored \
database does not match the sidecar.\n\nExample: svcctl backup drill ada --wait"
    )]
    Drill {
        /// A machine's id, its user's handle, or USER/SLOT
        machine: MachineTarget,
        #[command(flatten)]
        wait: Wait,
    },
    /// Accept a machine's held-back snapshot as the latest
    #[command(
        after_help = "A snapshot is held back if the database has lost at least half of its rows, or a table that had rows: \
`svcctl status` shows what is missing. Accept it if the data was deleted on purpose. Otherwise, recover from an earlier \
one: `svcctl recover USER --snapshot KEY`.\n\n\
Example: svcctl backup accept ada"
    )]
    Accept {
        /// A machine's id, its user's handle, or USER/SLOT. If this machine is replacing another one, the old machine's
        /// snapshot is accepted
        machine: MachineTarget,
        /// Skip the confirmation
        #[arg(long)]
        yes: bool,
    },
    /// List the verified snapshots of a machine's slot, newest first
    #[command(after_help = "Example: svcctl backup list ada --limit 5")]
    List {
        /// A machine's id, its user's handle, or USER/SLOT
        machine: MachineTarget,
        /// Snapshots per page, 1 to 200 (default: 50)
        #[arg(long)]
        limit: Option<u32>,
        /// Cursor from the previous page
        #[arg(long)]
        cursor: Option<String>,
    },
    /// Download a snapshot, for `pg_restore`
    #[command(after_help = "Verifies the SHA-256, and resumes interrupted downloads.\n\n\
Example: svcctl backup download ada 2026-01-02T03-04-05.678Z-1.dump --output ada.dump")]
    Download {
        /// A machine's id, its user's handle, or USER/SLOT
        machine: MachineTarget,
        /// The snapshot's key, or the last part of it (default: the latest)
        #[arg(value_name = "SNAPSHOT")]
        key: Option<String>,
        /// The file to write (default: the last part of the key, in the current directory)
        #[arg(long, short)]
        output: Option<PathBuf>,
    },
    /// Download a whole snapshot and compare it with its sidecar
    #[command(
        after_help = "The command downloads the bytes that a recovery would restore, and does not store them.\n\n\
Example: svcctl backup verify ada"
    )]
    Verify {
        /// A machine's id, its user's handle, or USER/SLOT
        machine: MachineTarget,
        /// The snapshot's key, or the last part of it (default: the latest)
        #[arg(value_name = "SNAPSHOT")]
        key: Option<String>,
    },
}

/// An operator-specified slot.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct SlotTarget {
    /// The user's id at the identity provider
    #[arg(value_name = "IDP_USER_ID")]
    pub user: IdpUserId,
    /// The user's slot
    #[arg(long, default_value_t)]
    pub slot: Slot,
}

impl SlotTarget {
    /// Formats the slot as command-line arguments.
    pub fn arguments(&self) -> String {
        slot_arguments(self.user.as_str(), self.slot.as_str())
    }
}

/// Formats the user, plus the slot unless it's the primary one, as command-line arguments.
pub fn slot_arguments(user: &str, slot: &str) -> String {
    if slot == Slot::primary().as_str() { user.to_owned() } else { format!("{user} --slot {slot}") }
}

impl fmt::Display for SlotTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.user, self.slot)
    }
}

#[derive(Debug, Subcommand)]
pub enum FilesCommand {
    /// Show the location and the password of a slot's file backups, for `restic`
    #[command(
        after_help = "The password opens all of the owner's files, so the command needs the `admin` scope and is recorded in \
the audit log. `restic` also needs credentials for the object store in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.\n\n\
Example: svcctl files key user_1"
    )]
    Key {
        #[command(flatten)]
        slot: SlotTarget,
    },
    /// Show what a machine's file backup has saved, what it excludes, and what its checks have found
    #[command(
        after_help = "The paths are the owner's data, so the request is recorded in the audit log.\n\n\
Example: svcctl files status ada"
    )]
    Status {
        /// A machine's id, its user's handle, or USER/SLOT
        machine: MachineTarget,
    },
    /// List the saved versions of an owner's file or directory
    #[command(
        after_help = "Relative paths start at /home/svc/home. The host reads its slot's file backup, and the request is \
recorded in the audit log.\n\nExample: svcctl files versions ada projects/app/main.rs"
    )]
    Versions {
        /// A machine's id, its user's handle, or USER/SLOT
        machine: MachineTarget,
        /// A path below /home/svc; relative paths start at /home/svc/home
        path: String,
        /// Only versions before this time (RFC 3339)
        #[arg(long)]
        before: Option<Timestamp>,
        /// Maximum number of versions
        #[arg(long, default_value_t = 50)]
        limit: u32,
    },
    /// List an owner's directory as it was saved
    #[command(
        after_help = "Names and sizes are shown, but no content. The request is recorded in the audit log.\n\n\
Example: svcctl files list ada projects --time 2026-11-27T18:00:00Z"
    )]
    List {
        /// A machine's id, its user's handle, or USER/SLOT
        machine: MachineTarget,
        /// A path below /home/svc; relative paths start at /home/svc/home
        #[arg(default_value = "/home/svc/home")]
        path: String,
        /// Use the last snapshot at or before this time, in RFC 3339 format (default: the latest snapshot)
        #[arg(long)]
        time: Option<Timestamp>,
    },
    /// Restore an earlier version of a file or directory on the running machine
    #[command(
        after_help = "The entry is restored to its original path or, if that path exists, next to it under a new name. With --replace, \
an existing file or directory is saved first and kept under another name. Nothing is deleted.\n\n\
Example: svcctl files restore ada projects/app --time 2026-11-27T18:00:00Z"
    )]
    Restore {
        /// A machine's id, its user's handle, or USER/SLOT
        machine: MachineTarget,
        /// A path below /home/svc; relative paths start at /home/svc/home
        path: String,
        /// Use the last snapshot at or before this time, in RFC 3339 format (default: the latest snapshot)
        #[arg(long)]
        time: Option<Timestamp>,
        /// Restore to this path, which must not exist
        #[arg(long)]
        into: Option<String>,
        /// Replace an existing file or directory
        #[arg(long)]
        replace: bool,
        /// Do not wait for the restore to end
        #[arg(long)]
        no_wait: bool,
    },
    /// Verify part of a machine's file backup now, instead of with the next daily run
    #[command(
        after_help = "The host rereads the part that was verified longest ago, and all parts with damaged packs. The `files` \
row of `svcctl status` shows the result.\n\nExample: svcctl files verify ada"
    )]
    Verify {
        /// A machine's id, its user's handle, or USER/SLOT
        machine: MachineTarget,
    },
    /// Show how much storage a slot's file backups use
    #[command(after_help = "Example: svcctl files usage user_1")]
    Usage {
        #[command(flatten)]
        slot: SlotTarget,
    },
    /// Prune a slot's file backups now, instead of with the next daily prune
    #[command(
        after_help = "Expired snapshots are removed; data that no remaining snapshot needs is deleted three days later. The \
latest snapshot is always kept.\n\nExample: svcctl files prune user_1 --dry-run"
    )]
    Prune {
        #[command(flatten)]
        slot: SlotTarget,
        /// Show what would be removed
        #[arg(long)]
        dry_run: bool,
    },
}

#[derive(Debug, Subcommand)]
pub enum PointerCommand {
    /// Show the pointer's snapshot, whether it can be restored, and the snapshot that a rebuild would choose
    #[command(after_help = "Example: svcctl pointer show user_1 --slot second")]
    Show {
        #[command(flatten)]
        slot: SlotTarget,
    },
    /// Rebuild the pointer from the sidecars of the slot's snapshots
    #[command(
        after_help = "Use this for a pointer that is missing or unreadable, or that refers to an incomplete snapshot. A rebuild \
never lowers the fence of a replaced machine. An unreadable pointer is kept in the audit log.\n\n\
Example: svcctl pointer rebuild user_1"
    )]
    Rebuild {
        #[command(flatten)]
        slot: SlotTarget,
        /// The snapshot to point to (default: the newest complete one with the highest epoch)
        #[arg(long, value_name = "KEY")]
        to: Option<SnapshotKey>,
        /// Point to no snapshot: a recovery with --allow-empty then starts with an empty database. Nothing is deleted
        #[arg(long, conflicts_with = "to")]
        empty: bool,
        /// Replace a valid pointer or, with --empty, ignore complete snapshots
        #[arg(long)]
        force: bool,
        /// Skip the confirmation
        #[arg(long)]
        yes: bool,
    },
}

#[derive(Debug, Subcommand)]
pub enum BundleCommand {
    /// Publish a built bundle to the object store
    #[command(
        after_help = "The archive of a published version never changes. Publish it again to add or replace its \
signed manifest.\n\n\
Example: svcctl bundle publish ./out --image-version 2026.11.1"
    )]
    Publish {
        /// Directory with svc-host-bundle.tar.gz and its .sha256
        dir: PathBuf,
        /// The version that the bundle was built with
        #[arg(long)]
        image_version: ImageVersion,
    },
    /// List the published bundles, newest first
    #[command(after_help = "Example: svcctl bundle list")]
    List,
    /// Show which machines trust which release keys
    #[command(
        after_help = "Sign with a new key only once its row lists no machine under NOT TRUSTED BY. The rotation is complete \
once no machine trusts the old key. Machines report their keys with their heartbeats.\n\n\
Example: svcctl bundle keys"
    )]
    Keys,
}
