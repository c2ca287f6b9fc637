//! The gate's marker, the release in use, and what became of the last update.

use std::io::ErrorKind;

use crate::diagnosis::Findings;
use crate::host::layout::Layout;
use crate::host::release::{self, Release};

pub fn gate(layout: &Layout) -> Findings {
    let findings = Findings::of("gate");
    match std::fs::metadata(layout.restore_complete()) {
        Ok(_) => findings.ok("open: the restore is complete"),
        Err(error) if error.kind() == ErrorKind::NotFound => findings.problem(
            "shut: the restore has not succeeded, and the gateway does not start",
            "journalctl -u svc-restore -n 50; then systemctl restart svc-restore svc-gateway",
        ),
        Err(error) => findings.skipped(format!("{error}; run this as root")),
    }
}

pub fn current(layout: &Layout) -> Findings {
    let findings = Findings::of("release");
    let Some(version) = release::current(layout) else {
        let next = "`svc svc-update boot` fetches and installs the release that boot.env names";
        return findings.problem(format!("{} names no release", layout.current().display()), next);
    };
    let dir = layout.release(&version);
    let next = "svc-update boot installs it again; or update to another release";
    let findings = match Release::read(&dir) {
        Ok(read) if read.image_version == version => findings,
        Ok(read) => {
            findings.problem(format!("{version} says of itself that it is {}", read.image_version), next)
        }
        Err(error) => findings.problem(error.to_string(), next),
    };
    let findings = match layout.link("bin").join("svc").metadata() {
        Ok(_) => findings,
        Err(error) => findings.problem(format!("{}/svc: {error}", layout.link("bin").display()), next),
    };
    let digest = release::digest(&dir).ok().flatten().unwrap_or_default();
    findings.or_ok(format!("{version}, bundle sha256 {digest}"))
}

pub fn update(layout: &Layout) -> Findings {
    let _ = layout;
    Findings::of("update").skipped("this release keeps no record of updates")
}
