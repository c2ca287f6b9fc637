//! The multi-call binary: `argv[0]`, or the first argument, names the applet. The only place that exits.

use std::process::ExitCode;

use svc::applet::{self, Applet};

/// Applets that work. One that does not is not listed.
static APPLETS: &[Applet] = &[Applet {
    name: "svc-gateway",
    about: "the machine's HTTPS port: owner API, bridge, apps, shell and code",
    run: svc::host::gateway::run,
}];

fn main() -> ExitCode {
    svc::failpoint::arm();
    svc::http::tls::install_provider();
    applet::dispatch(APPLETS, std::env::args_os().collect())
}
