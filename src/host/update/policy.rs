//! What must hold before a release is brought: of this machine, and of the release beside the current one.

use jiff::Timestamp;

use super::history;
use super::journal::Allowances;
use crate::clock::rfc3339_ms;
use crate::host::system::layout::Layout;
use crate::host::system::release::Release;
use crate::machine::name::ImageVersion;
use crate::store::bundle::Manifest;

/// Parts that a machine with them cannot do without: its backups, and its owner's desktop. That they are missing shows
/// in no service that fails.
const PARTS: [&str; 2] = ["runtime/postgres/bin/pg_dump", "app/shell"];

/// A rule that forbids an update.
#[derive(Debug, thiserror::Error)]
pub enum Rule {
    #[error("another machine has taken this one's place")]
    Superseded,
    #[error("the machine has not been restored yet")]
    NotRestored,
    #[error("{version} was not well here before: {why} (--allow-quarantined tries it again)")]
    Quarantined { version: ImageVersion, why: String },
    #[error(transparent)]
    Memory(#[from] history::MemoryError),
    #[error("{to} needs at least {needed}, and {from} is current")]
    TooFar { from: ImageVersion, to: ImageVersion, needed: ImageVersion },
    #[error("{} (--allow-downgrade goes back all the same)", older(from, to, *.made, *.current_made))]
    Older { from: ImageVersion, to: ImageVersion, made: Timestamp, current_made: Timestamp },
    #[error("{to} comes without {part}, which {from} has: publish a bundle that has it")]
    LostPart { from: ImageVersion, to: ImageVersion, part: &'static str },
}

/// What decided that a release is older: the times, or between two of one time, the names.
fn older(from: &ImageVersion, to: &ImageVersion, made: Timestamp, current_made: Timestamp) -> String {
    let made_at = rfc3339_ms(made);
    if made == current_made {
        return format!(
            "{to} and {from} were made at the same time ({made_at}), and by its name {to} comes before {from}"
        );
    }
    format!("{to} of {made_at} is older than {from} of {}", rfc3339_ms(current_made))
}

/// Rules of this machine.
///
/// # Errors
/// The [`Rule`] that forbids.
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

/// A release beside the one that it would take the place of.
pub struct Candidate<'a> {
    from: &'a ImageVersion,
    /// Unknown where the current release does not say it.
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

/// Rules of the release. Older is what was made before; of two that were made at one time, what has the lower version.
///
/// # Errors
/// The [`Rule`] that forbids.
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

/// Whether the release, which is on this machine, has the parts that the current one has.
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
    fn older_says_whether_times_or_names_decided() {
        let said = |version: &str, made: &str, from: &str| {
            end(&manifest(version, made, None), from, Allowances::default()).unwrap_err().to_string()
        };
        let of_one_time = said("r1", "2026-06-01T00:00:00Z", "story-1");
        assert!(
            of_one_time.contains("made at the same time")
                && of_one_time.contains("by its name r1 comes before story-1"),
            "{of_one_time}"
        );
        assert!(
            said("r1", "2026-05-31T00:00:00Z", "story-1").contains("is older than story-1 of 2026-06-01")
        );
    }

    #[test]
    fn a_release_can_need_one_before_it() {
        let manifest = manifest("3", "2026-07-01T00:00:00Z", Some("1.10"));
        assert!(matches!(end(&manifest, "1.9", Allowances::default()), Err(Rule::TooFar { .. })));
        end(&manifest, "1.10", Allowances::default()).unwrap();
        end(&manifest, "2", Allowances::default()).unwrap();
    }
}
