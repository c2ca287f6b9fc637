//! Finds the files affected by damaged blobs, with the times of the first and last snapshots in which each is affected.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;

use jiff::Timestamp;

use crate::error::FilesError;
use crate::id::Id;
use crate::index::BlobLocations;
use crate::repository::Repository;
use crate::tree_reader::TreeReader;

/// Maximum number of paths in the result.
const MAX_PATHS: usize = 20;

/// Files and snapshots affected by damaged blobs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AffectedFiles {
    /// The first `MAX_PATHS` affected files: those in the latest snapshot, sorted by path, then the others. If a
    /// directory's tree is damaged, the directory is listed in place of its unknown entries.
    pub paths: Vec<AffectedPath>,
    /// Whether there may be more affected files.
    pub has_more: bool,
    /// Number of affected snapshots.
    pub snapshots: u64,
}

/// Times of the first and last snapshots in which each path is damaged. `find_below` only returns the first paths, so
/// the range can be too narrow if a snapshot has many affected files.
type TimesByPath = BTreeMap<PathBuf, (Timestamp, Timestamp)>;

/// A path relative to the home directory, with the times of the first and last snapshots in which it is damaged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AffectedPath {
    pub path: PathBuf,
    pub first: Timestamp,
    pub last: Timestamp,
}

/// Finds the files affected by damaged blobs across all snapshots. Directories shared between snapshots are read only
/// once.
///
/// # Errors
/// If the store fails, or if the index is corrupt or changed during every attempt to read it. Damaged directories are
/// reported in the result, and corrupt snapshots are skipped.
pub async fn find_affected_files(
    repository: &Repository,
    damaged: &HashSet<Id>,
) -> Result<AffectedFiles, FilesError> {
    let (snapshots, _) = repository.list_intact_snapshots().await?;
    let locations = repository.load_tree_locations().await?;
    let mut search = Search::new(repository, &locations, damaged);
    let mut affected = AffectedFiles::default();
    let (mut in_latest, mut others) = (TimesByPath::new(), TimesByPath::new());
    // Snapshots are sorted newest first.
    for (index, (_, snapshot)) in snapshots.into_iter().enumerate() {
        let paths = search.find_below(snapshot.tree).await?;
        affected.snapshots += u64::from(!paths.is_empty());
        affected.has_more |= paths.len() >= MAX_PATHS;
        for path in paths.iter() {
            let is_in_latest = index == 0 || in_latest.contains_key(path);
            let times_by_path = if is_in_latest { &mut in_latest } else { &mut others };
            let times = times_by_path.entry(path.clone()).or_insert((snapshot.time, snapshot.time));
            *times = (times.0.min(snapshot.time), times.1.max(snapshot.time));
        }
        while others.len() > MAX_PATHS {
            affected.has_more = true;
            others.pop_last();
        }
    }
    affected.has_more |= in_latest.len() + others.len() > MAX_PATHS;
    let listed = in_latest.into_iter().chain(others).take(MAX_PATHS);
    affected.paths = listed.map(|(path, (first, last))| AffectedPath { path, first, last }).collect();
    Ok(affected)
}

struct Search<'a> {
    damaged: &'a HashSet<Id>,
    trees: TreeReader<'a>,
    /// Affected paths below each tree searched so far.
    paths_by_tree: HashMap<Id, SharedPaths>,
    /// Shared empty value for unaffected trees.
    no_paths: SharedPaths,
}

type SharedPaths = Arc<[PathBuf]>;
type SharedPathsFuture<'s> = Pin<Box<dyn Future<Output = Result<SharedPaths, FilesError>> + Send + 's>>;

impl<'a> Search<'a> {
    fn new(repository: &'a Repository, locations: &'a BlobLocations, damaged: &'a HashSet<Id>) -> Self {
        let trees = TreeReader::without_caching(repository, locations);
        Self { damaged, trees, paths_by_tree: HashMap::new(), no_paths: Arc::from([]) }
    }

    /// Returns the first [`MAX_PATHS`] affected paths below a tree, or just the empty path if the tree itself is
    /// damaged. Tree entries are sorted by name, so the paths are in [`Path`] order.
    fn find_below(&mut self, id: Id) -> SharedPathsFuture<'_> {
        Box::pin(async move {
            if let Some(paths) = self.paths_by_tree.get(&id) {
                return Ok(Arc::clone(paths));
            }
            let tree = if self.damaged.contains(&id) {
                // This machine may still have the tree cached, but other machines can't read it.
                Err(FilesError::corrupt(format!("tree {id}"), &"its pack is damaged"))
            } else {
                self.trees.read(id).await
            };
            let paths = match tree {
                Ok(tree) => {
                    let mut paths = Vec::new();
                    for node in tree.nodes {
                        let Some(name) = node.file_name() else { continue };
                        let has_damage = |chunks: &[Id]| chunks.iter().any(|id| self.damaged.contains(id));
                        if node.content.as_deref().is_some_and(has_damage) {
                            paths.push(PathBuf::from(&name));
                        }
                        if let Some(subtree) = node.subtree {
                            let below = self.find_below(subtree).await?;
                            paths.extend(below.iter().map(|path| join(&name, path)));
                        }
                        if paths.len() >= MAX_PATHS {
                            paths.truncate(MAX_PATHS);
                            break;
                        }
                    }
                    paths
                }
                Err(error) if error.is_damage() => vec![PathBuf::new()],
                Err(error) => return Err(error),
            };
            let paths = if paths.is_empty() { Arc::clone(&self.no_paths) } else { Arc::from(paths) };
            self.paths_by_tree.insert(id, Arc::clone(&paths));
            Ok(paths)
        })
    }
}

/// Joins a directory name and a path below it, which is empty if the directory itself is damaged.
fn join(name: &std::ffi::OsStr, below: &Path) -> PathBuf {
    if below.as_os_str().is_empty() { PathBuf::from(name) } else { Path::new(name).join(below) }
}
