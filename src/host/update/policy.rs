//! Conditions for an update: of this machine, and of the new release compared with the current one.

use jiff::Timestamp;

use super::history;
use super::journal::Allowances;
use crate::system::layout::Layout;
use crate::system::release::Release;
use svc_base::clock::rfc3339_ms;
use svc_machine::name::ImageVersion;
use svc_store::bundle::Manifest;

/// Parts that a release must not drop: backup tools and the owner's desktop. No service fails without them, so the
/// health check would miss their absence.
const REQUIRED_PARTS: [&str; 2] = ["runtime/postgres/bin/pg_dump", "app/shell"];

/// The policy that forbids an update.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    #[error("another machine has taken this one's place")]
    Superseded,
    #[error("the machine has not been restored yet")]
    NotRestored,
    #[error("{version} is quarantined: {why} (--allow-quarantined tries it again)")]
    Quarantined { version: ImageVersion, why: String },
    #[error(transparent)]
    History(#[from] history::HistoryError),
    #[error("{to} needs at least {needed}, and {from} is current")]
    TooFar { from: ImageVersion, to: ImageVersion, needed: ImageVersion },
    #[error("{} (--allow-downgrade installs it anyway)", describe_older(from, to, *.created, *.current_created))]
    Older { from: ImageVersion, to: ImageVersion, created: Timestamp, current_created: Timestamp },
    #[error("{to} lacks {part}, which {from} has: publish a bundle that contains it")]
    LostPart { from: ImageVersion, to: ImageVersion, part: &'static str },
}

/// Why a release is older: its time, or between two of the same time, its name.
fn describe_older(
    from: &ImageVersion,
    to: &ImageVersion,
    created: Timestamp,
    current_created: Timestamp,
) -> String {
    let created_at = rfc3339_ms(created);
    if created == current_created {
        return format!(
            "{to} and {from} were made at the same time ({created_at}), and by its name {to} comes before {from}"
        );
    }
    format!("{to} of {created_at} is older than {from} of {}", rfc3339_ms(current_created))
}

/// Checks the state of this machine.
///
/// # Errors
/// The violated [`PolicyError`].
pub fn check_machine(layout: &Layout, to: &ImageVersion, allow: Allowances) -> Result<(), PolicyError> {
    if layout.superseded().exists() {
        return Err(PolicyError::Superseded);
    }
    if !layout.restore_complete().exists() {
        return Err(PolicyError::NotRestored);
    }
    let known = history::quarantined(layout)?.into_iter().find(|one| one.version == *to);
    match known {
        Some(known) if !allow.quarantined => {
            Err(PolicyError::Quarantined { version: known.version, why: known.why })
        }
        _ => Ok(()),
    }
}

/// A release, compared with the one that it would replace.
pub struct Candidate<'a> {
    from: &'a ImageVersion,
    /// `None` if the current release does not state it.
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

/// Checks the release. The creation time decides which release is older; the version decides between equal times.
///
/// # Errors
/// The violated [`PolicyError`].
pub fn check_release(candidate: &Candidate<'_>, allow: Allowances) -> Result<(), PolicyError> {
    let Candidate { from, current_created, manifest } = candidate;
    let (from, to) = ((*from).clone(), manifest.image_version.clone());
    if let Some(needed) = manifest.min_version.clone().filter(|needed| from.cmp_natural(needed).is_lt()) {
        return Err(PolicyError::TooFar { from, to, needed });
    }
    let created = manifest.created_at;
    let current_created = current_created.unwrap_or(created);
    if (created, to.cmp_natural(&from)) < (current_created, std::cmp::Ordering::Equal) && !allow.downgrade {
        return Err(PolicyError::Older { from, to, created, current_created });
    }
    Ok(())
}

/// Checks that the installed release has the required parts of the current one.
///
/// # Errors
/// [`PolicyError::LostPart`].
pub fn check_parts(layout: &Layout, from: &ImageVersion, to: &ImageVersion) -> Result<(), PolicyError> {
    let has = |version: &ImageVersion, part: &str| layout.release(version).join(part).exists();
    match REQUIRED_PARTS.into_iter().find(|part| has(from, part) && !has(to, part)) {
        Some(part) => Err(PolicyError::LostPart { from: from.clone(), to: to.clone(), part }),
        None => Ok(()),
    }
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
        }
    }

    fn end(manifest: &Manifest, from: &str, allow: Allowances) -> Result<(), PolicyError> {
        let from = from.parse().unwrap();
        let current_created = Some("2026-06-01T00:00:00Z".parse().unwrap());
        check_release(&Candidate { from: &from, current_created, manifest }, allow)
    }

    #[test]
    fn older_release_needs_allowance() {
        let none = Allowances::default();
        let downgrade = Allowances { downgrade: true, quarantined: false };
        for (version, created, older) in [
            ("9", "2026-06-02T00:00:00Z", false),
            ("1", "2026-06-02T00:00:00Z", false),
            ("9", "2026-05-31T00:00:00Z", true),
            ("1.9", "2026-06-01T00:00:00Z", true),
            ("1.11", "2026-06-01T00:00:00Z", false),
        ] {
            let manifest = manifest(version, created, None);
            assert_eq!(
                matches!(end(&manifest, "1.10", none), Err(PolicyError::Older { .. })),
                older,
                "{version} {created}"
            );
            end(&manifest, "1.10", downgrade).unwrap();
        }
    }

    #[test]
    fn older_reports_whether_times_or_names_decided() {
        let describe = |version: &str, made: &str, from: &str| {
            end(&manifest(version, made, None), from, Allowances::default()).unwrap_err().to_string()
        };
        let of_one_time = describe("r1", "2026-06-01T00:00:00Z", "story-1");
        assert!(
            of_one_time.contains("made at the same time")
                && of_one_time.contains("by its name r1 comes before story-1"),
            "{of_one_time}"
        );
        assert!(
            describe("r1", "2026-05-31T00:00:00Z", "story-1").contains("is older than story-1 of 2026-06-01")
        );
    }

    #[test]
    fn release_can_require_earlier_one() {
        let manifest = manifest("3", "2026-07-01T00:00:00Z", Some("1.10"));
        assert!(matches!(end(&manifest, "1.9", Allowances::default()), Err(PolicyError::TooFar { .. })));
        end(&manifest, "1.10", Allowances::default()).unwrap();
        end(&manifest, "2", Allowances::default()).unwrap();
    }
}
