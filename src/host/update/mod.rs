//! `svc-update`: brings a release onto the machine and makes it the current one.
//!
//! `boot` trusts the digest that user-data named. `status` prints what is there.

mod boot;
mod database;
mod download;
mod names;
mod place;
mod services;
mod status;
mod units;
mod unpack;

use std::ffi::OsString;
use std::process::ExitCode;

use super::config::begin_log;
use super::layout::Layout;
use crate::applet;
use crate::http::request_id;

pub use boot::POINTS;

#[derive(clap::Parser)]
#[command(
    name = "svc-update",
    version = applet::VERSION,
    about = "Fetches, verifies, unpacks and switches a release of the host software"
)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Bring the release that user-data names, and make it current
    Boot,
    /// Print the current release and those on this machine
    Status {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
}

pub fn run(args: Vec<OsString>) -> ExitCode {
    let args: Args = match applet::parse(args) {
        Ok(args) => args,
        Err(code) => return code,
    };
    let layout = Layout::from_process();
    begin_log("svc-update", &layout);
    applet::block_on(
        "svc-update",
        request_id::own(async move {
            match args.command {
                Command::Boot => boot::run(layout).await,
                Command::Status { json } => {
                    let format = if json { status::Format::Json } else { status::Format::Table };
                    status::print(&layout, format)
                }
            }
        }),
    )
}
