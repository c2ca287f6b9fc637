//! Subcommands of `svcctl deploy`.

use clap::{Args as ClapArgs, Subcommand};

use super::Wait;
use svc_machine::id::RolloutId;
use svc_machine::name::{Handle, ImageVersion};

#[derive(Debug, Subcommand)]
pub enum DeployCommand {
    /// Roll out a release to all or some running machines: canaries first, then the rest in batches
    #[command(
        after_help = "A machine that is unhealthy under the new release rolls back automatically and counts as failed. \
The rollout stops after --max-failures failures, or when a canary fails. When the first machines have the release, the \
platform runs the checks of `svcctl verify-rollout` on them. A problem pauses the rollout: run `svcctl deploy status` to \
see it, and `svcctl deploy resume` to verify again.\n\n\
Example: svcctl deploy start 2026.11.2 --canary 2 --batch-size 20 --wait"
    )]
    Start(StartRollout),
    /// List the 20 newest rollouts
    #[command(after_help = "Example: svcctl deploy list")]
    List,
    /// Show a rollout, machine by machine
    #[command(after_help = "Without an id, the command shows the open rollout, or else the latest one.\n\n\
Example: svcctl deploy status --wait")]
    Status {
        #[command(flatten)]
        target: RolloutTarget,
        #[command(flatten)]
        wait: Wait,
    },
    /// Pause a rollout: no more updates start, and those in progress complete
    #[command(after_help = "Example: svcctl deploy pause")]
    Pause(RolloutTarget),
    /// Resume a paused rollout
    #[command(after_help = "Example: svcctl deploy resume")]
    Resume(RolloutTarget),
    /// End a rollout: no more updates start, and updated machines keep the new release
    #[command(after_help = "Example: svcctl deploy abort")]
    Abort(RolloutTarget),
}

#[derive(Debug, ClapArgs)]
pub struct RolloutTarget {
    /// Rollout id, as shown by `deploy start` and `deploy list` (default: the open rollout)
    #[arg(value_name = "ROLLOUT_ID")]
    pub rollout: Option<RolloutId>,
}

#[derive(Debug, ClapArgs)]
pub struct StartRollout {
    /// Version of a published bundle with a signed manifest
    #[arg(value_name = "IMAGE_VERSION")]
    pub version: ImageVersion,
    /// Only the machines with this handle; repeatable
    #[arg(long = "handle", value_name = "HANDLE")]
    pub handles: Vec<Handle>,
    /// Exclude the machines with this handle; repeatable
    #[arg(long, value_name = "HANDLE")]
    pub except: Vec<Handle>,
    /// Number of canaries, which are updated first: machines of test slots if there are any, or else random ones
    /// [default: 1]
    #[arg(long, value_name = "MACHINES", value_parser = clap::value_parser!(u64).range(0..=1000))]
    pub canary: Option<u64>,
    /// Machines per batch [default: 10]
    #[arg(long, value_name = "MACHINES", value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub batch_size: Option<u64>,
    /// Number of failed machines that stops the rollout [default: 1]
    #[arg(long, value_name = "MACHINES", value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub max_failures: Option<u64>,
    /// Do not verify the release on the first updated machines before the others are updated
    #[arg(long)]
    pub no_verify: bool,
    /// Skip the confirmation
    #[arg(long)]
    pub yes: bool,
    #[command(flatten)]
    pub wait: Wait,
}
