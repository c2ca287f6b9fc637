//! The multi-call binary: `argv[0]` or the first argument names the applet. Nothing else exits the process.

use std::process::ExitCode;

use svc::applet::{self, Applet, Build};
use svc::ctl::local::{LocalChecks, PlatformExamination};
use svc::{ctl, host, platform};

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

/// The finished applets; unfinished ones are not listed.
static APPLETS: &[Applet] = &[
    Applet {
        name: "svc-gateway",
        about: "the machine's HTTPS port: owner API, bridge, apps, shell and code",
        run: host::gateway::run,
    },
    Applet {
        name: "svc-restore",
        about: "the gate: restores the latest snapshot before the gateway starts",
        run: host::snapshots::restore::run,
    },
    Applet {
        name: "svc-db-backup",
        about: "takes, verifies and uploads a snapshot, then moves the pointer",
        run: host::snapshots::backup::run,
    },
    Applet {
        name: "svc-update",
        about: "fetches, verifies, unpacks and switches to a release",
        run: host::update::run,
    },
    Applet {
        name: "svc-sync-agent",
        about: "heartbeat to the platform and the object store",
        run: host::link::sync::run,
    },
    Applet {
        name: "svc-register",
        about: "registers this machine with the platform, once",
        run: host::link::register::run,
    },
    Applet {
        name: "svc-heartbeat",
        about: "rotates and expires the machine's records, measures its storage",
        run: host::retention::run,
    },
    Applet {
        name: "svc-agent",
        about: "runs one agent for the gateway, as the owner's user",
        run: host::agents::runner::run,
    },
    Applet {
        name: "svc-watch",
        about: "records what agents' tools change in the owner's home",
        run: host::audit::watcher::run,
    },
    Applet {
        name: "svc-hook",
        about: "reports agents' tool calls to svc-watch",
        run: host::audit::hook::run,
    },
    Applet { name: "svc-shell", about: "serves the shell to the gateway", run: host::launch::shell::run },
    Applet { name: "svc-code", about: "starts the release's code-server", run: host::launch::code::run },
    Applet { name: "svc-platform", about: "control plane and router", run: platform::run },
    Applet { name: "svcctl", about: "operator commands", run: |args| ctl::run(args, LOCAL_CHECKS) },
];

/// The local installation for `svcctl`; only this file knows both sides.
const LOCAL_CHECKS: LocalChecks = LocalChecks {
    is_host: host::doctor::is_here,
    host: || Box::pin(host::doctor::examine()),
    platform: |env_file| {
        Box::pin(async move {
            let platform::doctor::DoctorReport { findings, operator } =
                platform::doctor::examine(env_file).await;
            PlatformExamination { findings, operator }
        })
    },
    gateway_socket: host::doctor::gateway_socket,
    own_database: host::doctor::database_is_own,
};

fn main() -> ExitCode {
    svc::failpoint::arm();
    svc::http::tls::install_provider();
    applet::dispatch(BUILD, APPLETS, std::env::args_os().collect())
}
