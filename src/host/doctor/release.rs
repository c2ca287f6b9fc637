//! The gate's marker, the release in use, and what became of the last update.

use std::io::ErrorKind;
use std::path::Path;

use serde::Deserialize;

use crate::clock::rfc3339_ms;
use crate::diagnosis::Findings;
use crate::fsx;
use crate::host::system::layout::Layout;
use crate::host::system::postgres_tools::PgTools;
use crate::host::system::release;
use crate::host::system::release::Release;
use crate::host::system::systemd;
use crate::host::update::protocol::SnapshotWait;

pub fn gate(layout: &Layout) -> Findings {
    let findings = Findings::of("gate");
    match std::fs::metadata(layout.restore_complete()) {
        Ok(_) => findings.ok("open: the restore is complete"),
        Err(error) if error.kind() == ErrorKind::NotFound => findings.problem(
            "shut: the restore has not succeeded, and the gateway does not start",
            "journalctl -u svc-restore -n 50; then systemctl restart svc-first-boot, which goes on from there",
        ),
        Err(error) => findings.skipped(format!("{error}; run this as root")),
    }
}

const LINKS: &str = "svc-update boot sets the links and installs the units of the current release";

pub fn current(layout: &Layout) -> Findings {
    let findings = Findings::of("release");
    let Some(version) = release::current(layout) else {
        let next = "`svc svc-update boot` fetches and installs the release that update.env names";
        return findings.problem(format!("{} names no release", layout.current().display()), next);
    };
    let dir = layout.release(&version);
    let next = "svc-update rollback goes back to the release before; or update to another one";
    let findings = match Release::read(&dir) {
        Ok(read) if read.image_version == version => findings,
        Ok(read) => {
            findings.problem(format!("{version} says of itself that it is {}", read.image_version), next)
        }
        Err(error) => findings.problem(error.to_string(), next),
    };
    let findings = match layout.link("bin").join("svc").metadata() {
        Ok(_) => findings,
        Err(error) => findings.problem(format!("{}/svc: {error}", layout.link("bin").display()), LINKS),
    };
    // The container's are no way out: only root can reach into it.
    let is_without_tools =
        systemd::runs(layout) && PgTools::locate(&mut super::settings(layout), layout) == PgTools::Container;
    let findings = if is_without_tools {
        findings.problem(
            format!(
                "{version} has no PostgreSQL client tools: no {}, so no backup and no restore can work here",
                layout.runtime().join("postgres/bin/pg_dump").display()
            ),
            "publish a bundle with them, as `cargo xtask bundle` makes it without --no-postgres, and update to it",
        )
    } else {
        findings
    };
    let digest = release::digest(&dir).ok().flatten().unwrap_or_default();
    findings.or_ok(format!("{version}, bundle sha256 {digest}"))
}

/// `releases.json` of the updater: what is not tried again.
#[derive(Deserialize)]
struct Known {
    quarantined: Vec<Quarantined>,
}

#[derive(Deserialize)]
struct Quarantined {
    version: String,
    why: String,
}

/// `last.json`: how the last update ended.
#[derive(Deserialize)]
struct Outcome {
    version: String,
    outcome: String,
    stage: String,
    error: Option<String>,
    at: String,
}

pub fn update(layout: &Layout) -> Findings {
    let mut findings = Findings::of("update");
    let dir = layout.update_state();
    if let Ok(Some((version, SnapshotWait { since, why }))) = SnapshotWait::read(layout) {
        findings = findings.warning(
            format!("the update to {version} waits for a snapshot since {}: {why}", rfc3339_ms(since)),
            "journalctl -u svc-db-backup-request -n 50; svc-update apply --without-snapshot skips it",
        );
    } else if dir.join("journal.json").exists() {
        findings = findings.warning(
            "one is under way, or was cut off",
            "svc-update goes on with it at its next start: systemctl status svc-update",
        );
    }
    match read::<Known>(&dir.join("releases.json")) {
        Ok(known) => {
            for Quarantined { version, why } in known.map(|known| known.quarantined).unwrap_or_default() {
                findings = findings.warning(
                    format!("release {version} is quarantined: {why}"),
                    "it is not tried again here; roll another version out",
                );
            }
        }
        Err(why) => findings = findings.skipped(why),
    }
    match read::<Outcome>(&dir.join("last.json")) {
        Ok(None) => findings.or_ok("none on this machine yet"),
        Ok(Some(last)) if last.outcome == "updated" => {
            findings.or_ok(format!("the last one, to {}, succeeded at {}", last.version, last.at))
        }
        Ok(Some(last)) => {
            let why = last.error.unwrap_or_else(|| "it does not say why".to_owned());
            let what =
                format!("the last one, to {}, ended {} at {}: {why}", last.version, last.outcome, last.stage);
            let next = "journalctl -u svc-update -n 100";
            if last.outcome == "failed" { findings.problem(what, next) } else { findings.warning(what, next) }
        }
        Err(why) => findings.skipped(why),
    }
}

fn read<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Option<T>, String> {
    let Some(text) = fsx::read_if_there(path).map_err(|error| error.to_string())? else { return Ok(None) };
    serde_json::from_slice(&text).map(Some).map_err(|error| format!("{}: {error}", path.display()))
}
