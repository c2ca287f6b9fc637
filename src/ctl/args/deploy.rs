//! The commands below `deploy`.

use clap::{Args as ClapArgs, Subcommand};

use super::Wait;
use crate::machine::id::RolloutId;
use crate::machine::name::{Handle, ImageVersion};

#[derive(Debug, Subcommand)]
pub enum DeployCommand {
    /// Bring a release to all running machines, or to some: a canary first, then batches
    #[command(
        after_help = "A machine whose new release is not well goes back by itself and counts as failed. After \
--max-failures, or when the canary fails, no further machine is asked.\n\n\
Example: svcctl deploy start 2026.11.2 --canary 2 --batch-size 20 --wait"
    )]
    Start(Start),
    /// List the 20 newest rollouts
    #[command(after_help = "Example: svcctl deploy list")]
    List,
    /// Show a rollout, machine by machine
    #[command(after_help = "Without an id it is the rollout that is open, else the latest.\n\n\
Example: svcctl deploy status --wait")]
    Status {
        #[command(flatten)]
        which: Which,
        #[command(flatten)]
        wait: Wait,
    },
    /// Ask no further machine for now
    #[command(after_help = "Example: svcctl deploy pause")]
    Pause(Which),
    /// Go on where it was paused
    #[command(after_help = "Example: svcctl deploy resume")]
    Resume(Which),
    /// End a rollout; machines stay as they are
    #[command(after_help = "Example: svcctl deploy abort")]
    Abort(Which),
}

#[derive(Debug, ClapArgs)]
pub struct Which {
    /// Its id, as `deploy start` and `deploy list` show it; without it, the rollout that is open
    #[arg(value_name = "ROLLOUT_ID")]
    pub rollout: Option<RolloutId>,
}

#[derive(Debug, ClapArgs)]
pub struct Start {
    /// A published bundle with a signed manifest
    #[arg(value_name = "IMAGE_VERSION")]
    pub version: ImageVersion,
    /// Only the machines of this handle; may be given again
    #[arg(long = "handle", value_name = "HANDLE")]
    pub handles: Vec<Handle>,
    /// Machines that get it first, alone [default: 1]
    #[arg(long, value_name = "MACHINES", value_parser = clap::value_parser!(u64).range(0..=1000))]
    pub canary: Option<u64>,
    /// Machines of one batch [default: 10]
    #[arg(long, value_name = "MACHINES", value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub batch_size: Option<u64>,
    /// Failed machines that stop it [default: 1]
    #[arg(long, value_name = "MACHINES", value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub max_failures: Option<u64>,
    /// Do not ask
    #[arg(long)]
    pub yes: bool,
    #[command(flatten)]
    pub wait: Wait,
}
