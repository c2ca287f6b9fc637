//! Checks the restore gate, the current release and the last update.

use std::io::ErrorKind;
use std::path::Path;

use serde::Deserialize;

use crate::system::layout::Layout;
use crate::system::postgres_tools::PgTools;
use crate::system::release;
use crate::system::release::Release;
use crate::system::systemd;
use crate::update::protocol::{FORMAT_VERSION, SnapshotWait};
use svc_base::diagnosis::Findings;
use svc_base::error_chain::format_chain;
use svc_base::fsx::{self, FileError};

pub fn check_gate(layout: &Layout) -> Findings {
    let findings = Findings::new("gate");
    match std::fs::metadata(layout.restore_complete()) {
        Ok(_) => findings.ok("the gate is open: the restore is complete"),
        Err(error) if error.kind() == ErrorKind::NotFound => findings.problem(
            "the gate is closed: the restore has not succeeded, so the gateway does not start",
            "run `journalctl -u svc-restore -n 50` to find the cause, then `systemctl restart svc-first-boot`, which \
             resumes the boot",
        ),
        Err(error) => findings.skipped(format!("{error}; run the doctor as root")),
    }
}

const LINKS_NEXT_STEP: &str =
    "run `svc-update boot` to create the links and install the units of the current release";

pub fn check_current(layout: &Layout) -> Findings {
    let findings = Findings::new("release");
    let Some(version) = release::current_version(layout) else {
        let next = "install the bundle that update.env names: run `svc svc-update boot` with any installed \
                    `svc`, such as /opt/svc/releases/VERSION/bin/svc";
        return findings.problem(format!("{} does not name a release", layout.current().display()), next);
    };
    let dir = layout.release(&version);
    let next = "roll back to the previous release with `svc-update rollback`, or update to another one";
    let findings = match Release::read(&dir) {
        Ok(read) if read.image_version == version => findings,
        Ok(read) => findings.problem(format!("release.json of {version} names {}", read.image_version), next),
        Err(error) => findings.problem(format_chain(&error), next),
    };
    let findings = match layout.link("bin").join("svc").metadata() {
        Ok(_) => findings,
        Err(error) => {
            findings.problem(format!("{}/svc: {error}", layout.link("bin").display()), LINKS_NEXT_STEP)
        }
    };
    // The container's tools don't count, since only root can use them.
    let lacks_tools = systemd::is_running(layout)
        && PgTools::locate(&mut super::services_env(layout), layout) == PgTools::Container;
    let findings = if lacks_tools {
        findings.problem(
            format!(
                "{version} has no PostgreSQL client tools: {} is missing, so backups and restores fail on this machine",
                layout.runtime().join("postgres/bin/pg_dump").display()
            ),
            "publish a bundle that contains them (`cargo xtask bundle` without --no-postgres), and update to it",
        )
    } else {
        findings
    };
    let digest = release::read_digest(&dir).ok().flatten().unwrap_or_default();
    findings.or_ok(format!("{version}, bundle sha256 {digest}"))
}

/// Quarantined releases, from the updater's `releases.json`.
#[derive(Deserialize)]
struct ReleaseRecord {
    version: u32,
    quarantined: Vec<QuarantinedRelease>,
}

#[derive(Deserialize)]
struct QuarantinedRelease {
    version: String,
    why: String,
}

/// Outcome of the last update, from `last.json`.
#[derive(Deserialize)]
struct LastUpdate {
    version: String,
    outcome: String,
    stage: String,
    error: Option<String>,
    at: String,
}

pub fn check_update(layout: &Layout) -> Findings {
    let mut findings = Findings::new("update");
    let dir = layout.update_state();
    if let Ok(Some((version, wait))) = SnapshotWait::read(layout) {
        findings = findings.warning(
            format!("the update to {version} {}", wait.describe()),
            format!(
                "run `journalctl -u svc-db-backup-request -n 50` to find the cause; to skip the snapshot, run `svc-update \
                 apply --version {version} --without-snapshot`"
            ),
        );
    } else if dir.join("journal.json").exists() {
        findings = findings.warning(
            "an update is in progress or was interrupted",
            "run `systemctl status svc-update`; svc-update resumes an interrupted update at its next start",
        );
    }
    let releases = dir.join("releases.json");
    match read_json::<ReleaseRecord>(&releases) {
        Ok(None) => {}
        Ok(Some(Ok(record))) if record.version == FORMAT_VERSION => {
            for QuarantinedRelease { version, why: reason } in record.quarantined {
                findings = findings.warning(
                    format!("release {version} is quarantined: {reason}"),
                    "this machine will not try it again; roll out another version",
                );
            }
        }
        Ok(Some(_)) => {
            let path = releases.display();
            findings = findings.problem(
                format!("{path} is malformed or has an unsupported version, so updates and rollbacks fail"),
                "move the file away, then update; the machine then has no record of its previous and \
                 quarantined releases",
            );
        }
        Err(error) => findings = findings.skipped(format_chain(&error)),
    }
    match read_json::<LastUpdate>(&layout.last_update()) {
        Ok(None) => findings.or_ok("no update on this machine yet"),
        Ok(Some(Ok(last))) if last.outcome == "updated" => {
            findings.or_ok(format!("the last update, to {}, succeeded at {}", last.version, last.at))
        }
        Ok(Some(Ok(LastUpdate { version, outcome, stage, error, .. }))) => {
            let reason = error.unwrap_or_else(|| "no reason recorded".to_owned());
            let what = format!(
                "the last update, to {version}, ended with outcome {outcome} in stage {stage}: {reason}"
            );
            let next = "run `journalctl -u svc-update -n 100`";
            if outcome == "failed" { findings.problem(what, next) } else { findings.warning(what, next) }
        }
        Ok(Some(Err(error))) => findings.warning(
            format!("the outcome of the last update is unknown: last.json is malformed: {error}"),
            "run `svc-update history` to list the updates; the next update replaces the file",
        ),
        Err(error) => findings.skipped(format_chain(&error)),
    }
}

/// Reads and parses a file, or returns `None` if it doesn't exist.
fn read_json<T: serde::de::DeserializeOwned>(
    path: &Path,
) -> Result<Option<serde_json::Result<T>>, FileError> {
    Ok(fsx::read_if_exists(path)?.map(|text| serde_json::from_slice(&text)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use svc_base::diagnosis::Level;

    /// Returns the finding levels for an updater state file with this text.
    fn check_with(file: &str, text: &str) -> Vec<Level> {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        std::fs::create_dir_all(layout.update_state()).unwrap();
        std::fs::write(layout.update_state().join(file), text).unwrap();
        check_update(&layout).into_list().into_iter().map(|finding| finding.level).collect()
    }

    #[test]
    fn check_update_reports_unusable_release_record_as_problem() {
        let record = |version: u32| format!(r#"{{"version":{version},"previous":null,"quarantined":[]}}"#);
        assert_eq!(check_with("releases.json", &record(FORMAT_VERSION)), [Level::Ok]);
        assert_eq!(check_with("releases.json", &record(FORMAT_VERSION + 1)), [Level::Problem]);
        assert_eq!(check_with("releases.json", "{"), [Level::Problem]);
    }

    #[test]
    fn read_json_names_cause_if_file_is_unreadable() {
        let directory = tempfile::tempdir().unwrap();
        let error = read_json::<serde_json::Value>(directory.path()).unwrap_err();
        let cause = format_chain(&error);
        assert!(cause.contains("Is a directory"), "{cause}");
    }

    #[test]
    fn check_update_warns_about_malformed_outcome() {
        assert_eq!(check_with("last.json", "{"), [Level::Warning]);
    }
}
