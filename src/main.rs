//! The multi-call binary: `argv[0]`, or the first argument, names the applet. The only place that exits.

use std::process::ExitCode;

use svc::applet::{self, Applet};

/// Applets that work. One that does not is not listed.
static APPLETS: &[Applet] = &[
    Applet { name: "svc-restore", about: "restore gate, before the gateway", run: svc::host::restore::run },
    Applet {
        name: "svc-db-backup",
        about: "snapshot, verify, upload, move the pointer",
        run: svc::host::backup::run,
    },
    Applet {
        name: "svc-update",
        about: "fetch, verify, unpack and switch a release",
        run: svc::host::update::run,
    },
    Applet {
        name: "svc-sync-agent",
        about: "heartbeat to platform and object store",
        run: svc::host::sync::run,
    },
    Applet { name: "svc-register", about: "one-time registration", run: svc::host::register::run },
];

fn main() -> ExitCode {
    svc::failpoint::arm();
    svc::http::tls::install_provider();
    applet::dispatch(APPLETS, std::env::args_os().collect())
}
