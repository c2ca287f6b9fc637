//! Subcommands of `svcctl operation`. An id without a subcommand shows that operation.

use clap::{Args, Subcommand};

use super::Wait;
use svc_machine::id::OperationId;

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Operation {
    #[command(subcommand)]
    pub command: Option<OperationCommand>,
    /// The operation to show; short for `operation show ID`
    #[arg(value_name = "OPERATION_ID", required = true)]
    pub operation: Option<OperationId>,
    #[command(flatten)]
    pub wait: Wait,
}

#[derive(Debug, Subcommand)]
pub enum OperationCommand {
    /// Show an operation step by step, and its question, if it is waiting for a decision
    #[command(after_help = "Example: svcctl operation show 019a0000-0000-7000-8000-000000000002 --wait")]
    Show {
        /// The id of the operation, as shown by the command that started it and by `svcctl status`
        #[arg(value_name = "OPERATION_ID")]
        operation: OperationId,
        #[command(flatten)]
        wait: Wait,
    },
    /// Answer the question of a waiting operation: retry, accept the loss, or choose a snapshot
    #[command(
        after_help = "Without an option, the step that asked the question, usually the final backup, is retried. First fix the \
problem on the host, or accept the held-back snapshot (`svcctl backup accept`).\n\n\
With --accept-loss, the operation continues despite the risk that the question describes. If the final backup is \
missing, the question gives the time since which changes exist only on the old server. These changes are lost when the \
old server is deleted; until then the server is kept, powered off.\n\n\
If the question is which snapshot to restore, --snapshot KEY restores the snapshot that you choose, usually the newer \
one; --accept-loss restores the latest one, to which the slot's pointer refers.\n\n\
Example: svcctl operation continue 019a0000-0000-7000-8000-000000000002 --accept-loss --wait"
    )]
    Continue {
        /// The id of the operation, as shown by `svcctl status` and `svcctl fleet`
        #[arg(value_name = "OPERATION_ID")]
        operation: OperationId,
        /// Continue, and lose the changes that are in no snapshot
        #[arg(long)]
        accept_loss: bool,
        /// Restore this snapshot, if the question is which one to restore
        #[arg(long, value_name = "KEY", conflicts_with = "accept_loss")]
        snapshot: Option<String>,
        #[command(flatten)]
        wait: Wait,
    },
    /// Abandon an operation: a recovery returns the slot to its old machine, a deletion is undone
    #[command(
        after_help = "A recovery can be abandoned until its new machine has registered. No data is lost. The machine that gets \
its slot back is powered on, even if `svcctl power off` had powered it off. A deletion can be abandoned until its operation \
has ended; after that, `svcctl undelete` undoes it, but not after `svcctl delete --now`. If the removal of a server is \
abandoned, the server stays at the provider: `svcctl discard` then deletes it, and `svcctl undelete` brings a deleted \
machine back. --wait waits until the machine that got its slot back is serving.\n\n\
Example: svcctl operation abandon 019a0000-0000-7000-8000-000000000002 --wait"
    )]
    Abandon {
        /// The id of the operation, as shown by `svcctl status` and `svcctl fleet`
        #[arg(value_name = "OPERATION_ID")]
        operation: OperationId,
        #[command(flatten)]
        wait: Wait,
    },
}
