//! The allowed imports between modules (ARCHITECTURE.md, "Edges").

use super::{File, at, source};

/// The modules of `src/host`, each with the modules that it may import.
const HOST_MODULES: [(&str, &[&str]); 11] = [
    ("agents", &["audit", "records", "system"]),
    ("audit", &["records", "system"]),
    ("doctor", &["snapshots", "system", "update"]),
    ("gateway", &["agents", "records", "snapshots", "system", "update"]),
    ("launch", &["system"]),
    ("link", &["snapshots", "system", "update"]),
    ("records", &["system"]),
    ("retention", &["agents", "records", "system"]),
    ("snapshots", &["records", "system"]),
    ("system", &[]),
    ("update", &["snapshots", "system"]),
];

/// Folders below `src/host` that are an applet each; no other module imports them.
const APPLETS: [&[&str]; 12] = [
    &["agents", "runner"],
    &["audit", "hook"],
    &["audit", "watcher"],
    &["doctor"],
    &["gateway"],
    &["launch"],
    &["link", "register"],
    &["link", "sync"],
    &["retention"],
    &["snapshots", "backup"],
    &["snapshots", "restore"],
    &["update"],
];

/// Modules that the updater shares with the programs that request an update or report its progress.
const UPDATE_FILES: [&str; 2] = ["protocol", "trusted_keys"];

/// The reason why an import is forbidden, if it is.
fn refusal(from: &[String], to: &[String]) -> Option<&'static str> {
    let place = |path: &[String], depth: usize| path.get(depth).cloned().unwrap_or_default();
    let (here, there) = (place(from, 0), place(to, 0));
    // The crate root declares every module and wires the table of applets.
    if here.is_empty() || there.is_empty() {
        return None;
    }
    let same = here == there;
    match (here.as_str(), there.as_str()) {
        ("machine", _) if !same => Some("machine imports no other module of the crate"),
        ("host", "host") => host(&from[1..], &to[1..]),
        (_, "host" | "platform" | "ctl") if same => None,
        ("host", "platform") | ("platform", "host") => Some("host and platform never import each other"),
        ("ctl", "host" | "platform") => Some("svcctl reaches the platform only through its API"),
        (_, "host" | "platform" | "ctl") => Some("nothing below the applets imports them"),
        ("provider" | "store" | "http", "applet") => Some("nothing below the applets imports their table"),
        ("provider" | "http", "store") | ("store" | "http", "provider") => Some(
            "provider, store and http import machine and the small shared modules (provider and store: http too)",
        ),
        ("host" | "platform" | "ctl" | "provider" | "store" | "http", _) => None,
        (_, "provider" | "store" | "http") => {
            Some("the small shared modules import only each other and machine")
        }
        _ => None,
    }
}

fn host(from: &[String], to: &[String]) -> Option<&'static str> {
    let (Some(here), Some(there)) = (from.first(), to.first()) else { return None };
    let room = |name: &String| HOST_MODULES.iter().find(|(room, _)| room == name);
    let Some((_, allowed)) = room(here) else {
        return Some("this module of the host is missing from the table");
    };
    if here != there && room(there).is_some() && !allowed.contains(&there.as_str()) {
        return Some("this module of the host must not import that one");
    }
    let is_shared = there == "update" && to.get(1).is_some_and(|file| UPDATE_FILES.contains(&file.as_str()));
    let is_in = |path: &[String], applet: &[&str]| {
        path.len() >= applet.len() && path.iter().zip(applet).all(|(a, b)| a == b)
    };
    let foreign = APPLETS.iter().find(|applet| is_in(to, applet) && !is_in(from, applet));
    // The `mod.rs` of a module declares its applets.
    let is_declared =
        foreign.is_some_and(|applet| from.len() < applet.len() && is_in(from, &applet[..from.len()]));
    (foreign.is_some() && !is_shared && !is_declared).then_some("one applet never imports another's folder")
}

pub fn broken(files: &[File]) -> Vec<String> {
    let mut found = Vec::new();
    for file in files {
        let Some(module) = source::module(&file.path) else { continue };
        for named in source::named(&module, &source::tokens(&source::code(&file.text))) {
            if let Some(why) = refusal(&module, &named.path) {
                found.push(at(&file.path, named.line, format!("{}: {why}", named.path.join("::"))));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_broken(path: &str, text: &str) -> bool {
        !broken(&[File::sample(path, text)]).is_empty()
    }

    #[test]
    fn forbidden_import_is_detected() {
        for (path, text) in [
            ("src/machine/state.rs", "use crate::clock;"),
            ("src/machine/state.rs", "fn f() { super::super::clock::now() }"),
            ("src/store/key.rs", "use crate::provider::Provider;"),
            ("src/http/tls.rs", "use crate::store;"),
            ("src/http/tls.rs", "use crate::{clock, host::system};"),
            ("src/provider/mod.rs", "use crate::applet::Exit;"),
            ("src/provider/mod.rs", "use crate::platform::db;"),
            ("src/host/gateway/mod.rs", "use crate::platform::api::Record;"),
            ("src/platform/api/mod.rs", "use crate::{machine, host::{system, update}};"),
            ("src/host/gateway/mod.rs", "use crate::host::snapshots::backup::dump;"),
            ("src/host/gateway/apps/mod.rs", "use super::super::snapshots::restore::Gate;"),
            ("src/host/snapshots/backup/mod.rs", "use super::restore::gate;"),
            ("src/host/snapshots/mod.rs", "use crate::host::gateway::state;"),
            ("src/host/link/sync/mod.rs", "use crate::host::update::journal;"),
            ("src/host/link/sync/mod.rs", "use crate::host::{agents, system};"),
            ("src/host/system/layout.rs", "use crate::host::gateway::state;"),
            ("src/host/new_room/mod.rs", "use crate::host::system::layout;"),
            ("src/ctl/mod.rs", "use crate::platform::config;"),
            ("src/ctl/mod.rs", "use crate::host;"),
            ("src/clock.rs", "use crate::http::client;"),
            ("src/config.rs", "use crate::platform;"),
        ] {
            assert!(is_broken(path, text), "{path}: {text}");
        }
    }

    #[test]
    fn allowed_import_passes() {
        for (path, text) in [
            ("src/main.rs", "use svc::host; use crate::platform;"),
            ("src/lib.rs", "pub mod host; pub use crate::host::system::layout;"),
            ("src/machine/transition.rs", "use super::event::Event; use crate::machine::state;"),
            ("src/machine/model/action.rs", "use super::super::epoch; use crate::machine::epoch;"),
            ("src/store/bucket.rs", "use crate::{clock, http::client, machine::id};"),
            ("src/provider/hetzner/call.rs", "use crate::http::client;"),
            ("src/platform/mod.rs", "use crate::{applet, http, machine, provider, store};"),
            (
                "src/host/gateway/mod.rs",
                "use super::system::layout::Layout; use crate::host::{agents::dispatch, gateway::auth};",
            ),
            ("src/host/link/sync/mod.rs", "use crate::host::update::protocol::UpdateRequest;"),
            ("src/host/snapshots/mod.rs", "pub mod backup; pub use self::backup::job;"),
            ("src/host/snapshots/restore/mod.rs", "use super::staging::load;"),
            (
                "src/host/snapshots/backup/mod.rs",
                "// use crate::platform;\nconst A: &str = \"crate::platform\";",
            ),
            ("src/host/mod.rs", "pub mod snapshots; pub mod gateway;"),
        ] {
            assert!(!is_broken(path, text), "{path}: {text}");
        }
    }
}
