//! The applet table. It lives in the library so the reference pages can be generated from it.

use crate::applet::Applet;
use crate::ctl::local::{LocalChecks, PlatformReport};
use crate::{ctl, gateway, host, platform};

/// All applets, in help order.
pub static APPLETS: &[Applet] = &[
    Applet {
        name: "svc-gateway",
        about: "the machine's HTTPS port: owner API, bridge, apps, shell and code",
        command: gateway::command,
        run: gateway::run,
    },
    Applet {
        name: "svc-restore",
        about: "restores the latest snapshot before the gateway starts",
        command: host::snapshots::restore::command,
        run: host::snapshots::restore::run,
    },
    Applet {
        name: "svc-db-backup",
        about: "takes, verifies and uploads a snapshot, then moves the pointer",
        command: host::snapshots::backup::command,
        run: host::snapshots::backup::run,
    },
    Applet {
        name: "svc-update",
        about: "fetches, verifies and unpacks a release, then switches to it",
        command: host::update::command,
        run: host::update::run,
    },
    Applet {
        name: "svc-sync-agent",
        about: "sends heartbeats to the platform; saves, verifies and restores the owner's files",
        command: host::link::sync::command,
        run: host::link::sync::run,
    },
    Applet {
        name: "svc-register",
        about: "registers this machine with the platform, once",
        command: host::link::register::command,
        run: host::link::register::run,
    },
    Applet {
        name: "svc-heartbeat",
        about: "rotates and expires the machine's log files, and measures its storage",
        command: host::retention::command,
        run: host::retention::run,
    },
    Applet {
        name: "svc-agent",
        about: "runs one agent for the gateway, as the owner's user",
        command: host::agents::runner::command,
        run: host::agents::runner::run,
    },
    Applet {
        name: "svc-watch",
        about: "records what agents' tools change in the owner's home directory",
        command: host::audit::watcher::command,
        run: host::audit::watcher::run,
    },
    Applet {
        name: "svc-hook",
        about: "reports agents' tool calls to svc-watch",
        command: host::audit::hook::command,
        run: host::audit::hook::run,
    },
    Applet {
        name: "svc-shell",
        about: "serves the shell, the release's browser UI, to the gateway",
        command: host::launch::shell::command,
        run: host::launch::shell::run,
    },
    Applet {
        name: "svc-code",
        about: "starts the release's code-server",
        command: host::launch::code::command,
        run: host::launch::code::run,
    },
    Applet {
        name: "svc-platform",
        about: "control plane and router",
        command: platform::command,
        run: platform::run,
    },
    Applet {
        name: "svcctl",
        about: "operator commands",
        command: ctl::command,
        run: |args| ctl::run(args, LOCAL_CHECKS),
    },
];

/// Local installation checks for `svcctl doctor` and `svcctl verify-rollout`, injected because the `svcctl` package
/// depends on neither the host nor the platform package.
const LOCAL_CHECKS: LocalChecks = LocalChecks {
    is_host: host::doctor::is_installed,
    check_host: || Box::pin(host::doctor::run_checks()),
    check_platform: |env_file| {
        Box::pin(async move {
            let platform::doctor::DoctorReport { findings, api_access } =
                platform::doctor::run_checks(env_file).await;
            PlatformReport { findings, api_access }
        })
    },
    gateway_socket: host::doctor::gateway_socket,
    check_own_database: host::doctor::check_gateway_database,
};
