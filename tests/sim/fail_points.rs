//! Checks that every fail point in the source is in a list, and that every list has a test that kills a process at each
//! of its points.

use std::fs;
use std::path::{Path, PathBuf};

use svc::host::audit::watcher;
use svc::host::files::{restore_entry, restore_home, service};
use svc::host::link::register;
use svc::host::records::usage_store;
use svc::host::retention;
use svc::host::snapshots::{backup, restore};
use svc::host::system::upgrade_token;
use svc::host::update;
use svc::platform::operations::{OperationKind, fail_point_names};
use svc::platform::{platform_key_rotation, rollouts, token_rotation};
use svc_files as files;

/// Returns the lists of fail points, each with its name in the test that kills a process at each of its points, and the
/// test's file.
fn fail_point_lists() -> [(&'static [&'static str], &'static str, &'static str); 25] {
    [
        (backup::FAILPOINTS, "svc::host::snapshots::backup::FAILPOINTS", "tests/host/backup.rs"),
        (backup::DRILL_FAILPOINTS, "svc::host::snapshots::backup::DRILL_FAILPOINTS", "tests/host/checks.rs"),
        (
            backup::VERIFY_FAILPOINTS,
            "svc::host::snapshots::backup::VERIFY_FAILPOINTS",
            "tests/host/checks.rs",
        ),
        (backup::SIDE_FAILPOINTS, "svc::host::snapshots::backup::SIDE_FAILPOINTS", "tests/host/side.rs"),
        (
            backup::EXPORT_FAILPOINTS,
            "svc::host::snapshots::backup::EXPORT_FAILPOINTS",
            "tests/host/export.rs",
        ),
        (restore::FAILPOINTS, "svc::host::snapshots::restore::FAILPOINTS", "tests/host/gate.rs"),
        (
            restore::IMPORT_FAILPOINTS,
            "svc::host::snapshots::restore::IMPORT_FAILPOINTS",
            "tests/host/export.rs",
        ),
        (files::save::FAILPOINTS, "saving::FAILPOINTS", "src/files/tests/kills.rs"),
        (files::restore::FAILPOINTS, "restoring::FAILPOINTS", "src/files/tests/kills.rs"),
        (files::prune::FAILPOINTS, "prune::FAILPOINTS", "src/files/tests/kills.rs"),
        (restore_home::FAILPOINTS, "restore_home::FAILPOINTS", "tests/files/mod.rs"),
        (restore_entry::FAILPOINTS, "restore_entry::FAILPOINTS", "tests/files/history.rs"),
        (service::FAILPOINTS, "service::FAILPOINTS", "tests/files/mod.rs"),
        (update::BOOT_FAILPOINTS, "svc::host::update::BOOT_FAILPOINTS", "tests/host/update.rs"),
        (update::APPLY_FAILPOINTS, "svc::host::update::APPLY_FAILPOINTS", "tests/host/apply.rs"),
        (update::ROLLBACK_FAILPOINTS, "svc::host::update::ROLLBACK_FAILPOINTS", "tests/host/apply.rs"),
        (update::KEY_FAILPOINTS, "KEY_FAILPOINTS", "tests/host/update_keys.rs"),
        (retention::FAILPOINTS, "svc::host::retention::FAILPOINTS", "tests/heartbeat.rs"),
        (usage_store::FAILPOINTS, "FAILPOINTS", "tests/records/usage_after_kills.rs"),
        (watcher::FAILPOINTS, "svc::host::audit::watcher::FAILPOINTS", "tests/audit/interruptions.rs"),
        (register::FAILPOINTS, "svc::host::link::register::FAILPOINTS", "tests/host/register.rs"),
        (
            upgrade_token::FAILPOINTS,
            "svc::host::system::upgrade_token::FAILPOINTS",
            "tests/host/token_rotation.rs",
        ),
        (
            token_rotation::FAILPOINTS,
            "svc::platform::token_rotation::FAILPOINTS",
            "tests/platform/token_rotation.rs",
        ),
        (
            platform_key_rotation::FAILPOINTS,
            "svc::platform::platform_key_rotation::FAILPOINTS",
            "tests/platform/platform_key.rs",
        ),
        (rollouts::FAILPOINTS, "svc::platform::rollouts::FAILPOINTS", "tests/platform/kills.rs"),
    ]
}

/// Fail points that change a setting instead of interrupting the process.
const SWITCHES: [&str; 1] = ["hook.long_timeout"];

fn read_file(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn collect_sources(dir: &Path, sources: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect_sources(&path, sources);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            sources.push(path);
        }
    }
}

/// Returns the names in calls to `failpoint::trigger`; an expression instead of a name is returned as written.
fn find_triggered_points(text: &str) -> Vec<String> {
    let calls = text.split("failpoint::trigger(").skip(1);
    calls.map(|call| call.split(')').next().unwrap_or_default().trim_matches('"').to_owned()).collect()
}

/// `cargo xtask dist` relies on this to refuse a release with fail points.
#[test]
fn dev_build_is_recognized_by_its_fail_points() {
    assert!(kit::fail_points::has_fail_points(&fs::read(env!("CARGO_BIN_EXE_svc")).unwrap()));
    assert!(!kit::fail_points::has_fail_points(b"FAILPOINTS: for tests only"));
}

#[test]
fn every_fail_point_in_the_source_is_listed() {
    let mut files = Vec::new();
    collect_sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
    let listed: Vec<&str> =
        fail_point_lists().iter().flat_map(|(points, _, _)| points.iter().copied()).collect();
    let mut triggered = Vec::new();
    for file in files {
        for name in find_triggered_points(&fs::read_to_string(&file).unwrap()) {
            // The names of an operation's points, and the list of them, are derived from its kind and steps.
            let is_derived =
                name.starts_with("&fail_point_name(") && file.ends_with("platform/operations/leased.rs");
            let is_switch = SWITCHES.contains(&name.as_str());
            assert!(
                is_derived || is_switch || listed.contains(&name.as_str()),
                "{}: {name} is not in any FAILPOINTS list",
                file.display()
            );
            triggered.push(name);
        }
    }
    for point in listed {
        assert!(triggered.iter().any(|name| name == point), "{point} is listed but not in the source");
    }
    assert_eq!(
        find_triggered_points("x failpoint::trigger(\"a.b\")?; failpoint::trigger(&c)"),
        ["a.b", "&c"]
    );
}

#[test]
fn every_fail_point_list_has_a_kill_test() {
    for (points, name, test) in fail_point_lists() {
        let text = read_file(test);
        assert!(!points.is_empty());
        let loops = [format!("in {name}"), format!("zip({name})"), format!("{name}.iter()")];
        let is_iterated = text
            .split("\nasync fn ")
            .chain(text.split("\nfn "))
            .any(|function| loops.iter().any(|pattern| function.contains(pattern)));
        assert!(
            is_iterated && text.contains("return(kill)"),
            "{test} does not kill a process at each point in {name}"
        );
    }
    let kills = read_file("tests/platform/kills.rs");
    for kind in OperationKind::ALL {
        assert!(!fail_point_names(kind).is_empty());
        let calls = ["run_for_every_fail_point", "assert_power_operation_survives_kills"]
            .map(|function| format!("{function}(OperationKind::{kind:?},"));
        let is_tested = calls.iter().any(|call| kills.contains(call));
        assert!(is_tested, "tests/platform/kills.rs has none of {calls:?}");
    }
}
