//! The allowed dependencies between packages, and imports between modules (ARCHITECTURE.md, "Allowed dependencies").

use std::collections::{BTreeMap, BTreeSet};

use super::{ProjectFile, format_violation, source};

/// The modules in `src/host`, each with the modules that it may import.
const HOST_MODULES: [(&str, &[&str]); 12] = [
    ("agents", &["audit", "records", "system"]),
    ("audit", &["records", "system"]),
    ("doctor", &["files", "records", "snapshots", "system", "update"]),
    ("files", &["audit", "records", "system"]),
    ("gateway", &["agents", "files", "records", "snapshots", "system", "update"]),
    ("launch", &["system"]),
    ("link", &["files", "records", "snapshots", "system", "update"]),
    ("records", &["system"]),
    ("retention", &["agents", "records", "system"]),
    ("snapshots", &["records", "system"]),
    ("system", &[]),
    ("update", &["snapshots", "system"]),
];

/// Directories under `src/host` with the code of applets, and `doctor`, which serves `svcctl doctor`. No module outside
/// such a directory may import it, except a parent module that declares it. [`SHARED_UPDATE_MODULES`] are exempt.
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

/// The module with all the gateway's services; only the gateway's startup code, responder and route table may import
/// it.
const GATEWAY_STATE: [&str; 2] = ["gateway", "state"];

/// Modules that the updater shares with the programs that request an update or report its progress.
const SHARED_UPDATE_MODULES: [&str; 2] = ["protocol", "trusted_keys"];

/// The product's packages, each with the packages that it may depend on.
const PACKAGES: [(&str, &[&str]); 13] = [
    ("base", &["machine"]),
    ("ctl", &["base", "http", "machine", "store", "verify", "wire"]),
    ("files", &["base", "machine", "store"]),
    ("host", &["base", "files", "http", "machine", "store", "wire"]),
    ("host/gateway", &["base", "host", "http", "machine", "store", "wire"]),
    ("http", &["base", "machine"]),
    ("machine", &[]),
    ("platform", &["base", "files", "http", "machine", "provider", "router", "store", "verify", "wire"]),
    ("platform/router", &["base", "http", "machine"]),
    ("provider", &["base", "http", "machine"]),
    ("store", &["base", "http", "machine"]),
    ("verify", &["base", "http"]),
    ("wire", &["base", "machine"]),
];

/// Returns dependencies between packages that [`PACKAGES`] does not allow. The compiler rejects imports without a
/// dependency.
pub fn forbidden_dependencies(files: &[ProjectFile]) -> Vec<String> {
    let mut violations = Vec::new();
    for file in files {
        let package = file.path.strip_prefix("src/").and_then(|path| path.strip_suffix("/Cargo.toml"));
        let Some(package) = package else { continue };
        let Some((_, allowed)) = PACKAGES.iter().find(|(name, _)| *name == package) else {
            violations.push(format_violation(
                &file.path,
                1,
                "the package is missing from the table PACKAGES",
            ));
            continue;
        };
        for (number, line) in file.text.lines().enumerate() {
            let dependency = line.split(['.', ' ', '=']).next().and_then(|key| key.strip_prefix("svc-"));
            if let Some(dependency) = dependency.filter(|name| !allowed.contains(name)) {
                violations.push(format_violation(
                    &file.path,
                    number + 1,
                    format!("{package} must not depend on {dependency}"),
                ));
            }
        }
    }
    violations
}

/// Returns packages without the workspace lints, such as `unsafe_code = "forbid"`.
pub fn packages_without_lints(files: &[ProjectFile]) -> Vec<String> {
    let manifests = files.iter().filter(|file| file.path.ends_with("Cargo.toml"));
    manifests
        .filter(|file| {
            file.text.contains("[package]") && !file.text.contains("\n[lints]\nworkspace = true\n")
        })
        .map(|file| format_violation(&file.path, 1, "the package does not inherit the workspace lints"))
        .collect()
}

/// Returns why an import is forbidden, or `None` if it is allowed.
fn forbidden_reason(from: &[String], to: &[String]) -> Option<&'static str> {
    let is_host = |path: &[String]| path.first().is_some_and(|dir| dir == "host");
    if is_host(from) && is_host(to) { host_reason(&from[1..], &to[1..]) } else { None }
}

fn host_reason(from: &[String], to: &[String]) -> Option<&'static str> {
    let (Some(from_module), Some(to_module)) = (from.first(), to.first()) else { return None };
    let entry = |name: &String| HOST_MODULES.iter().find(|(module, _)| module == name);
    let Some((_, allowed)) = entry(from_module) else {
        return Some("this host module is missing from the table HOST_MODULES");
    };
    if from_module != to_module && entry(to_module).is_some() && !allowed.contains(&to_module.as_str()) {
        return Some("HOST_MODULES does not permit this import");
    }
    let is_shared =
        to_module == "update" && to.get(1).is_some_and(|file| SHARED_UPDATE_MODULES.contains(&file.as_str()));
    let is_in = |path: &[String], applet: &[&str]| {
        path.len() >= applet.len() && path.iter().zip(applet).all(|(a, b)| a == b)
    };
    let foreign = APPLETS.iter().find(|applet| is_in(to, applet) && !is_in(from, applet));
    // A module's `mod.rs` declares its applets.
    let is_declared =
        foreign.is_some_and(|applet| from.len() < applet.len() && is_in(from, &applet[..from.len()]));
    if foreign.is_some() && !is_shared && !is_declared {
        return Some("an applet's directory must not be imported from outside it");
    }
    let is_wiring = from == ["gateway"]
        || from == ["gateway", "responder"]
        || from == ["gateway", "route_table"]
        || is_in(from, &GATEWAY_STATE);
    (is_in(to, &GATEWAY_STATE) && !is_wiring)
        .then_some("only the gateway's startup code, responder and route table may import its state")
}

pub fn forbidden_imports(files: &[ProjectFile]) -> Vec<String> {
    let mut violations = Vec::new();
    for file in files {
        let Some(module) = source::module_path(&file.path) else { continue };
        for import in source::resolved_paths(
            &module,
            &source::tokenize(&source::blank_comments_and_literals(&file.text)),
        ) {
            if let Some(reason) = forbidden_reason(&module, &import.path) {
                violations.push(format_violation(
                    &file.path,
                    import.line,
                    format!("{}: {reason}", import.path.join("::")),
                ));
            }
        }
    }
    violations
}

/// A package's directory, and a module directly under it.
type Module = (String, String);

fn split_module(path: &[String]) -> Option<Module> {
    let (package, inner) = path.split_at_checked(source::package_depth(path))?;
    Some((package.join("/"), inner.first()?.clone()))
}

/// Returns imports that form a cycle of modules directly under a package; imports in tests are not counted.
pub fn import_cycles(files: &[ProjectFile]) -> Vec<String> {
    // The imports of each module: the imported module, and the position of the first import.
    let mut imports: BTreeMap<Module, BTreeMap<Module, String>> = BTreeMap::new();
    let tests = source::test_modules(files);
    for file in files {
        let Some(module) = source::module_path(&file.path) else { continue };
        let Some((package, name)) = split_module(&module) else { continue };
        if tests.iter().any(|test| module.starts_with(test)) {
            continue;
        }
        let from = imports.entry((package.clone(), name.clone())).or_default();
        for import in source::resolved_paths(
            &module,
            &source::without_tests(&source::tokenize(&source::blank_comments_and_literals(&file.text))).0,
        ) {
            let Some((to_package, target)) = split_module(&import.path) else { continue };
            if to_package == package && target != name {
                from.entry((to_package, target))
                    .or_insert_with(|| format_violation(&file.path, import.line, ""));
            }
        }
    }
    // A module that imports no other remaining module, or that no other remaining module imports, is not in a cycle.
    loop {
        let before = imports.len();
        let names: BTreeSet<_> = imports.keys().cloned().collect();
        imports.values_mut().for_each(|targets| targets.retain(|target, _| names.contains(target)));
        let imported: BTreeSet<_> = imports.values().flat_map(BTreeMap::keys).cloned().collect();
        imports.retain(|name, targets| !targets.is_empty() && imported.contains(name));
        if imports.len() == before {
            break;
        }
    }
    let violations = imports.iter().flat_map(|((_, from), targets)| {
        targets.iter().map(move |((_, to), position)| format!("{position}{from} imports {to} in a cycle"))
    });
    violations.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_forbidden(path: &str, text: &str) -> bool {
        !forbidden_imports(&[ProjectFile::sample(path, text)]).is_empty()
    }

    #[test]
    fn forbidden_import_is_detected() {
        for (path, text) in [
            ("src/host/snapshots/mod.rs", "use crate::agents::limits;"),
            ("src/host/gateway/mod.rs", "use svc_host::snapshots::backup::dump;"),
            ("src/host/gateway/apps/mod.rs", "use svc_host::{system, snapshots::restore::Gate};"),
            ("src/host/snapshots/backup/mod.rs", "use super::restore::gate;"),
            ("src/host/link/sync/mod.rs", "use crate::update::journal;"),
            ("src/host/link/sync/mod.rs", "use crate::{agents, system};"),
            ("src/host/system/layout.rs", "fn f() { crate::agents::runner::new() }"),
            ("src/host/new_module/mod.rs", "use crate::system::layout;"),
            ("src/host/gateway/apps/list.rs", "use crate::state::Gateway;"),
            ("src/host/gateway/writers.rs", "use super::state::Services;"),
        ] {
            assert!(is_forbidden(path, text), "{path}: {text}");
        }
    }

    #[test]
    fn allowed_import_passes() {
        for (path, text) in [
            ("src/main.rs", "use svc::host;"),
            ("src/platform/mod.rs", "use crate::api; use svc_http::server;"),
            (
                "src/host/gateway/mod.rs",
                "use svc_host::{agents::dispatch, system::layout::Layout}; use crate::auth;",
            ),
            ("src/host/link/sync/mod.rs", "use crate::update::protocol::UpdateRequest;"),
            ("src/host/snapshots/mod.rs", "pub mod backup; pub use self::backup::job;"),
            ("src/host/snapshots/restore/mod.rs", "use super::staging::load;"),
            ("src/host/snapshots/backup/mod.rs", "// use crate::agents;\nconst A: &str = \"crate::agents\";"),
            ("src/host/mod.rs", "pub mod snapshots; pub mod update;"),
            ("src/host/gateway/mod.rs", "use self::state::Services;"),
            ("src/host/gateway/route_table.rs", "use super::state::RequestState;"),
        ] {
            assert!(!is_forbidden(path, text), "{path}: {text}");
        }
    }

    #[test]
    fn forbidden_dependency_is_detected() {
        let count = |path: &str, text: &str| forbidden_dependencies(&[ProjectFile::sample(path, text)]).len();
        assert_eq!(count("src/host/Cargo.toml", "svc-platform.workspace = true"), 1);
        assert_eq!(count("src/platform/Cargo.toml", "svc-host = { path = \"../host\" }"), 1);
        assert_eq!(count("src/host/Cargo.toml", "svc-gateway.workspace = true"), 1);
        assert_eq!(count("src/machine/Cargo.toml", "svc-base.workspace = true"), 1);
        assert_eq!(count("src/platform/router/Cargo.toml", "svc-store.workspace = true"), 1);
        assert_eq!(count("src/platform/Cargo.toml", "svc-router.workspace = true"), 0);
        assert_eq!(count("src/new/Cargo.toml", ""), 1);
        assert_eq!(count("src/host/Cargo.toml", "name = \"svc-host\"\nsvc-http.workspace = true"), 0);
        assert_eq!(count("Cargo.toml", "svc-host.workspace = true"), 0);
    }

    #[test]
    fn package_without_lints_is_detected() {
        let count =
            |text: &str| packages_without_lints(&[ProjectFile::sample("src/a/Cargo.toml", text)]).len();
        assert_eq!(count("[package]\nname = \"a\"\n"), 1);
        assert_eq!(count("[package]\nname = \"a\"\n\n[lints]\nworkspace = true\n"), 0);
        assert_eq!(count("[workspace]\nmembers = []\n"), 0);
    }

    #[test]
    fn dependency_tables_have_no_cycle() {
        for table in [&HOST_MODULES[..], &PACKAGES] {
            let mut remaining: Vec<_> = table.to_vec();
            while !remaining.is_empty() {
                // A dependency is named without the directory that contains it.
                let names: Vec<_> =
                    remaining.iter().filter_map(|(name, _)| name.rsplit('/').next()).collect();
                let before = remaining.len();
                remaining.retain(|(_, imports)| imports.iter().any(|import| names.contains(import)));
                assert!(remaining.len() < before, "a cycle among {names:?}");
            }
        }
    }

    #[test]
    fn module_cycle_is_detected() {
        let cycle = [
            ProjectFile::sample("src/ctl/a.rs", "use crate::b::B;"),
            ProjectFile::sample("src/ctl/b/mod.rs", "use super::c;"),
            ProjectFile::sample("src/ctl/c.rs", "use super::a::A;"),
            ProjectFile::sample("src/ctl/d.rs", "use super::e;"),
            ProjectFile::sample("src/ctl/e.rs", "#[cfg(test)]\nmod tests { use crate::d; }"),
        ];
        let violations = import_cycles(&cycle);
        assert_eq!(violations.len(), 3, "{violations:?}");
        assert!(violations[0].starts_with("src/ctl/a.rs:1: a imports b"), "{violations:?}");
        assert_eq!(import_cycles(&cycle[1..]).len(), 0);
    }
}
