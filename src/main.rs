//! The multi-call binary: `argv[0]` or the first argument names the applet. Only `main` ends the process.

use std::process::ExitCode;

use svc::applet::{self, Build};
use svc::applets::APPLETS;

const BUILD: Build = Build {
    version: concat!(
        env!("CARGO_PKG_VERSION"),
        " (commit ",
        env!("SVC_COMMIT"),
        ", ",
        env!("SVC_COMMIT_DATE"),
        ")"
    ),
    commit: env!("SVC_COMMIT"),
};

fn main() -> ExitCode {
    svc::failpoint::arm();
    svc::http::tls::install_provider();
    applet::dispatch(BUILD, APPLETS, std::env::args_os().collect())
}
