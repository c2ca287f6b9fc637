//! Arguments of `svcctl usage`.

use clap::Args;
use jiff::civil::Date;

use super::MachineTarget;
use svc_http::usage::GroupBy;

#[derive(Debug, Args)]
pub struct Usage {
    /// A machine's id, its user's handle, or USER/SLOT
    pub machine: MachineTarget,
    /// The first day, such as 2026-11-01
    #[arg(long, value_name = "DAY")]
    pub from: Option<Date>,
    /// The last day, inclusive
    #[arg(long, value_name = "DAY")]
    pub to: Option<Date>,
    /// Only this user or channel, such as telegram:7
    #[arg(long, value_name = "ID")]
    pub user: Option<String>,
    /// How to group the lines
    #[arg(long, value_enum, default_value_t = GroupBy::Day)]
    pub by: GroupBy,
}
