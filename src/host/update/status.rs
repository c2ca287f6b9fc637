//! `svc-update status`: the releases on this machine, and which is current.

use serde::Serialize;

use super::place;
use crate::applet::{Exit, Failure, OrExit};
use crate::host::layout::Layout;
use crate::host::release::{self, Component, Release};
use crate::machine::name::ImageVersion;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Table,
    Json,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    current: Option<ImageVersion>,
    releases: Vec<Row>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    version: ImageVersion,
    current: bool,
    created_at: Option<String>,
    bundle_sha256: Option<String>,
    components: Vec<Component>,
}

/// # Errors
/// When a release cannot be read.
pub fn print(layout: &Layout, format: Format) -> Result<(), Failure> {
    let status = read(layout)?;
    match format {
        Format::Json => {
            let text = serde_json::to_string_pretty(&status).or_exit(Exit::Internal)?;
            println!("{text}");
        }
        Format::Table => print_table(&status),
    }
    Ok(())
}

fn read(layout: &Layout) -> Result<Status, Failure> {
    let current = release::current(layout);
    let mut releases = Vec::new();
    for version in place::versions(layout).or_exit(Exit::Internal)? {
        let dir = layout.release(&version);
        let manifest = Release::read(&dir).or_exit(Exit::Internal)?;
        releases.push(Row {
            current: current.as_ref() == Some(&version),
            created_at: manifest.created_at,
            bundle_sha256: release::digest(&dir).or_exit(Exit::Internal)?,
            components: manifest.components,
            version,
        });
    }
    Ok(Status { current, releases })
}

fn print_table(status: &Status) {
    if status.releases.is_empty() {
        println!("There is no release on this machine.");
        return;
    }
    let wide = status.releases.iter().map(|row| row.version.as_str().len()).max().unwrap_or(0).max(7);
    println!("  {:wide$}  {:24}  BUNDLE", "VERSION", "CREATED");
    for row in &status.releases {
        let mark = if row.current { '*' } else { ' ' };
        let created = row.created_at.as_deref().unwrap_or("-");
        let digest = row.bundle_sha256.as_deref().and_then(|digest| digest.get(..12)).unwrap_or("-");
        println!("{mark} {:wide$}  {created:24}  {digest}", row.version.as_str());
    }
}
