//! `svcctl doctor` on a machine: whether it can do its work, read from its files, its database and its services.
//!
//! Changes nothing: not a file, not a credential, not a unit. What it may not read it says.

mod backup;
mod configuration;
mod database;
mod files;
mod firewall;
mod gateway;
mod platform;
mod ports;
mod release;
mod space;
mod store;
mod units;

use std::time::Duration;

use super::system::config::environment_of_services;
use super::system::layout::Layout;
use crate::config::Env;
use crate::diagnosis::{self, Check, Findings, Report};

/// Of a check that asks something over a wire.
const ASKED: Duration = Duration::from_secs(15);
/// Of one that reads files of this machine.
const READ: Duration = Duration::from_secs(5);

/// Whether svc's host side lies below `SVC_ROOT`.
pub fn is_here() -> bool {
    Layout::from_process().host_env().parent().is_some_and(std::path::Path::exists)
}

/// The gateway's trusted socket of the machine below `SVC_ROOT`.
pub fn gateway_socket() -> std::path::PathBuf {
    gateway::socket(&Layout::from_process())
}

/// Whether the gateway is configured for this machine's own database, and is connected to it: `server` is what it says.
///
/// # Errors
/// Why it is not, or is not known.
pub fn database_is_own(server: Option<&str>) -> Result<String, String> {
    let layout = Layout::from_process();
    let port = database::own_port(&layout, &mut environment_of_services(&layout))?;
    let server = server.ok_or("the gateway does not say to which server it is connected")?;
    database::is_own(server, port)
}

/// Looks at the machine below `SVC_ROOT`.
pub async fn examine() -> Report {
    let layout = Layout::from_process();
    let here = Here { layout: &layout };
    let checks = vec![
        here.read("configuration", configuration::check),
        here.read("env-files", files::env_files),
        here.read("secrets", files::secrets),
        here.read("gate", release::gate),
        here.read("release", release::current),
        here.read("update", release::update),
        Check::new("database", ASKED, database::check(&layout)),
        Check::new("gateway", ASKED, gateway::check(&layout)),
        here.read("tls-key", gateway::key),
        Check::new("platform", ASKED, platform::check(&layout)),
        Check::new("clock", ASKED, platform::clock(&layout)),
        Check::new("store", ASKED, store::check(&layout)),
        here.read("backup", backup::check),
        here.read("snapshots", backup::snapshots),
        here.read("disk", space::check),
        here.read("ports", ports::check),
        Check::new("firewall", ASKED, firewall::check(&layout)),
        Check::new("units", ASKED, units::check(&layout)),
    ];
    Report { subject: "host".to_owned(), findings: diagnosis::make(checks).await }
}

struct Here<'a> {
    layout: &'a Layout,
}

impl<'a> Here<'a> {
    /// A check that only reads files, off the threads that answer others.
    fn read(&self, name: &'static str, look: fn(&Layout) -> Findings) -> Check<'a> {
        let layout = self.layout.clone();
        Check::new(name, READ, async move {
            let looked = tokio::task::spawn_blocking(move || look(&layout)).await;
            looked.unwrap_or_else(|_| Findings::of(name).skipped("the check itself failed: our bug"))
        })
    }
}

/// The machine's settings; what is wrong with them is the check `configuration`'s to say.
fn settings(layout: &Layout) -> Env {
    environment_of_services(layout)
}
