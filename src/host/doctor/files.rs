//! Checks the permissions of secret files and, if the svc users exist, their owners.

use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use crate::system::layout::Layout;
use svc_base::accounts::Accounts;
use svc_base::diagnosis::Findings;
use svc_base::quantity::pluralize;

const GATEWAY_USER: &str = "svc-gateway";
const ROOT_USER: &str = "root";

/// Files in `/opt/svc/env`: name, owner, and whether required.
const ENV_FILES: [(&str, &str, bool); 5] = [
    ("host.env", GATEWAY_USER, true),
    ("r2.env", GATEWAY_USER, true),
    ("boot.env", GATEWAY_USER, false),
    ("update.env", ROOT_USER, false),
    ("postgres.env", ROOT_USER, false),
];

pub fn check_env_files(layout: &Layout) -> Findings {
    let mut findings = Findings::new("env-files");
    let dir = layout.host_env();
    let dir = dir.parent().unwrap_or(Path::new("/"));
    let accounts = read_accounts(layout);
    let mut count = 0;
    for (name, owner, is_required) in ENV_FILES {
        let path = dir.join(name);
        match std::fs::metadata(&path) {
            Ok(meta) => {
                count += 1;
                findings = check_file(findings, &path, &meta, owner, &accounts);
            }
            Err(error) if error.kind() == ErrorKind::NotFound && is_required => {
                let next = "without it, no service starts: recover the slot, or write the file as \
                            described in docs/reference/configuration.md";
                findings = findings.problem(format!("{} is missing", path.display()), next);
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => {
                findings = findings.skipped(format!("{}: {error}; run the doctor as root", path.display()));
            }
        }
    }
    findings.or_ok(format!("{}, each accessible only to its owner", pluralize(count, "file")))
}

/// Checks secret files written by this machine's services.
pub fn check_secrets(layout: &Layout) -> Findings {
    let mut findings = Findings::new("secrets");
    let accounts = read_accounts(layout);
    let mut count = 0;
    let paths = [
        layout.tls_key(),
        layout.acme_account(),
        layout.store_credentials(),
        layout.registration(),
        layout.upgrade_token(),
        layout.files_key(),
    ];
    for path in paths {
        match std::fs::metadata(&path) {
            Ok(meta) => {
                count += 1;
                findings = check_file(findings, &path, &meta, GATEWAY_USER, &accounts);
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => {
                findings = findings.skipped(format!("{}: {error}; run the doctor as root", path.display()));
            }
        }
    }
    findings.or_ok(format!("{}, each accessible only to its owner", pluralize(count, "file")))
}

fn check_file(
    findings: Findings,
    path: &Path,
    meta: &std::fs::Metadata,
    owner: &str,
    accounts: &Accounts,
) -> Findings {
    let mode = meta.permissions().mode() & 0o7777;
    let path = path.display();
    let findings = if mode & 0o077 == 0 {
        findings
    } else {
        let what = format!("{path} has mode {mode:04o}: other users can access its secrets");
        let next =
            format!("run `chmod 0600 {path}`, then rotate its secrets if other users may have read them");
        findings.problem(what, next)
    };
    match accounts.uid(owner) {
        Some(id) if id != meta.uid() => {
            let what = format!("{path} is owned by uid {}, not by {owner}", meta.uid());
            findings.problem(what, format!("run `chown {owner}: {path}`"))
        }
        _ => findings,
    }
}

/// Returns the machine's accounts, or none if the svc users don't exist. Under a test root, all files have the same
/// owner, so owners aren't checked.
fn read_accounts(layout: &Layout) -> Accounts {
    let accounts = Accounts::load(layout.root());
    if accounts.uid(GATEWAY_USER).is_some() { accounts } else { Accounts::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_secrets_reports_each_file_accessible_to_others() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let paths = [layout.acme_account(), layout.upgrade_token(), layout.files_key()];
        for path in &paths {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "secret").unwrap();
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o644)).unwrap();
        }
        let findings = check_secrets(&layout).into_list();
        assert_eq!(findings.len(), paths.len(), "{findings:?}");
        for (finding, path) in findings.iter().zip(&paths) {
            assert!(finding.what.contains(&path.display().to_string()), "{finding:?}");
        }
    }
}
