//! Uploads packs, and writes the index of their blobs.

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::mpsc;

use svc_base::failpoint;

use crate::error::FilesError;
use crate::id::Id;
use crate::index::{IndexFile, IndexedPack};
use crate::pack::FinishedPack;
use crate::repository::{Kind, Repository};

/// Packs in flight; each takes its size in memory.
const MAX_CONCURRENT_UPLOADS: usize = 2;
/// An index file is written once its packs hold this many blobs or bytes, so that a failed save leaves reusable packs.
const MAX_INDEX_BLOBS: usize = 20_000;
const MAX_INDEX_BYTES: u64 = 512 << 20;

/// The result of an upload.
#[derive(Default)]
pub(super) struct Uploaded {
    pub(super) bytes: u64,
    pub(super) index_files: Vec<Id>,
}

/// Uploads packs until all senders are dropped.
///
/// # Errors
/// The errors of the store. The packs of an upload that failed are in no index.
pub(super) async fn upload(
    repository: &Repository,
    mut packs: mpsc::Receiver<FinishedPack>,
) -> Result<Uploaded, FilesError> {
    let mut uploads = FuturesUnordered::new();
    let mut index = PendingIndex::default();
    let mut uploaded = Uploaded::default();
    let mut is_open = true;
    while is_open || !uploads.is_empty() {
        tokio::select! {
            pack = packs.recv(), if is_open && uploads.len() < MAX_CONCURRENT_UPLOADS => match pack {
                Some(pack) => uploads.push(upload_pack(repository, pack)),
                None => is_open = false,
            },
            Some(pack) = uploads.next() => {
                let pack: FinishedPack = pack?;
                uploaded.bytes += pack.bytes.len() as u64;
                if index.add(pack) {
                    uploaded.index_files.extend(index.write(repository).await?);
                }
            }
        }
    }
    uploaded.index_files.extend(index.write(repository).await?);
    Ok(uploaded)
}

async fn upload_pack(repository: &Repository, pack: FinishedPack) -> Result<FinishedPack, FilesError> {
    failpoint::pass("files.save.pack")?;
    repository.write_pack(&pack).await?;
    Ok(pack)
}

#[derive(Default)]
struct PendingIndex {
    file: IndexFile,
    blobs: usize,
    bytes: u64,
}

impl PendingIndex {
    /// Adds an uploaded pack. Returns whether an index file is due.
    fn add(&mut self, pack: FinishedPack) -> bool {
        self.blobs += pack.blobs.len();
        self.bytes += pack.bytes.len() as u64;
        self.file.packs.push(IndexedPack::from(pack));
        self.blobs >= MAX_INDEX_BLOBS || self.bytes >= MAX_INDEX_BYTES
    }

    /// Writes an index file, if there are packs for it.
    async fn write(&mut self, repository: &Repository) -> Result<Option<Id>, FilesError> {
        if self.blobs == 0 {
            return Ok(None);
        }
        failpoint::pass("files.save.index")?;
        let Self { file, .. } = std::mem::take(self);
        Ok(Some(repository.write_json(Kind::Index, &file).await?))
    }
}
