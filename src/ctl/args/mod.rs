//! The `svcctl` command line. Secrets are never passed as arguments, which are visible to every user.
//!
//! The commands and global options are defined here, and each command group's arguments in a submodule.

mod deploy;
mod diagnostics;
mod machine;
mod operation;
mod operator;
#[cfg(test)]
mod quoted_command_tests;
mod resource;
mod usage;

use std::path::PathBuf;

use clap::{Args as ClapArgs, Parser, Subcommand};
use clap_complete::Shell;
use url::Url;

pub use self::deploy::{DeployCommand, RolloutTarget, StartRollout};
pub use self::diagnostics::{Doctor, Subject, VerifyRollout};
pub use self::machine::{
    CostLimit, Delete, Discard, Fail, List, MachineCommand, MachineTarget, PowerCommand, Provision, Recover,
    Resize, Resume, Undelete,
};
pub use self::operation::{Operation, OperationCommand};
pub use self::operator::{Audit, OperatorCommand, TokenOptions};
pub use self::resource::{
    AlarmCommand, BackupCommand, BundleCommand, FilesCommand, PointerCommand, SlotCommand, SlotTarget,
    slot_arguments,
};
pub use self::usage::Usage;
use svc_base::applet;

/// Default for `--wait`. Longer than the default registration timeout (`REGISTRATION_TTL_SECONDS`).
const DEFAULT_WAIT_SECONDS: &str = "2400";

const ENVIRONMENT_HELP: &str = "The platform's URL is read from PLATFORM_PUBLIC_URL or --platform-url; the platform's secret or an \
operator's token from PLATFORM_SECRET or --secret-file. `bundle publish` and `bundle list` take the object store from \
OBJECT_STORE_URL, OBJECT_STORE_ENDPOINT and AWS_*. Output is colored only on a terminal, and only if NO_COLOR is not set.

Exit codes: 0 done, 64 usage, 65 refused, 69 unavailable or operation failed, 70 internal, 75 try again, 77 permission, \
78 configuration.

A first machine:
  svcctl bundle publish DIR --image-version V
  svcctl slot set user_1 --plan starter
  svcctl provision user_1 --handle ada --wait
  svcctl status ada";

const KEY_ROTATION_HELP: &str =
    "Hosts install a release only if its manifest is signed with a key that they trust. To rotate that key \
(K_OLD and K_NEW are the public keys in base64):

1. Add the new key. Set the platform's BUNDLE_PUBLIC_KEYS to K_OLD,K_NEW and BUNDLE_KEYS_SEQUENCE to 1,
   and roll out a release that is signed with the old key and contains both:
     cargo xtask bundle … --signing-key OLD.pem --trust-keys K_OLD,K_NEW --keys-sequence 1
   A host trusts both once it runs that release and is healthy. Continue when `svcctl bundle keys`
   lists no machine without the new key.
2. Sign with the new key from now on, and include both keys in each release:
     cargo xtask bundle … --signing-key NEW.pem --trust-keys K_OLD,K_NEW --keys-sequence 1
3. Drop the old key. Roll out a release that is signed with the new key and contains only that key,
   with a higher sequence; then set BUNDLE_PUBLIC_KEYS to K_NEW and BUNDLE_KEYS_SEQUENCE to 2:
     cargo xtask bundle … --signing-key NEW.pem --trust-keys K_NEW --keys-sequence 2

A machine that was off during the rotation needs a release signed with both keys (--signing-key twice).

Example: svcctl bundle publish ./out --image-version 2026.11.1";

#[derive(Debug, Parser)]
#[command(
    name = "svcctl",
    version = applet::version(),
    about = "Operates the platform: slots, machines, recovery, backups, bundles",
    after_help = ENVIRONMENT_HELP,
    max_term_width = 110
)]
pub struct Args {
    #[command(flatten)]
    pub global: GlobalOptions,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, ClapArgs)]
pub struct GlobalOptions {
    /// Base URL of the platform; overrides PLATFORM_PUBLIC_URL
    #[arg(long, global = true, value_name = "URL", help_heading = "Global options")]
    pub platform_url: Option<Url>,
    /// File with the platform's secret or an operator's token; overrides PLATFORM_SECRET
    #[arg(long, global = true, value_name = "FILE", help_heading = "Global options")]
    pub secret_file: Option<PathBuf>,
    /// Print the API's JSON instead of text; errors are JSON on stderr
    #[arg(long, global = true, help_heading = "Global options")]
    pub json: bool,
    /// Timeout of one call to the platform, in seconds
    #[arg(long, global = true, value_name = "SECONDS", default_value = "30", help_heading = "Global options",
          value_parser = clap::value_parser!(u64).range(1..=600))]
    pub timeout: u64,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Manage slot subscriptions
    #[command(subcommand, after_help = "Example: svcctl slot set user_1 --plan starter")]
    Slot(SlotCommand),
    /// Create a slot's machine
    #[command(after_help = "Example: svcctl provision user_1 --handle ada --wait")]
    Provision(Provision),
    /// List machines
    #[command(after_help = "Example: svcctl list --status failed")]
    List(List),
    /// Show one machine: its boot progress, the copies of its data, and its operations
    #[command(after_help = "Example: svcctl status ada")]
    Status {
        /// A machine's id, its user's handle, or USER/SLOT
        machine: MachineTarget,
    },
    /// Show totals, the age of backups, and the machines that need attention
    #[command(after_help = "Example: svcctl fleet --json | jq -r '.attention[].handle'")]
    Fleet,
    /// Manage the fleet-wide alarms that `svcctl fleet` lists
    #[command(subcommand, after_help = "Example: svcctl alarm release servers_missing")]
    Alarm(AlarmCommand),
    /// Replace a slot's machine, restoring its latest snapshot
    #[command(
        after_help = "The old host stops its writers and takes a final backup. Its server is powered off, and kept for at least \
the platform's PREDECESSOR_KEEP_SECONDS after the new machine's first healthy heartbeat, unless you choose \
--replace-first. If the recovery fails, the old machine serves again. If the old host responds but cannot take the backup, \
the operation waits for your decision. To undo a recovery before its new machine has registered, run \
`svcctl operation abandon OPERATION_ID`.\n\n\
Example: svcctl recover user_1 --server-type cpx32 --location hel1 --wait"
    )]
    Recover(Recover),
    /// Change the server type of a running machine; it is down for a few minutes and keeps its disk
    #[command(after_help = "Example: svcctl resize ada cpx32 --wait")]
    Resize(Resize),
    /// Manage machine credentials
    #[command(subcommand, after_help = "Example: svcctl machine rotate-token ada")]
    Machine(MachineCommand),
    /// Power a machine's server off or on, or restart it
    #[command(
        subcommand,
        after_help = "A machine that is off keeps its slot and its data. Only an operator can power it on again.\n\n\
Example: svcctl power reboot ada --wait"
    )]
    Power(PowerCommand),
    /// Take a machine out of service; its server stays until the machine is recovered, reprovisioned or deleted
    #[command(
        after_help = "The machine keeps its slot, and its server stays on with all data. `svcctl resume` puts it back into \
service if its host is healthy. A machine that has never served traffic is abandoned, and its predecessor gets the slot \
back.\n\nExample: svcctl fail ada --reason 'disk errors'"
    )]
    Fail(Fail),
    /// Delete a machine after a final backup; its server is kept for a grace period, and its snapshots stay
    #[command(
        after_help = "If the host responds but cannot take the final backup, the deletion waits for your decision. The server \
is powered off and kept for the platform's DELETE_GRACE_SECONDS; during that time, `svcctl undelete` restores the \
machine.\n\n\
Example: svcctl delete ada --wait"
    )]
    Delete(Delete),
    /// Restore a deleted machine while its server is kept
    #[command(
        after_help = "This fails while another machine holds the slot, or if a later machine in the slot has served \
traffic.\n\nExample: svcctl undelete ada --wait"
    )]
    Undelete(Undelete),
    /// Put a failed machine back into service; its server must be running and its host healthy
    #[command(
        after_help = "Undoes a mistaken `svcctl fail`. The machine keeps its slot, its server and its data; nothing is \
restored.\n\nExample: svcctl resume ada"
    )]
    Resume(Resume),
    /// Delete the kept server of a replaced or deleted machine early
    #[command(
        after_help = "A server with changes that are in no snapshot is deleted only with --accept-loss.\n\n\
Example: svcctl discard 019a0000-0000-7000-8000-000000000001"
    )]
    Discard(Discard),
    /// Take, list, download and verify backups of a machine's slot
    #[command(subcommand, after_help = "Example: svcctl backup now ada --wait")]
    Backup(BackupCommand),
    /// Show, restore, verify and prune backups of files
    #[command(subcommand, after_help = "Example: svcctl files key user_1")]
    Files(FilesCommand),
    /// Show or rebuild the pointer to a slot's latest snapshot
    #[command(subcommand, after_help = "Example: svcctl pointer show user_1")]
    Pointer(PointerCommand),
    /// Publish and list host bundles
    #[command(subcommand, after_help = KEY_ROTATION_HELP)]
    Bundle(BundleCommand),
    /// Roll out releases to many machines
    #[command(
        subcommand,
        after_help = "`deploy start` and `deploy list` show a rollout's id. Only one rollout is open at a time; it is the \
default.\n\nExample: svcctl deploy start 2026.11.2 --wait"
    )]
    Deploy(DeployCommand),
    /// Show an operation, answer its question, or abandon it
    #[command(after_help = "An operation that would lose data waits until an operator decides.\n\n\
Example: svcctl operation show 019a0000-0000-7000-8000-000000000002 --wait")]
    Operation(Operation),
    /// Manage named operators: their scopes and tokens
    #[command(
        subcommand,
        after_help = "PLATFORM_SECRET has every scope and belongs to no operator.\n\n\
Example: svcctl operator add ada --scope read,operate --token-file ada.token"
    )]
    Operator(OperatorCommand),
    /// Show the cost of a machine's dispatches
    #[command(
        after_help = "Requires the `billing` scope. Without the `read` scope, name the machine by its id. The audit log records \
who read the cost, and for which days.\n\nExample: svcctl usage ada --from 2026-11-01 --to 2026-11-30 --by model"
    )]
    Usage(Usage),
    /// Show who changed what, and who read an owner's data
    #[command(after_help = "Example: svcctl audit --actor ada --since 24h")]
    Audit(Audit),
    /// Diagnose this host or platform, and suggest what to do
    #[command(
        after_help = "On a host, run it as root. It prints no secrets, and changes nothing, except that \
`doctor platform` writes objects to the store and deletes them. Exits 65 if there is a problem.\n\n\
Example: svcctl doctor --json | jq -r '.findings[] | select(.level != \"ok\") | .what'"
    )]
    Doctor(Doctor),
    /// Verify a release on a running host before rolling it out: shell, gateway, bridge, icons
    #[command(
        after_help = "On a host, the command connects to the gateway's trusted socket; from outside, it connects through the \
router with the owner's session. Exits 65 if there is a problem.\n\n\
Example: svcctl verify-rollout --app-url https://app.example.com"
    )]
    VerifyRollout(VerifyRollout),
    /// Print a shell completion script
    #[command(
        after_help = "Example: svcctl completions bash >~/.local/share/bash-completion/completions/svcctl"
    )]
    Completions {
        /// Shell to generate the script for
        shell: Shell,
    },
}

/// Whether to wait for a command's result.
#[derive(Debug, Clone, Copy, ClapArgs)]
pub struct Wait {
    /// Wait for the result, at most SECONDS (default: 40 minutes); progress goes to stderr
    #[arg(long = "wait", value_name = "SECONDS", num_args = 0..=1, require_equals = true,
          default_missing_value = DEFAULT_WAIT_SECONDS,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub seconds: Option<u64>,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use svc_machine::id::MachineId;

    #[test]
    fn command_line_is_well_formed() {
        Args::command().debug_assert();
    }

    #[test]
    fn wait_requires_equals_sign_before_value() {
        let parse = |arguments: &[&str]| Args::try_parse_from(arguments).map(|args| args.command);
        let id = MachineId::new().to_string();
        for (option, expected) in [("--wait", Some(2400)), ("--wait=5", Some(5)), ("--yes", None)] {
            let Ok(Command::Delete(delete)) = parse(&["svcctl", "delete", &id, option]) else {
                panic!("{option} does not parse")
            };
            assert_eq!(delete.wait.seconds, expected);
        }
        assert!(parse(&["svcctl", "delete", &id, "--wait", "5"]).is_err());
    }

    #[test]
    fn target_parses_id_handle_and_slot() {
        let id = MachineId::new();
        assert_eq!(id.to_string().parse::<MachineTarget>().unwrap(), MachineTarget::Id(id));
        assert!(matches!("ada".parse::<MachineTarget>().unwrap(), MachineTarget::Handle(_)));
        let slot = |text: &str| match text.parse().unwrap() {
            MachineTarget::Slot(user, slot) => format!("{user} {slot}"),
            other => panic!("{other:?}"),
        };
        assert_eq!(
            (slot("user_1/second"), slot("ada/primary")),
            ("user_1 second".into(), "ada primary".into())
        );
        assert_eq!(slot("user_1"), "user_1 primary", "an underscore is not allowed in a handle");
        for invalid in ["no such thing", "user_1/", "user_1/a/b", "/primary"] {
            assert!(invalid.parse::<MachineTarget>().is_err(), "{invalid}");
        }
    }

    #[test]
    fn help_of_all_commands_matches_snapshot() {
        let mut texts = String::new();
        let mut root = Args::command();
        root.build();
        append_help(&root, &mut texts);
        insta::assert_snapshot!("help", texts);
    }

    fn append_help(command: &clap::Command, texts: &mut String) {
        let mut wide_command = command.clone().term_width(110);
        texts.push_str(&format!(
            "$ {} --help\n{}\n",
            command.get_bin_name().unwrap_or("svcctl"),
            wide_command.render_long_help()
        ));
        for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
            append_help(sub, texts);
        }
    }

    fn visit_commands(visit: fn(&clap::Command)) {
        fn walk(command: &clap::Command, visit: fn(&clap::Command)) {
            visit(command);
            let subs = command.get_subcommands().filter(|sub| sub.get_name() != "help");
            subs.for_each(|sub| walk(sub, visit));
        }
        walk(&Args::command(), visit);
    }

    #[test]
    fn every_command_has_an_example() {
        visit_commands(|command| {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let is_root = command.get_name() == "svcctl" && help.contains("A first machine:\n  svcctl ");
            assert!(is_root || help.contains("Example: svcctl "), "{}", command.get_name());
        });
    }

    #[test]
    fn every_argument_has_help() {
        visit_commands(|command| {
            for argument in command.get_arguments() {
                let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
                assert!(!help.is_empty(), "{} {}", command.get_name(), argument.get_id());
            }
        });
    }
}
