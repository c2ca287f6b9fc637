//! Identifies a snapshot that references damaged content, so that an operator can repair or remove it.

use std::cmp::Reverse;
use std::time::{Duration, Instant};

use super::PruneOptions;
use crate::error::FilesError;
use crate::id::Id;
use crate::index::BlobLocations;
use crate::pack::BlobType;
use crate::repository::Repository;
use crate::snapshot::Snapshot;
use crate::tree_reader::TreeReader;
use crate::tree_references::TreeReferences;
use crate::verify::SNAPSHOT_REMEDY;

/// Remedy for a protected snapshot, i.e. the one referenced by the files pointer.
const PROTECTED_SNAPSHOT_REMEDY: &str = "this is the latest snapshot, so do not remove it: run `svc-sync-agent verify \
                                         --all` on its machine, which writes the content again if the machine \
                                         still has it; otherwise restore the pack or, if the pack still exists, run \
                                         `restic rebuild-index`";
/// Search timeout, unless [`PruneOptions::search_deadline`] is set.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(600);

/// Returns an error that identifies a damaged snapshot: a protected one if possible, otherwise the newest. Returns
/// `error` itself if it isn't due to damage (a corrupt or missing object), or if the search finds nothing, fails or
/// times out.
pub(super) async fn name_damaged_snapshot(
    repository: &Repository,
    snapshots: &[(Id, &Snapshot)],
    options: &PruneOptions,
    error: FilesError,
) -> FilesError {
    let remaining = |deadline: Instant| deadline.saturating_duration_since(Instant::now());
    let timeout = options.search_deadline.map_or(SEARCH_TIMEOUT, remaining);
    if !error.is_damage() || timeout.is_zero() {
        return error;
    }
    let search = find_damaged_snapshot(repository, snapshots, &options.protected);
    let named = tokio::time::timeout(timeout, search).await;
    named.ok().and_then(Result::ok).flatten().unwrap_or(error)
}

/// Searches for a snapshot with an unreadable directory or an unindexed chunk, and returns an error that identifies it.
/// Protected snapshots come first: the machine can repair the latest one, which also repairs the others that share the
/// damaged directory. The rest follow, newest first.
///
/// # Errors
/// If the store fails or an index file is corrupt.
async fn find_damaged_snapshot(
    repository: &Repository,
    snapshots: &[(Id, &Snapshot)],
    protected: &[Id],
) -> Result<Option<FilesError>, FilesError> {
    let locations = repository.load_locations().await?;
    let mut trees = TreeReader::without_caching(repository, &locations);
    let mut is_visited = vec![false; locations.len()];
    let mut sorted: Vec<&(Id, &Snapshot)> = snapshots.iter().collect();
    sorted.sort_by_key(|(id, snapshot)| (!protected.contains(id), Reverse(snapshot.time)));
    for (id, snapshot) in sorted {
        match check_trees(&mut trees, &locations, &mut is_visited, snapshot.tree).await {
            Ok(()) => {}
            Err(error) if error.is_damage() => {
                let remedy = if protected.contains(id) { PROTECTED_SNAPSHOT_REMEDY } else { SNAPSHOT_REMEDY };
                let reason = format!("{error}; {remedy}");
                return Ok(Some(FilesError::corrupt(format!("snapshot {id}"), &reason)));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// Reads a snapshot's unvisited trees and checks that the index contains their chunks.
async fn check_trees(
    trees: &mut TreeReader<'_>,
    locations: &BlobLocations,
    is_visited: &mut [bool],
    root: Id,
) -> Result<(), FilesError> {
    let mut pending = vec![root];
    while let Some(id) = pending.pop() {
        let position = locations.position(BlobType::Tree, id)?;
        if std::mem::replace(&mut is_visited[position], true) {
            continue;
        }
        let TreeReferences { subtrees, chunks } = trees.read_references(id).await?;
        for chunk in chunks {
            locations.position(BlobType::Data, chunk)?;
        }
        pending.extend(subtrees);
    }
    Ok(())
}
