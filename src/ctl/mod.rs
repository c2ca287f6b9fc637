//! `svcctl`: everything that an operator does, through the public API alone.
//!
//! Exit codes: 0 done; 64 the command line is wrong; 65 the platform refused (validation, state, not found), or a
//! bundle does not fit; 69 the platform cannot be reached, the provider failed, or a waited-for operation failed;
//! 70 our bug or the platform's; 75 try again later; 77 the credential is missing rights; 78 the configuration is wrong.

mod api;
mod args;
mod bundle;
mod command;
mod confirm;
mod doctor;
mod interrupt;
pub mod local;
mod out;
mod progress;
mod refusal;
mod rollout;
mod show;
mod wait;

use std::ffi::OsString;
use std::process::ExitCode;

use crate::applet;
use crate::http::request_id;
use crate::telemetry;
use args::Args;
use local::Local;

pub fn run(args: Vec<OsString>, local: Local) -> ExitCode {
    let args: Args = match applet::parse(args) {
        Ok(args) => args,
        Err(code) => return code,
    };
    telemetry::init("svcctl");
    if !args.global.json {
        return applet::block_on("svcctl", request_id::own(command::run(args, local)));
    }
    // For programs a failure is one line of JSON.
    let mut exit = None;
    let ran = applet::block_on("svcctl", async {
        if let Err(failure) = request_id::own(command::run(args, local)).await {
            eprintln!("{}", refusal::json(&failure));
            exit = Some(failure.exit);
        }
        Ok(())
    });
    exit.map_or(ran, ExitCode::from)
}
