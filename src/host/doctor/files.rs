//! Who may read what is secret. On a machine with its users, also whose the files are.

use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use crate::accounts::Accounts;
use crate::diagnosis::Findings;
use crate::host::system::layout::Layout;

const SERVICE: &str = "svc-gateway";
const ROOT: &str = "root";

/// The files of `/opt/svc/env`: name, whose, and whether a machine cannot be without.
const ENV_FILES: [(&str, &str, bool); 5] = [
    ("host.env", SERVICE, true),
    ("r2.env", SERVICE, true),
    ("boot.env", SERVICE, false),
    ("update.env", ROOT, false),
    ("postgres.env", ROOT, false),
];

pub fn env_files(layout: &Layout) -> Findings {
    let mut findings = Findings::of("env-files");
    let dir = layout.host_env();
    let dir = dir.parent().unwrap_or(Path::new("/"));
    let users = users(layout);
    let mut seen = 0;
    for (name, owner, needed) in ENV_FILES {
        let path = dir.join(name);
        match std::fs::metadata(&path) {
            Ok(meta) => {
                seen += 1;
                findings = judge(findings, &path, &meta, owner, &users);
            }
            Err(error) if error.kind() == ErrorKind::NotFound && needed => {
                let next =
                    "without it no service starts: recover the machine, or write it as the README says";
                findings = findings.problem(format!("{} is not there", path.display()), next);
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => {
                findings = findings.skipped(format!("{}: {error}; run this as root", path.display()));
            }
        }
    }
    findings.or_ok(format!("{seen} files, each for its owner alone"))
}

/// What the machine itself has made and keeps to itself.
pub fn secrets(layout: &Layout) -> Findings {
    let mut findings = Findings::of("secrets");
    let users = users(layout);
    let mut seen = 0;
    for path in [layout.tls_key(), layout.store_credentials(), layout.registration()] {
        match std::fs::metadata(&path) {
            Ok(meta) => {
                seen += 1;
                findings = judge(findings, &path, &meta, SERVICE, &users);
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => {
                findings = findings.skipped(format!("{}: {error}; run this as root", path.display()));
            }
        }
    }
    findings.or_ok(format!("{seen} files, each for its owner alone"))
}

fn judge(
    findings: Findings,
    path: &Path,
    meta: &std::fs::Metadata,
    owner: &str,
    users: &Accounts,
) -> Findings {
    let mode = meta.permissions().mode() & 0o7777;
    let shown = path.display();
    let findings = if mode & 0o077 == 0 {
        findings
    } else {
        let what = format!("{shown} has mode {mode:04o}: others can reach what is secret in it");
        findings
            .problem(what, format!("chmod 0600 {shown}, then change the secrets in it if others had access"))
    };
    match users.uid(owner) {
        Some(id) if id != meta.uid() => {
            let what = format!("{shown} belongs to the user {}, not to {owner}", meta.uid());
            findings.problem(what, format!("chown {owner}: {shown}"))
        }
        _ => findings,
    }
}

/// The machine's users, where it has ours: below a root of tests there is one user for all.
fn users(layout: &Layout) -> Accounts {
    let accounts = Accounts::below(layout.root());
    if accounts.uid(SERVICE).is_some() { accounts } else { Accounts::default() }
}
