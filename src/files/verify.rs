//! Checks the content of packs against the index. Packs that are marked for deletion are skipped.

use futures_util::{StreamExt, stream};

use crate::blocking::run_blocking;
use crate::error::FilesError;
use crate::id::Id;
use crate::index::IndexedPack;
use crate::pack::{open_blob, parse_header};
use crate::repository::Repository;

const MAX_CONCURRENT_READS: usize = 2;

/// The packs whose id, modulo `of`, is `part`. Runs with each `part` below `of` verify all packs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    pub part: u16,
    pub of: u16,
}

impl Share {
    pub const ALL: Self = Self { part: 0, of: 1 };

    fn contains(self, pack: Id) -> bool {
        let [first, second, ..] = pack.as_bytes();
        u16::from_be_bytes([*first, *second]) % self.of.max(1) == self.part
    }
}

/// The result of a verification.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verified {
    pub packs: u64,
    pub bytes: u64,
    pub damaged: Vec<DamagedPack>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DamagedPack {
    pub pack: Id,
    pub why: String,
    /// The blobs that cannot be read: all, if the pack is missing.
    pub blobs: Vec<Id>,
}

/// Verifies a share of the packs, and reports the damaged ones.
///
/// # Errors
/// The errors of the store, except a pack's absence; damage to an index file.
pub async fn verify(repository: &Repository, share: Share) -> Result<Verified, FilesError> {
    let index = repository.load_index().await?;
    let packs = index.into_iter().flat_map(|(_, file)| file.packs).filter(|pack| share.contains(pack.id));
    let checks = packs.map(|pack| verify_pack(repository, pack));
    let mut checks = stream::iter(checks).buffer_unordered(MAX_CONCURRENT_READS);
    let mut verified = Verified::default();
    while let Some(check) = checks.next().await {
        let (bytes, damage) = check?;
        verified.packs += 1;
        verified.bytes += bytes;
        verified.damaged.extend(damage);
    }
    verified.damaged.sort_by_key(|damaged| damaged.pack);
    Ok(verified)
}

async fn verify_pack(
    repository: &Repository,
    pack: IndexedPack,
) -> Result<(u64, Option<DamagedPack>), FilesError> {
    let Some(bytes) = repository.read_whole_pack(pack.id).await? else {
        let blobs = pack.blobs.iter().map(|blob| blob.id).collect();
        return Ok((0, Some(DamagedPack { pack: pack.id, why: "it does not exist".to_owned(), blobs })));
    };
    let length = bytes.len() as u64;
    let key = repository.key.clone();
    Ok((length, run_blocking(move || Ok(find_damage(&key, &pack, &bytes))).await?))
}

fn find_damage(key: &crate::key::MasterKey, pack: &IndexedPack, bytes: &[u8]) -> Option<DamagedPack> {
    let mut why = None;
    if Id::of(bytes) != pack.id {
        why = Some("its content does not match its hash".to_owned());
    }
    match parse_header(key, pack.id, bytes) {
        Ok(blobs) if blobs == pack.blobs => {}
        Ok(_) => drop(why.get_or_insert_with(|| "its header differs from the index".to_owned())),
        Err(error) => drop(why.get_or_insert_with(|| error.to_string())),
    }
    let mut unreadable = Vec::new();
    for blob in &pack.blobs {
        let range = usize::try_from(blob.offset).ok().zip(usize::try_from(blob.length).ok());
        let sealed = range.and_then(|(start, length)| bytes.get(start..start.checked_add(length)?));
        if let Err(error) = open_blob(key, blob, sealed.unwrap_or_default()) {
            why.get_or_insert_with(|| error.to_string());
            unreadable.push(blob.id);
        }
    }
    why.map(|why| DamagedPack { pack: pack.id, why, blobs: unreadable })
}
