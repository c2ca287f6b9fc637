//! Worker threads that compress and encrypt chunks and collect them into packs.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use tokio::sync::mpsc;

use crate::error::FilesError;
use crate::id::Id;
use crate::key::EncryptionKey;
use crate::pack::{BlobType, FinishedPack, PackWriter};

/// Maximum number of chunks queued for the workers, each up to 8 MiB.
const MAX_WAITING_CHUNKS: usize = 1;

type Chunk = (Id, Vec<u8>);

pub(super) struct Workers {
    chunks: SyncSender<Chunk>,
    threads: Vec<JoinHandle<Result<(), FilesError>>>,
}

impl Workers {
    /// Starts the worker threads.
    ///
    /// # Errors
    /// If a thread can't be started or zstd can't allocate memory.
    pub(super) fn start(
        count: usize,
        key: &EncryptionKey,
        packs: &mpsc::Sender<FinishedPack>,
    ) -> Result<Self, FilesError> {
        let (chunks, receiver) = sync_channel(MAX_WAITING_CHUNKS);
        let receiver = Arc::new(Mutex::new(receiver));
        let start = |_| {
            let writer = PackWriter::new(key.clone(), BlobType::Data)?;
            let (receiver, packs) = (Arc::clone(&receiver), packs.clone());
            std::thread::Builder::new()
                .name("files-pack".to_owned())
                .spawn(move || pack_chunks(writer, &receiver, &packs))
                .map_err(FilesError::Thread)
        };
        let threads = (0..count.max(1)).map(start).collect::<Result<_, _>>()?;
        Ok(Self { chunks, threads })
    }

    /// Queues a chunk, blocking while the queue is full.
    ///
    /// # Errors
    /// [`FilesError::Stopped`] if the workers have exited; [`Self::finish`] returns their error.
    pub(super) fn add(&self, id: Id, content: Vec<u8>) -> Result<(), FilesError> {
        self.chunks.send((id, content)).map_err(|_| FilesError::Stopped)
    }

    /// Waits until the workers have sent all packs.
    ///
    /// # Errors
    /// A failed worker's error; [`FilesError::Stopped`] if it panicked or the upload has stopped.
    pub(super) fn finish(self) -> Result<(), FilesError> {
        drop(self.chunks);
        let mut result = Ok(());
        for thread in self.threads {
            let worker_result = thread.join().unwrap_or(Err(FilesError::Stopped));
            result = result.and(worker_result);
        }
        result
    }
}

fn pack_chunks(
    mut writer: PackWriter,
    chunks: &Mutex<Receiver<Chunk>>,
    packs: &mpsc::Sender<FinishedPack>,
) -> Result<(), FilesError> {
    loop {
        let next = chunks.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok((id, content)) = next else { break };
        if let Some(pack) = writer.add(id, &content)? {
            packs.blocking_send(pack).map_err(|_| FilesError::Stopped)?;
        }
    }
    match writer.finish()? {
        Some(pack) => packs.blocking_send(pack).map_err(|_| FilesError::Stopped),
        None => Ok(()),
    }
}
