//! Verifies pack contents against the index. Packs marked for deletion are skipped.
//!
//! A blob that is corrupt in one pack isn't lost if another pack has an intact copy. [`crate::affected`] finds the
//! files affected by lost blobs, and a save rewrites these blobs if the machine still has the content.

use std::collections::{BTreeMap, HashMap, HashSet};

use futures_util::{StreamExt, stream};

use crate::blocking::run_blocking;
use crate::error::FilesError;
use crate::id::Id;
use crate::index::{IndexFile, IndexedPack};
use crate::pack::{BlobType, PackedBlob, open_blob, parse_header};
use crate::repository::Repository;
use crate::snapshot::Snapshot;
use crate::tree_reader::TreeReader;

const MAX_CONCURRENT_READS: usize = 2;
/// Remedy for a snapshot whose trees or chunks aren't in the index.
pub(crate) const SNAPSHOT_REMEDY: &str = "run `restic rebuild-index` if its pack still exists; otherwise restore \
                                          the pack, or remove the snapshot with `restic forget`";

/// A share of the packs: those whose first 16 id bits, modulo `count`, equal `index`. The shares for all values of
/// `index` below `count` together cover every pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackShare {
    pub index: u16,
    pub count: u16,
}

impl PackShare {
    pub const ALL: Self = Self { index: 0, count: 1 };

    pub fn contains(self, pack: Id) -> bool {
        let [first, second, ..] = pack.as_bytes();
        u16::from_be_bytes([*first, *second]) % self.count.max(1) == self.index
    }
}

/// Result of [`verify`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VerifyReport {
    pub packs: u64,
    pub bytes: u64,
    /// Packs with corrupt blobs that have no intact copy in any other pack. May include packs of other shares.
    pub damaged: Vec<DamagedPack>,
    /// Damaged packs whose content is recoverable: each blob is intact, or has an intact copy in another pack.
    pub recoverable: Vec<DamagedPack>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DamagedPack {
    pub pack: Id,
    pub reason: String,
    /// Blobs without an intact copy in this or any other pack.
    pub blobs: Vec<Id>,
}

/// Finds a tree or chunk of the `latest` snapshot that is missing from the index, and returns an error describing it.
/// Doesn't read chunks. Skips unreadable trees, since [`verify`] detects the damage to their packs. `uncached` is the
/// same repository opened without a cache, which would mask index corruption.
///
/// # Errors
/// If the store fails; [`FilesError::Corrupt`] if an index file is corrupt; [`FilesError::IndexChanging`] if the index
/// changed during every attempt to read it.
pub async fn find_unindexed_blob(
    repository: &Repository,
    uncached: &Repository,
    latest: &Snapshot,
) -> Result<Option<FilesError>, FilesError> {
    let locations = uncached.load_locations().await?;
    let error_if_missing = |blob_type, id: Id, kind: &str| {
        locations.find(blob_type, id).err()?;
        let reason =
            "missing from the index; `restic rebuild-index` restores the entry if the pack still exists";
        Some(FilesError::corrupt(format!("{kind} {id}"), &reason))
    };
    let mut trees = TreeReader::new(repository, &locations);
    let mut seen = HashSet::new();
    let mut pending = vec![latest.tree];
    while let Some(id) = pending.pop() {
        if !seen.insert(id) {
            continue;
        }
        if let Some(error) = error_if_missing(BlobType::Tree, id, "tree") {
            return Ok(Some(error));
        }
        let nodes = match trees.read(id).await {
            Ok(tree) => tree.nodes,
            Err(error) if error.is_damage() => continue,
            Err(error) => return Err(error),
        };
        for node in nodes {
            pending.extend(node.subtree);
            let mut chunks = node.content.iter().flatten();
            let error = chunks.find_map(|chunk| error_if_missing(BlobType::Data, *chunk, "chunk"));
            if error.is_some() {
                return Ok(error);
            }
        }
    }
    Ok(None)
}

/// Finds an unrestorable snapshot: one that is corrupt, or whose root directory is missing from the index. The
/// repository can't be pruned until it is repaired or removed. Other snapshots aren't affected. `uncached` is the same
/// repository opened without a cache, which would mask corruption.
///
/// # Errors
/// See [`find_unindexed_blob`].
pub async fn find_unusable_snapshot(
    repository: &Repository,
    uncached: &Repository,
) -> Result<Option<FilesError>, FilesError> {
    // List snapshots before reading the index, so that it contains their trees.
    let (snapshots, damaged) = uncached.list_intact_snapshots().await?;
    if let Some(first) = damaged.first() {
        let others = match damaged.len() - 1 {
            0 => String::new(),
            others => format!(" (and {others} more)"),
        };
        let remedy = "restore its object in the store, or delete it with the store's tools";
        let reason = format!("unreadable{others}; {remedy}");
        return Ok(Some(FilesError::corrupt(format!("snapshot {first}"), &reason)));
    }
    let locations = repository.load_tree_locations().await?;
    Ok(snapshots.into_iter().find_map(|(id, snapshot)| {
        let error = locations.find(BlobType::Tree, snapshot.tree).err()?;
        Some(FilesError::corrupt(format!("snapshot {id}"), &format!("{error}; {SNAPSHOT_REMEDY}")))
    }))
}

/// Verifies a share of the packs and reports damaged ones.
///
/// # Errors
/// If the store fails, or if the index is corrupt or changed during every attempt to read it. Missing packs aren't an
/// error; they are reported as damaged.
pub async fn verify(repository: &Repository, share: PackShare) -> Result<VerifyReport, FilesError> {
    let index = repository.load_index().await?;
    let packs: Vec<IndexedPack> = index
        .iter()
        .flat_map(|(_, file)| &file.packs)
        .filter(|pack| share.contains(pack.id))
        .cloned()
        .collect();
    let checks = packs.into_iter().map(|pack| verify_pack(repository, pack));
    let mut checks = stream::iter(checks).buffer_unordered(MAX_CONCURRENT_READS);
    let mut verified = VerifyReport::default();
    let mut damaged_packs = Vec::new();
    while let Some(check) = checks.next().await {
        let (bytes, damage) = check?;
        verified.packs += 1;
        verified.bytes += bytes;
        damaged_packs.extend(damage);
    }
    damaged_packs.sort_by_key(|damage: &Damage| damage.pack);
    let copies = BlobCopies::find(&index, &damaged_packs);
    let mut other_packs: BTreeMap<Id, Vec<Id>> = BTreeMap::new();
    for Damage { pack, reason, blobs } in damaged_packs {
        let mut lost = Vec::new();
        for blob in blobs {
            if let Some(damaged_copies) = copies.find_damaged_copies(repository, pack, &blob).await? {
                lost.push(blob.id);
                for other in damaged_copies.into_iter().filter(|other| !share.contains(*other)) {
                    other_packs.entry(other).or_default().push(blob.id);
                }
            }
        }
        let damaged = DamagedPack { pack, reason, blobs: lost };
        let list = if damaged.blobs.is_empty() { &mut verified.recoverable } else { &mut verified.damaged };
        list.push(damaged);
    }
    // If only one of a lost blob's packs were known to be damaged, a save wouldn't rewrite the blob.
    verified.damaged.extend(other_packs.into_iter().map(|(pack, blobs)| {
        let reason = "contains another corrupt copy of a lost blob".to_owned();
        DamagedPack { pack, reason, blobs }
    }));
    Ok(verified)
}

/// A damaged pack and its unreadable blobs.
struct Damage {
    pack: Id,
    reason: String,
    blobs: Vec<PackedBlob>,
}

/// All copies of unreadable blobs, with their packs.
struct BlobCopies(HashMap<(BlobType, Id), Vec<(Id, PackedBlob)>>);

impl BlobCopies {
    fn find(index: &[(Id, IndexFile)], damaged_packs: &[Damage]) -> Self {
        let key = |blob: &PackedBlob| (blob.blob_type, blob.id);
        let wanted: HashSet<_> = damaged_packs.iter().flat_map(|damage| &damage.blobs).map(key).collect();
        let mut copies: HashMap<_, Vec<_>> = HashMap::new();
        let packs = index.iter().flat_map(|(_, file)| file.packs.iter().chain(&file.packs_to_delete));
        for pack in packs {
            for blob in pack.blobs.iter().filter(|blob| wanted.contains(&key(blob))) {
                copies.entry(key(blob)).or_default().push((pack.id, *blob));
            }
        }
        Self(copies)
    }

    /// Returns the packs, other than `damaged_pack`, whose copies of the blob are corrupt, or `None` if one has an
    /// intact copy.
    async fn find_damaged_copies(
        &self,
        repository: &Repository,
        damaged_pack: Id,
        blob: &PackedBlob,
    ) -> Result<Option<Vec<Id>>, FilesError> {
        let mut damaged = Vec::new();
        let copies = self.0.get(&(blob.blob_type, blob.id)).into_iter().flatten();
        for (pack, copy) in copies.filter(|(pack, _)| *pack != damaged_pack) {
            let range = u64::from(copy.offset)..u64::from(copy.offset) + u64::from(copy.length);
            let read = match repository.read_pack(*pack, range).await {
                Ok(sealed) => repository.open_blob(copy, &sealed).map(drop),
                Err(error) => Err(error),
            };
            match read {
                Ok(()) => return Ok(None),
                Err(error) if error.is_damage() => damaged.push(*pack),
                Err(error) => return Err(error),
            }
        }
        Ok(Some(damaged))
    }
}

async fn verify_pack(
    repository: &Repository,
    pack: IndexedPack,
) -> Result<(u64, Option<Damage>), FilesError> {
    let Some(bytes) = repository.read_whole_pack(pack.id).await? else {
        let reason = "it does not exist".to_owned();
        return Ok((0, Some(Damage { pack: pack.id, reason, blobs: pack.blobs })));
    };
    let length = bytes.len() as u64;
    let key = repository.key.clone();
    Ok((length, run_blocking(move || Ok(find_damage(&key, &pack, &bytes))).await?))
}

/// Sorts blobs for comparison: other programs list them in a different order than the pack does.
fn sorted_by_offset(blobs: &[PackedBlob]) -> Vec<PackedBlob> {
    let mut sorted = blobs.to_vec();
    sorted.sort_by_key(|blob| blob.offset);
    sorted
}

fn find_damage(key: &crate::key::EncryptionKey, pack: &IndexedPack, bytes: &[u8]) -> Option<Damage> {
    let mut reason = None;
    if Id::of(bytes) != pack.id {
        reason = Some("its content does not match its hash".to_owned());
    }
    match parse_header(key, pack.id, bytes) {
        Ok(blobs) if sorted_by_offset(&blobs) == sorted_by_offset(&pack.blobs) => {}
        Ok(_) => drop(reason.get_or_insert_with(|| "header doesn't match the index".to_owned())),
        Err(error) => drop(reason.get_or_insert_with(|| error.to_string())),
    }
    let mut unreadable = Vec::new();
    for blob in &pack.blobs {
        let range = usize::try_from(blob.offset).ok().zip(usize::try_from(blob.length).ok());
        let sealed = range.and_then(|(start, length)| bytes.get(start..start.checked_add(length)?));
        if let Err(error) = open_blob(key, blob, sealed.unwrap_or_default()) {
            reason.get_or_insert_with(|| error.to_string());
            unreadable.push(*blob);
        }
    }
    reason.map(|reason| Damage { pack: pack.id, reason, blobs: unreadable })
}
