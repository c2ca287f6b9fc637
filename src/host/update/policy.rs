//! Conditions for an update: of this machine, and of the new release compared with the current one.

use jiff::Timestamp;

use super::history;
use super::journal::Allowances;
use crate::clock::rfc3339_ms;
use crate::host::system::layout::Layout;
use crate::host::system::release::Release;
use crate::machine::name::ImageVersion;
use crate::store::bundle::Manifest;

/// Parts that a release must not drop: backup tools and the owner's desktop. No service fails without them, so the
/// health check would miss their absence.
const PARTS: [&str; 2] = ["runtime/postgres/bin/pg_dump", "app/shell"];

/// The policy that forbids an update.
#[derive(Debug, thiserror::Error)]
pub enum Rule {
    #[error("another machine has taken this one's place")]
    Superseded,
    #[error("the machine has not been restored yet")]
    NotRestored,
    #[error("{version} is quarantined: {why} (--allow-quarantined tries it again)")]
    Quarantined { version: ImageVersion, why: String },
    #[error(transparent)]
    Memory(#[from] history::MemoryError),
    #[error("{to} needs at least {needed}, and {from} is current")]
    #[error("{to} requires at least {needed}, and {from} is current")]
    #[error("{to} of {} is older than {from} of {} (--allow-downgrade installs it anyway)", rfc3339_ms(*.created), rfc3339_ms(*.current_created))]
    Older { from: ImageVersion, to: ImageVersion, made: Timestamp, current_made: Timestamp },
    #[error("{to} lacks {part}, which {from} has: publish a bundle that contains it")]
    LostPart { from: ImageVersion, to: ImageVersion, part: &'static str },
}

/// Checks the state of this machine.
///
/// # Errors
/// The violated [`Rule`].
pub fn here(layout: &Layout, to: &ImageVersion, allow: Allowances) -> Result<(), Rule> {
    if layout.superseded().exists() {
        return Err(Rule::Superseded);
    }
    if !layout.restore_complete().exists() {
        return Err(Rule::NotRestored);
    }
    let known = history::quarantined(layout)?.into_iter().find(|one| one.version == *to);
    match known {
        Some(known) if !allow.quarantined => {
            Err(Rule::Quarantined { version: known.version, why: known.why })
        }
        _ => Ok(()),
    }
}

/// A release, compared with the one that it would replace.
pub struct Candidate<'a> {
    from: &'a ImageVersion,
    /// `None` if the current release does not state it.
    current_made: Option<Timestamp>,
    manifest: &'a Manifest,
}

impl<'a> Candidate<'a> {
    pub fn new(layout: &Layout, from: &'a ImageVersion, manifest: &'a Manifest) -> Self {
        let release = Release::read(&layout.release(from)).ok();
        let current_made = release.and_then(|release| release.created_at?.parse().ok());
        Self { from, current_made, manifest }
    }
}

/// Checks the release. The creation time decides which release is older; the version decides between equal times.
///
/// # Errors
/// The violated [`Rule`].
pub fn of_release(candidate: &Candidate<'_>, allow: Allowances) -> Result<(), Rule> {
    let Candidate { from, current_made, manifest } = candidate;
    let (from, to) = ((*from).clone(), manifest.image_version.clone());
    if let Some(needed) = manifest.min_version.clone().filter(|needed| from.cmp_natural(needed).is_lt()) {
        return Err(Rule::TooFar { from, to, needed });
    }
    let made = manifest.created_at;
    let current_made = current_made.unwrap_or(made);
    if (made, to.cmp_natural(&from)) < (current_made, std::cmp::Ordering::Equal) && !allow.downgrade {
        return Err(Rule::Older { from, to, made, current_made });
    }
    Ok(())
}

/// Checks that the installed release has the required parts of the current one.
///
/// # Errors
/// [`Rule::LostPart`].
pub fn parts(layout: &Layout, from: &ImageVersion, to: &ImageVersion) -> Result<(), Rule> {
    let has = |version: &ImageVersion, part: &str| layout.release(version).join(part).exists();
    match PARTS.into_iter().find(|part| has(from, part) && !has(to, part)) {
        Some(part) => Err(Rule::LostPart { from: from.clone(), to: to.clone(), part }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest(version: &str, made: &str, min: Option<&str>) -> Manifest {
        Manifest {
            version: 1,
            image_version: version.parse().unwrap(),
            sha256: "0".repeat(64),
            size_bytes: 1,
            min_version: min.map(|min| min.parse().unwrap()),
            created_at: made.parse().unwrap(),
            expires_at: "2030-01-01T00:00:00Z".parse().unwrap(),
            trusted_keys: None,
        }
    }

    fn end(manifest: &Manifest, from: &str, allow: Allowances) -> Result<(), Rule> {
        let from = from.parse().unwrap();
        let current_made = Some("2026-06-01T00:00:00Z".parse().unwrap());
        of_release(&Candidate { from: &from, current_made, manifest }, allow)
    }

    #[test]
    fn older_than_current_needs_to_be_allowed() {
        let none = Allowances::default();
        let downgrade = Allowances { downgrade: true, quarantined: false };
        for (version, made, older) in [
            ("9", "2026-06-02T00:00:00Z", false),
            ("1", "2026-06-02T00:00:00Z", false),
            ("9", "2026-05-31T00:00:00Z", true),
            ("1.9", "2026-06-01T00:00:00Z", true),
            ("1.11", "2026-06-01T00:00:00Z", false),
        ] {
            let manifest = manifest(version, made, None);
            assert_eq!(
                matches!(end(&manifest, "1.10", none), Err(Rule::Older { .. })),
                older,
                "{version} {made}"
            );
            end(&manifest, "1.10", downgrade).unwrap();
        }
    }

    #[test]
    fn a_release_can_need_one_before_it() {
        let manifest = manifest("3", "2026-07-01T00:00:00Z", Some("1.10"));
        assert!(matches!(end(&manifest, "1.9", Allowances::default()), Err(Rule::TooFar { .. })));
        end(&manifest, "1.10", Allowances::default()).unwrap();
        end(&manifest, "2", Allowances::default()).unwrap();
    }
}
