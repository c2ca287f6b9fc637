//! The command line of `svcctl`. Secrets have no place here: a process's arguments are visible to everyone.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};
use jiff::Timestamp;
use url::Url;

use crate::applet;
use crate::machine::id::{MachineId, OperationId};
use crate::machine::name::{Handle, IdpUserId, ImageVersion, Location, ServerType, Slot};
use crate::machine::plan::Plan;
use crate::machine::state::Status;

/// How long `--wait` without a number waits: a registration token's life, and what comes around it.
const WAIT_SECONDS: &str = "2400";

#[derive(Debug, Parser)]
#[command(
    name = "svcctl",
    version = applet::VERSION,
    about = "Operates the platform: slots, machines, recovery, bundles",
    after_help = "The platform's secret comes from PLATFORM_SECRET or --secret-file. `bundle publish` takes the object \
store from OBJECT_STORE_URL, OBJECT_STORE_ENDPOINT and AWS_*.\n\nExit codes: 0 done, 64 usage, 65 refused, 69 unavailable \
or operation failed, 70 internal, 75 try again, 77 permission, 78 configuration."
)]
pub struct Args {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, ClapArgs)]
pub struct Global {
    /// Base URL of the platform; else PLATFORM_PUBLIC_URL
    #[arg(long, global = true, value_name = "URL")]
    pub platform_url: Option<Url>,
    /// File with the platform's secret; else PLATFORM_SECRET
    #[arg(long, global = true, value_name = "FILE")]
    pub secret_file: Option<PathBuf>,
    /// Print the API's JSON instead of text
    #[arg(long, global = true)]
    pub json: bool,
    /// Seconds that one call to the platform may take
    #[arg(long, global = true, value_name = "SECONDS", default_value = "30",
          value_parser = clap::value_parser!(u64).range(1..=600))]
    pub timeout: u64,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Subscriptions of runtime slots
    #[command(subcommand)]
    Slot(SlotCommand),
    /// Create the machine of a slot
    Provision(Provision),
    /// List machines
    List(List),
    /// Show one machine and its operations
    Status {
        #[arg(value_name = "MACHINE_ID")]
        machine: MachineId,
    },
    /// Replace the machine of a slot, restoring its latest snapshot
    Recover(Recover),
    /// Delete a machine and its server; its objects in the store stay
    Delete(Delete),
    /// Host bundles
    #[command(subcommand)]
    Bundle(BundleCommand),
    /// Show one operation, step by step
    Operation {
        #[arg(value_name = "OPERATION_ID")]
        operation: OperationId,
        #[command(flatten)]
        wait: Wait,
    },
}

#[derive(Debug, Subcommand)]
pub enum SlotCommand {
    /// Set the subscription of a slot
    Set {
        #[arg(value_name = "IDP_USER_ID")]
        user: IdpUserId,
        #[arg(long, default_value_t)]
        slot: Slot,
        #[arg(long, value_name = "starter|builder|max")]
        plan: Plan,
        #[arg(long, value_enum, default_value = "active")]
        status: Subscription,
        /// End of the paid period, RFC 3339
        #[arg(long, value_name = "TIME")]
        period_end: Option<Timestamp>,
    },
    /// List the slots of a user
    List {
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

/// Waiting for the end of what was started.
#[derive(Debug, Clone, Copy, ClapArgs)]
pub struct Wait {
    /// Wait until it has ended, at most so many seconds; steps go to stderr
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = WAIT_SECONDS,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub wait: Option<u64>,
}

#[derive(Debug, ClapArgs)]
pub struct Provision {
    #[arg(value_name = "IDP_USER_ID")]
    pub user: IdpUserId,
    #[arg(long)]
    pub handle: Handle,
    #[arg(long, default_value_t)]
    pub slot: Slot,
    #[arg(long)]
    pub server_type: Option<ServerType>,
    #[arg(long)]
    pub location: Option<Location>,
    #[arg(long)]
    pub image_version: Option<ImageVersion>,
    /// An operator's preview machine, outside of billing
    #[arg(long)]
    pub preview: bool,
    #[command(flatten)]
    pub wait: Wait,
}

#[derive(Debug, ClapArgs)]
pub struct List {
    #[arg(long)]
    pub status: Option<Status>,
    #[arg(long, value_name = "IDP_USER_ID")]
    pub user: Option<IdpUserId>,
    #[arg(long)]
    pub slot: Option<Slot>,
    #[arg(long)]
    pub handle: Option<Handle>,
    /// The deleted ones instead
    #[arg(long)]
    pub deleted: bool,
    #[arg(long)]
    pub limit: Option<u32>,
    /// Where an earlier page ended
    #[arg(long)]
    pub cursor: Option<String>,
}

#[derive(Debug, ClapArgs)]
pub struct Recover {
    #[arg(value_name = "IDP_USER_ID")]
    pub user: IdpUserId,
    #[arg(long, default_value_t)]
    pub slot: Slot,
    /// Start empty when there is no snapshot; only for a new or intentionally empty user
    #[arg(long)]
    pub allow_empty: bool,
    /// Go on only if this is the latest snapshot, e.g. one that was looked at before
    #[arg(long, value_name = "KEY")]
    pub snapshot: Option<String>,
    /// Do not ask
    #[arg(long)]
    pub yes: bool,
    #[command(flatten)]
    pub wait: Wait,
}

#[derive(Debug, ClapArgs)]
pub struct Delete {
    #[arg(value_name = "MACHINE_ID")]
    pub machine: MachineId,
    /// Do not ask
    #[arg(long)]
    pub yes: bool,
    #[command(flatten)]
    pub wait: Wait,
}

#[derive(Debug, Subcommand)]
pub enum BundleCommand {
    /// Publish a built bundle to the object store
    Publish {
        /// Directory with svc-host-bundle.tar.gz and its .sha256
        dir: PathBuf,
        #[arg(long)]
        image_version: ImageVersion,
    },
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Args::command().debug_assert();
    }

    #[test]
    fn wait_takes_a_number_only_with_an_equals_sign() {
        let parse = |words: &[&str]| Args::try_parse_from(words).map(|args| args.command);
        let id = MachineId::new().to_string();
        for (word, expected) in [("--wait", Some(2400)), ("--wait=5", Some(5)), ("--yes", None)] {
            let Ok(Command::Delete(delete)) = parse(&["svcctl", "delete", &id, word]) else {
                panic!("{word} parses")
            };
            assert_eq!(delete.wait.wait, expected);
        }
        assert!(parse(&["svcctl", "delete", &id, "--wait", "5"]).is_err());
    }
}
