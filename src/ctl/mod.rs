//! `svcctl`: the operator CLI. It calls the platform API, reads and writes bundles in the object store, and runs local
//! machine and host checks for `doctor` and `verify-rollout`.
//!
//! Exit codes: 0 success; 64 usage error; 65 the platform refused the request (validation, state, not found), a bundle
//! is invalid, a diagnosis found a problem, or the operator did not confirm; 69 the platform cannot be reached, the
//! provider failed, or the operation failed; 70 internal error; 75 try again later, or an operation is waiting for a
//! decision; 77 missing permission; 78 configuration error.

mod api;
mod api_problem;
mod args;
mod bundle;
mod command;
mod confirm;
mod connect;
mod doctor;
mod interrupt;
pub mod local;
mod output;
mod progress;
mod report;
mod show;
pub mod vars;
mod verify_rollout;
mod wait;

use std::ffi::OsString;
use std::process::ExitCode;

use args::Args;
use local::LocalChecks;
use svc_base::applet;
use svc_base::telemetry;
use svc_http::request_id;

/// Returns the command-line definition, which the reference pages are generated from.
pub fn command() -> clap::Command {
    <Args as clap::CommandFactory>::command()
}

pub fn run(args: Vec<OsString>, local: LocalChecks) -> ExitCode {
    let args: Args = match applet::parse(args) {
        Ok(args) => args,
        Err(code) => return code,
    };
    telemetry::init("svcctl");
    if !args.global.json {
        return applet::block_on("svcctl", request_id::run_with_new_id(command::run(args, local)));
    }
    // With --json, failures are printed as one line of JSON.
    let mut exit = None;
    let success = applet::block_on("svcctl", async {
        if let Err(failure) = request_id::run_with_new_id(command::run(args, local)).await {
            eprintln!("{}", api_problem::failure_json(&failure));
            exit = Some(failure.exit);
        }
        Ok(())
    });
    exit.map_or(success, ExitCode::from)
}
