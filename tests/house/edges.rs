//! Who may import whom (ARCHITECTURE.md, "Edges").

use super::{File, at, source};

/// Folders of `src/host` that are an applet each. What two of them share stands beside them.
const APPLETS: [&str; 11] = [
    "backup",
    "doctor",
    "gateway",
    "heartbeat",
    "hook",
    "launch",
    "register",
    "restore",
    "sync",
    "update",
    "watch",
];

/// The import that is not allowed, with the reason.
fn refusal(from: &[String], to: &[String]) -> Option<&'static str> {
    let place = |path: &[String], depth: usize| path.get(depth).cloned().unwrap_or_default();
    let (here, there) = (place(from, 0), place(to, 0));
    // The crate's root declares everything and wires the table of applets.
    if here.is_empty() || there.is_empty() {
        return None;
    }
    let same = here == there;
    match (here.as_str(), there.as_str()) {
        ("machine", _) if !same => Some("machine imports nothing of ours"),
        ("host", "host") => host(&place(from, 1), &place(to, 1)),
        (_, "host" | "platform" | "ctl") if same => None,
        ("host", "platform") | ("platform", "host") => Some("host and platform never import each other"),
        ("ctl", "host" | "platform") => Some("svcctl knows the platform by its API alone"),
        (_, "host" | "platform" | "ctl") => Some("nothing below the applets imports them"),
        ("provider" | "store" | "http", "applet") => Some("nothing below the applets imports their table"),
        ("provider" | "http", "store") | ("store" | "http", "provider") => Some(
            "provider, store and http import machine and the small ground (provider and store: http too)",
        ),
        ("host" | "platform" | "ctl" | "provider" | "store" | "http", _) => None,
        (_, "provider" | "store" | "http") => Some("the small ground imports only itself and machine"),
        _ => None,
    }
}

fn host(from: &str, to: &str) -> Option<&'static str> {
    match (APPLETS.contains(&from), APPLETS.contains(&to)) {
        (_, true) if from == to || from.is_empty() => None,
        (true, true) => Some("one applet never imports another's folder"),
        (false, true) => Some("what applets share does not import them"),
        _ => None,
    }
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
    fn a_forbidden_import_is_noticed() {
        for (path, text) in [
            ("src/machine/state.rs", "use crate::clock;"),
            ("src/machine/state.rs", "fn f() { super::super::clock::now() }"),
            ("src/store/key.rs", "use crate::provider::Provider;"),
            ("src/http/tls.rs", "use crate::store;"),
            ("src/http/tls.rs", "use crate::{clock, host::layout};"),
            ("src/provider/mod.rs", "use crate::applet::Exit;"),
            ("src/provider/mod.rs", "use crate::platform::db;"),
            ("src/host/gateway/mod.rs", "use crate::platform::api::Record;"),
            ("src/platform/api/mod.rs", "use crate::{machine, host::{config, layout}};"),
            ("src/host/gateway/mod.rs", "use crate::host::backup::dump;"),
            ("src/host/gateway/apps/mod.rs", "use super::super::restore::Gate;"),
            ("src/host/layout.rs", "use super::gateway::state;"),
            ("src/ctl/mod.rs", "use crate::platform::config;"),
            ("src/ctl/mod.rs", "use crate::host;"),
            ("src/clock.rs", "use crate::http::client;"),
            ("src/config.rs", "use crate::platform;"),
        ] {
            assert!(is_broken(path, text), "{path}: {text}");
        }
    }

    #[test]
    fn an_allowed_import_passes() {
        for (path, text) in [
            ("src/main.rs", "use svc::host; use crate::platform;"),
            ("src/lib.rs", "pub mod host; pub use crate::host::layout;"),
            ("src/machine/transition.rs", "use super::event::Event; use crate::machine::state;"),
            ("src/machine/model/action.rs", "use super::super::epoch; use crate::machine::epoch;"),
            ("src/store/bucket.rs", "use crate::{clock, http::client, machine::id};"),
            ("src/provider/hetzner/call.rs", "use crate::http::client;"),
            ("src/platform/mod.rs", "use crate::{applet, http, machine, provider, store};"),
            (
                "src/host/gateway/mod.rs",
                "use super::layout::Layout; use crate::host::{config, gateway::auth};",
            ),
            ("src/host/backup/mod.rs", "// use crate::platform;\nconst A: &str = \"crate::platform\";"),
            ("src/host/mod.rs", "pub mod backup; pub mod gateway;"),
        ] {
            assert!(!is_broken(path, text), "{path}: {text}");
        }
    }
}
