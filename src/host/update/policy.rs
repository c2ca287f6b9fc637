//! Checks whether an update is permitted, from the state of this machine and a comparison of the new release with the
//! current one.

use jiff::Timestamp;

use super::history;
use super::journal::Allowances;
use crate::system::layout::Layout;
use crate::system::release::Release;
use svc_base::clock::rfc3339_ms;
use svc_machine::name::ImageVersion;
use svc_store::bundle::Manifest;

/// Parts that a release must not drop, even if their removal is allowed: the backup tools and the shell.
/// None of the checked services fails without them, so the health check would not detect their absence.
const REQUIRED_PARTS: [&str; 2] = ["runtime/postgres/bin/pg_dump", "app/shell"];
/// Bundled apps are copied to the owner's home directory, where they stay, so a release that drops one removes nothing.
const BUNDLED_APPS_PREFIX: &str = "app/apps/";

/// The reason an update is not permitted.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    #[error("this machine has been replaced or deleted")]
    Superseded,
    #[error("the machine has not been restored yet")]
    NotRestored,
    #[error("{version} is quarantined: {reason} (to install it anyway, use --allow-quarantined)")]
    Quarantined { version: ImageVersion, reason: String },
    #[error(transparent)]
    History(#[from] history::HistoryError),
    #[error("{to} requires at least {needed}, but {from} is current: update to {needed} first")]
    BelowMinVersion { from: ImageVersion, to: ImageVersion, needed: ImageVersion },
    #[error("{} (to install it anyway, use --allow-downgrade)", describe_older(from, to, *.created, *.current_created))]
    Older { from: ImageVersion, to: ImageVersion, created: Timestamp, current_created: Option<Timestamp> },
    #[error("{to} lacks {part}, which {from} has: publish a bundle that contains it")]
    MissingRequiredPart { from: ImageVersion, to: ImageVersion, part: &'static str },
    #[error(
        "{to} lacks {}, which {from} has: publish a bundle that contains them, or one whose manifest removes them (to \
         install this one anyway, use {})",
        .parts.join(", "), removal_arguments(.parts)
    )]
    MissingParts { from: ImageVersion, to: ImageVersion, parts: Vec<String> },
}

/// Returns the arguments that permit the removal of these parts.
fn removal_arguments(parts: &[String]) -> String {
    parts.iter().map(|part| format!("--allow-removal {part}")).collect::<Vec<_>>().join(" ")
}

/// Explains why a release is older: because of its creation time or, if the times are equal or the current release's is
/// unknown, its name.
fn describe_older(
    from: &ImageVersion,
    to: &ImageVersion,
    created: Timestamp,
    current_created: Option<Timestamp>,
) -> String {
    let Some(current_created) = current_created else {
        return format!("it is unknown when {from} was created, and the name {to} comes before {from}");
    };
    let created_at = rfc3339_ms(created);
    if created == current_created {
        return format!(
            "{to} and {from} were created at the same time ({created_at}), and the name {to} comes before {from}"
        );
    }
    let current_created_at = rfc3339_ms(current_created);
    format!("{to}, created at {created_at}, is older than {from}, created at {current_created_at}")
}

/// Checks that this machine may be updated, and that the release is not quarantined on it.
///
/// # Errors
/// `Superseded` if this machine has been replaced or deleted; `NotRestored` if it has not been restored yet;
/// `Quarantined` if the release is quarantined, unless that is allowed; `History` if the quarantined releases cannot be
/// read.
pub fn check_machine(layout: &Layout, to: &ImageVersion, allow: &Allowances) -> Result<(), PolicyError> {
    if layout.superseded().exists() {
        return Err(PolicyError::Superseded);
    }
    if !layout.restore_complete().exists() {
        return Err(PolicyError::NotRestored);
    }
    let quarantined = history::read_quarantined(layout)?.into_iter().find(|release| release.version == *to);
    match quarantined {
        Some(release) if !allow.quarantined => {
            Err(PolicyError::Quarantined { version: release.version, reason: release.why })
        }
        _ => Ok(()),
    }
}

/// A release, compared with the one that it would replace.
pub struct Candidate<'a> {
    from: &'a ImageVersion,
    /// `None` if the current release does not record its creation time, or its `release.json` cannot be read.
    current_created: Option<Timestamp>,
    manifest: &'a Manifest,
}

impl<'a> Candidate<'a> {
    pub fn new(layout: &Layout, from: &'a ImageVersion, manifest: &'a Manifest) -> Self {
        let release = Release::read(&layout.release(from)).ok();
        let current_created = release.and_then(|release| release.created_at?.parse().ok());
        Self { from, current_created, manifest }
    }
}

/// Checks that the current release is not too old for the new one, and that the new one is not older. The creation time
/// decides which release is older. If the times are equal, or the current release's is unknown, the version decides.
///
/// # Errors
/// [`PolicyError::BelowMinVersion`] if the current release is too old for the new one; [`PolicyError::Older`] if the
/// new one is older, unless a downgrade is allowed.
pub fn check_release(candidate: &Candidate<'_>, allow: &Allowances) -> Result<(), PolicyError> {
    let Candidate { from, current_created, manifest } = *candidate;
    let (from, to) = (from.clone(), manifest.image_version.clone());
    if let Some(needed) = manifest.min_version.clone().filter(|needed| from.cmp_natural(needed).is_lt()) {
        return Err(PolicyError::BelowMinVersion { from, to, needed });
    }
    let created = manifest.created_at;
    let is_older =
        (created, to.cmp_natural(&from)) < (current_created.unwrap_or(created), std::cmp::Ordering::Equal);
    if is_older && !allow.downgrade {
        return Err(PolicyError::Older { from, to, created, current_created });
    }
    Ok(())
}

/// Checks that the new release, which is already unpacked, has all parts of the current one, except those that its
/// manifest removes or whose removal an operator allows.
///
/// # Errors
/// [`PolicyError::MissingRequiredPart`] if a part is missing that no release may drop; [`PolicyError::MissingParts`] if
/// other parts are missing.
pub fn check_parts(
    layout: &Layout,
    from: &ImageVersion,
    manifest: &Manifest,
    allow: &Allowances,
) -> Result<(), PolicyError> {
    let to = &manifest.image_version;
    let has = |version: &ImageVersion, part: &str| layout.release(version).join(part).exists();
    if let Some(part) = REQUIRED_PARTS.into_iter().find(|part| has(from, part) && !has(to, part)) {
        return Err(PolicyError::MissingRequiredPart { from: from.clone(), to: to.clone(), part });
    }
    let next = list_installed_parts(layout, to);
    let is_allowed = |part: &String| manifest.removes.contains(part) || allow.removal.contains(part);
    let is_removed = |part: &String| !next.contains(part) && !is_allowed(part);
    let parts: Vec<String> = list_installed_parts(layout, from).into_iter().filter(is_removed).collect();
    if parts.is_empty() {
        return Ok(());
    }
    Err(PolicyError::MissingParts { from: from.clone(), to: to.clone(), parts })
}

/// Returns the parts, except bundled apps, that `release.json` lists and that the release contains. A release without a
/// valid list, such as an older one, has none.
fn list_installed_parts(layout: &Layout, version: &ImageVersion) -> Vec<String> {
    let dir = layout.release(version);
    let components = Release::read(&dir).map(|release| release.components).unwrap_or_default();
    let is_part = |path: &String| !path.starts_with(BUNDLED_APPS_PREFIX) && dir.join(path).exists();
    let parts = components.into_iter().filter(|component| component.path.as_ref().is_some_and(is_part));
    parts.map(|component| component.name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest(version: &str, created: &str, min: Option<&str>) -> Manifest {
        Manifest {
            version: 1,
            image_version: version.parse().unwrap(),
            sha256: "0".repeat(64),
            size_bytes: 1,
            min_version: min.map(|min| min.parse().unwrap()),
            created_at: created.parse().unwrap(),
            expires_at: "2030-01-01T00:00:00Z".parse().unwrap(),
            trusted_keys: None,
            removes: Vec::new(),
        }
    }

    fn check(manifest: &Manifest, from: &str, allow: &Allowances) -> Result<(), PolicyError> {
        let from = from.parse().unwrap();
        let current_created = Some("2026-06-01T00:00:00Z".parse().unwrap());
        check_release(&Candidate { from: &from, current_created, manifest }, allow)
    }

    #[test]
    fn check_release_rejects_downgrade_without_allowance() {
        let downgrade = || Allowances { downgrade: true, ..Allowances::default() };
        for (version, created, is_older) in [
            ("9", "2026-06-02T00:00:00Z", false),
            ("1", "2026-06-02T00:00:00Z", false),
            ("9", "2026-05-31T00:00:00Z", true),
            ("1.9", "2026-06-01T00:00:00Z", true),
            ("1.11", "2026-06-01T00:00:00Z", false),
        ] {
            let manifest = manifest(version, created, None);
            assert_eq!(
                matches!(check(&manifest, "1.10", &Allowances::default()), Err(PolicyError::Older { .. })),
                is_older,
                "{version} {created}"
            );
            check(&manifest, "1.10", &downgrade()).unwrap();
        }
    }

    #[test]
    fn older_error_gives_time_or_name_as_reason() {
        let describe = |version: &str, created: &str, from: &str| {
            check(&manifest(version, created, None), from, &Allowances::default()).unwrap_err().to_string()
        };
        let same_time = describe("r1", "2026-06-01T00:00:00Z", "v1");
        assert!(
            same_time.contains("created at the same time")
                && same_time.contains("the name r1 comes before v1"),
            "{same_time}"
        );
        assert!(
            describe("r1", "2026-05-31T00:00:00Z", "v1").contains("is older than v1, created at 2026-06-01")
        );
        let (from, manifest) = ("v1".parse().unwrap(), manifest("r1", "2026-06-01T00:00:00Z", None));
        let candidate = Candidate { from: &from, current_created: None, manifest: &manifest };
        let unknown_time = check_release(&candidate, &Allowances::default()).unwrap_err().to_string();
        assert!(
            unknown_time.contains("unknown when v1 was created, and the name r1 comes before v1"),
            "{unknown_time}"
        );
    }

    #[test]
    fn check_parts_rejects_missing_part_without_allowance() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let release = |version: &str, parts: &[(&str, &str)]| -> ImageVersion {
            let components: Vec<_> = parts
                .iter()
                .map(|(name, path)| {
                    std::fs::create_dir_all(dir.path().join("opt/svc/releases").join(version).join(path))
                        .unwrap();
                    serde_json::json!({ "name": name, "version": "1", "path": path })
                })
                .collect();
            let text = serde_json::json!({ "version": 1, "imageVersion": version, "components": components });
            let version: ImageVersion = version.parse().unwrap();
            std::fs::create_dir_all(layout.release(&version)).unwrap();
            std::fs::write(layout.release(&version).join("release.json"), text.to_string()).unwrap();
            version
        };
        let (code, agent) =
            (("code-server", "runtime/code-server"), ("agents/claude", "runtime/agents/claude"));
        let old = release("1", &[("svc", "bin/svc"), code, agent, ("notes", "app/apps/notes")]);
        let new = release("2", &[("svc", "bin/svc")]);
        let owned = |parts: &[&str]| parts.iter().map(|part| (*part).to_owned()).collect::<Vec<_>>();
        let check_with = |from, to: &ImageVersion, allowed: &[&str], removes: &[&str]| {
            let mut manifest = manifest(to.as_str(), "2026-06-01T00:00:00Z", None);
            manifest.removes = owned(removes);
            let allow = Allowances { removal: owned(allowed), ..Allowances::default() };
            check_parts(&layout, from, &manifest, &allow)
        };
        let check = |from, to: &ImageVersion, allowed: &[&str]| check_with(from, to, allowed, &[]);
        let error = check(&old, &new, &[]).unwrap_err().to_string();
        assert!(error.contains("2 lacks code-server, agents/claude, which 1 has"), "{error}");
        assert!(error.contains("--allow-removal code-server --allow-removal agents/claude"), "{error}");
        let error = check(&old, &new, &["code-server"]).unwrap_err().to_string();
        assert!(error.contains("2 lacks agents/claude, which"), "{error}");
        check(&old, &new, &["code-server", "agents/claude"]).unwrap();
        check_with(&old, &new, &["code-server"], &["agents/claude"]).unwrap();
        assert!(check_with(&old, &new, &[], &["agents/claude"]).is_err());
        check(&new, &old, &[]).unwrap();
        // A part that is listed but missing counts as removed.
        let listed = release("3", &[("svc", "bin/svc"), code, agent]);
        std::fs::remove_dir(layout.release(&listed).join(code.1)).unwrap();
        assert!(check(&old, &listed, &[]).unwrap_err().to_string().contains("3 lacks code-server, which"));
    }

    #[test]
    fn check_release_enforces_min_version() {
        let manifest = manifest("3", "2026-07-01T00:00:00Z", Some("1.10"));
        assert!(matches!(
            check(&manifest, "1.9", &Allowances::default()),
            Err(PolicyError::BelowMinVersion { .. })
        ));
        check(&manifest, "1.10", &Allowances::default()).unwrap();
        check(&manifest, "2", &Allowances::default()).unwrap();
    }
}
