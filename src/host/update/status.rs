//! `svc-update status` and `history`: the installed releases, the update in progress and past updates.

use serde::Serialize;

use super::history;
use super::history::QuarantinedRelease;
use super::journal::Journal;
use super::protocol;
use super::protocol::{Outcome, UpdateResult};
use super::releases;
use crate::system::layout::Layout;
use crate::system::release;
use crate::system::release::{Component, Release};
use svc_base::applet::{Exit, Failure, OrExit};
use svc_base::clock::rfc3339_ms;
use svc_machine::name::ImageVersion;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Table,
    Json,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    current: Option<ImageVersion>,
    previous: Option<ImageVersion>,
    releases: Vec<ReleaseRow>,
    quarantined: Vec<QuarantinedRelease>,
    /// The update in progress.
    update: Option<Journal>,
    last: Option<Outcome>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ReleaseRow {
    version: ImageVersion,
    current: bool,
    created_at: Option<String>,
    bundle_sha256: Option<String>,
    components: Vec<Component>,
}

/// Prints the installed releases, the update in progress and the last update.
///
/// # Errors
/// `Internal` if a release or one of the updater's files cannot be read.
pub fn print_status(layout: &Layout, format: Format) -> Result<(), Failure> {
    let status = read_status(layout)?;
    match format {
        Format::Json => {
            let text = serde_json::to_string_pretty(&status).or_exit(Exit::Internal)?;
            println!("{text}");
        }
        Format::Table => print_table(&status),
    }
    Ok(())
}

fn read_status(layout: &Layout) -> Result<Status, Failure> {
    let current = release::current_version(layout);
    let mut releases = Vec::new();
    for version in releases::list_versions(layout).or_exit(Exit::Internal)? {
        let dir = layout.release(&version);
        let release = Release::read(&dir).or_exit(Exit::Internal)?;
        releases.push(ReleaseRow {
            current: current.as_ref() == Some(&version),
            created_at: release.created_at,
            bundle_sha256: release::read_digest(&dir).or_exit(Exit::Internal)?,
            components: release.components,
            version,
        });
    }
    // After a rollback, the recorded previous release is the current one.
    let previous = history::find_previous(layout).or_exit(Exit::Internal)?;
    let previous = previous.filter(|previous| current.as_ref() != Some(previous));
    Ok(Status {
        current,
        previous,
        releases,
        quarantined: history::read_quarantined(layout).or_exit(Exit::Internal)?,
        update: Journal::read(layout).or_exit(Exit::Internal)?,
        last: protocol::read_last(layout).or_exit(Exit::Internal)?.map(|last| last.outcome),
    })
}

fn print_table(status: &Status) {
    if status.releases.is_empty() {
        println!("No release is installed on this machine.");
        return;
    }
    let width = status.releases.iter().map(|row| row.version.as_str().len()).max().unwrap_or(0).max(7);
    println!("  {:width$}  {:24}  BUNDLE", "VERSION", "CREATED");
    for row in &status.releases {
        let marker = if row.current { '*' } else { ' ' };
        let created = row.created_at.as_deref().unwrap_or("-");
        let digest = row.bundle_sha256.as_deref().and_then(|digest| digest.get(..12)).unwrap_or("-");
        println!("{marker} {:width$}  {created:24}  {digest}", row.version.as_str());
    }
    if let Some(update) = &status.update {
        println!(
            "\nin progress: from {} to {}, {}",
            update.plan.from,
            update.plan.to,
            update.state.describe()
        );
        if let Some(wait) = &update.waiting {
            println!("the update {}", wait.describe());
        }
    }
    if let Some(last) = &status.last {
        println!("\nlast update: {}", describe_outcome(last));
    }
    for quarantined in &status.quarantined {
        println!("quarantined: {}, {}: {}", quarantined.version, rfc3339_ms(quarantined.at), quarantined.why);
    }
}

fn describe_outcome(outcome: &Outcome) -> String {
    let result = match outcome.outcome {
        UpdateResult::Updated => "updated",
        UpdateResult::RolledBack => "rolled back",
        UpdateResult::Refused => "refused",
        UpdateResult::Failed => "failed",
    };
    let error =
        outcome.error.as_deref().map(|error| format!(" ({}): {error}", outcome.stage)).unwrap_or_default();
    format!("{} {result} at {}{error}", outcome.version, rfc3339_ms(outcome.at))
}

/// Prints the updates that ended on this machine.
///
/// # Errors
/// `Internal` if the history cannot be read.
pub fn print_history(layout: &Layout, format: Format) -> Result<(), Failure> {
    let entries = history::read_history(layout).or_exit(Exit::Internal)?;
    match format {
        Format::Json => println!("{}", serde_json::to_string_pretty(&entries).or_exit(Exit::Internal)?),
        Format::Table if entries.is_empty() => println!("No updates have been recorded on this machine."),
        Format::Table => {
            entries
                .iter()
                .for_each(|entry| println!("{} -> {}", entry.from, describe_outcome(&entry.outcome)));
        }
    }
    Ok(())
}
