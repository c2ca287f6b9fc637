//! The commands below `operation`. An id without a command shows that operation.

use clap::{Args, Subcommand};

use super::Wait;
use crate::machine::id::OperationId;

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Operation {
    #[command(subcommand)]
    pub command: Option<OperationCommand>,
    /// The operation to show: `operation ID` is short for `operation show ID`
    #[arg(value_name = "OPERATION_ID", required = true)]
    pub operation: Option<OperationId>,
    #[command(flatten)]
    pub wait: Wait,
}

#[derive(Debug, Subcommand)]
pub enum OperationCommand {
    /// Show one operation, step by step, and the question that it waits with
    #[command(after_help = "Example: svcctl operation show 019a0000-0000-7000-8000-000000000002 --wait")]
    Show {
        /// Its id, as the command that started it and `svcctl status` show it
        #[arg(value_name = "OPERATION_ID")]
        operation: OperationId,
        #[command(flatten)]
        wait: Wait,
    },
    /// Answer the question of a waiting operation: try again, or go ahead and accept the loss that it names
    #[command(
        after_help = "Without an option the last backup is tried again: after you have mended what kept the host from it, or \
accepted the snapshot that was held back (`svcctl backup accept`).\n\n\
With --accept-loss the operation goes ahead. The question says since when data is on the old server alone. That data is \
lost when the old server is deleted; until then the server is kept, switched off.\n\n\
Where the question is which snapshot the new machine begins with, --snapshot names the newer one, and --accept-loss takes the \
latest.\n\n\
Example: svcctl operation continue 019a0000-0000-7000-8000-000000000002 --accept-loss --wait"
    )]
    Continue {
        /// Its id, as `svcctl status` and `svcctl fleet` show it
        #[arg(value_name = "OPERATION_ID")]
        operation: OperationId,
        /// What no snapshot holds may be lost
        #[arg(long)]
        accept_loss: bool,
        /// Begin the new machine with this snapshot, where the question is which one is restored
        #[arg(long, value_name = "KEY", conflicts_with = "accept_loss")]
        snapshot: Option<String>,
        #[command(flatten)]
        wait: Wait,
    },
    /// Give an operation up: a recovery gives the slot back to its old machine, a deletion is undone
    #[command(
        after_help = "A recovery can be abandoned until its new machine has registered. No data is lost. A machine that gets \
its slot back is switched on, also where `svcctl power off` had switched it off. A deletion can be abandoned until its \
operation has ended, then undone with `svcctl undelete`, but not after `svcctl delete --now`. An abandoned removal leaves the \
server at the provider, until `svcctl discard` or `svcctl undelete`. With --wait it ends when the machine that has the slot \
again serves.\n\n\
Example: svcctl operation abandon 019a0000-0000-7000-8000-000000000002 --wait"
    )]
    Abandon {
        /// Its id, as `svcctl status` and `svcctl fleet` show it
        #[arg(value_name = "OPERATION_ID")]
        operation: OperationId,
        #[command(flatten)]
        wait: Wait,
    },
}
