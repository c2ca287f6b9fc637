//! A parallel gzip writer whose output does not depend on the number of threads.
//!
//! The content is split into fixed-size blocks. Each is deflated independently up to a byte boundary, and the results
//! form a single gzip member, which every reader supports. A few blocks per core are in memory at once.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use flate2::{Compress, Compression, Crc, FlushCompress, Status};

/// The output depends on this size.
const BLOCK_BYTES: usize = 1 << 20;
/// The gzip header: deflate, no flags, no time, no extra flags, Unix.
const HEADER: [u8; 10] = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3];

struct Job {
    block: Vec<u8>,
    flush: FlushCompress,
    result: SyncSender<io::Result<Deflated>>,
}

struct Deflated {
    bytes: Vec<u8>,
    crc: Crc,
}

/// A compressing writer; the output is complete only after [`finish`](Self::finish).
pub struct GzipWriter<W: Write> {
    out: W,
    block: Vec<u8>,
    jobs: SyncSender<Job>,
    pending: VecDeque<Receiver<io::Result<Deflated>>>,
    crc: Crc,
    threads: usize,
}

impl<W: Write> GzipWriter<W> {
    pub fn new(out: W, level: Compression) -> io::Result<Self> {
        Self::with_threads(out, level, thread::available_parallelism().map_or(1, usize::from))
    }

    fn with_threads(mut out: W, level: Compression, threads: usize) -> io::Result<Self> {
        out.write_all(&HEADER)?;
        let (jobs, queue) = sync_channel::<Job>(threads);
        let queue = Arc::new(Mutex::new(queue));
        for _ in 0..threads {
            let queue = Arc::clone(&queue);
            thread::Builder::new().name("gzip".to_owned()).spawn(move || {
                loop {
                    let next = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok(Job { block, flush, result }) = next else { return };
                    // The receiver may have been dropped after an error.
                    result.send(deflate(&block, level, flush)).ok();
                }
            })?;
        }
        let block = Vec::with_capacity(BLOCK_BYTES);
        Ok(Self { out, block, jobs, pending: VecDeque::new(), crc: Crc::new(), threads })
    }

    fn submit(&mut self, flush: FlushCompress) -> io::Result<()> {
        let block = std::mem::replace(&mut self.block, Vec::with_capacity(BLOCK_BYTES));
        let (result, receiver) = sync_channel(1);
        self.jobs.send(Job { block, flush, result }).map_err(|_| worker_ended())?;
        self.pending.push_back(receiver);
        while self.pending.len() > 2 * self.threads {
            self.write_next()?;
        }
        Ok(())
    }

    fn write_next(&mut self) -> io::Result<()> {
        let Some(receiver) = self.pending.pop_front() else { return Ok(()) };
        let deflated = receiver.recv().map_err(|_| worker_ended())??;
        self.crc.combine(&deflated.crc);
        self.out.write_all(&deflated.bytes)
    }

    /// Writes the remaining blocks and the trailer.
    pub fn finish(mut self) -> io::Result<W> {
        self.submit(FlushCompress::Finish)?;
        while !self.pending.is_empty() {
            self.write_next()?;
        }
        self.out.write_all(&self.crc.sum().to_le_bytes())?;
        self.out.write_all(&self.crc.amount().to_le_bytes())?;
        self.out.flush()?;
        Ok(self.out)
    }
}

impl<W: Write> Write for GzipWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let accepted = bytes.len().min(BLOCK_BYTES - self.block.len());
        self.block.extend_from_slice(&bytes[..accepted]);
        if self.block.len() == BLOCK_BYTES {
            self.submit(FlushCompress::Full)?;
        }
        Ok(accepted)
    }

    /// Does nothing: an early block end would change the output.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn worker_ended() -> io::Error {
    io::Error::other("a compression thread has ended")
}

fn deflate(block: &[u8], level: Compression, flush: FlushCompress) -> io::Result<Deflated> {
    let mut crc = Crc::new();
    crc.update(block);
    let mut deflate = Compress::new(level, false);
    let mut bytes = Vec::with_capacity(block.len() / 2 + 1024);
    loop {
        let consumed = usize::try_from(deflate.total_in()).unwrap_or(block.len());
        let status = deflate.compress_vec(&block[consumed..], &mut bytes, flush).map_err(io::Error::other)?;
        let is_consumed = deflate.total_in() == block.len() as u64;
        // Spare capacity means that all output has been written.
        let is_flushed = flush == FlushCompress::Full && is_consumed && bytes.len() < bytes.capacity();
        if status == Status::StreamEnd || is_flushed {
            return Ok(Deflated { bytes, crc });
        }
        bytes.reserve(block.len() / 2 + 1024);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn content() -> Vec<u8> {
        let mut state = 7_u64;
        let mut bytes = Vec::new();
        while bytes.len() < 3 * BLOCK_BYTES + 12_345 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // Half of the content is compressible.
            bytes.extend_from_slice(&state.to_le_bytes());
            bytes.extend_from_slice(b"the same");
        }
        bytes
    }

    fn compress(content: &[u8], threads: usize) -> Vec<u8> {
        let mut gzip = GzipWriter::with_threads(Vec::new(), Compression::new(6), threads).unwrap();
        // The piece size does not divide the block size.
        for piece in content.chunks(10_007) {
            gzip.write_all(piece).unwrap();
        }
        gzip.finish().unwrap()
    }

    #[test]
    fn single_member_readers_read_all_blocks() {
        for content in [content(), vec![0; BLOCK_BYTES], Vec::new()] {
            let compressed = compress(&content, 3);
            let mut output = Vec::new();
            flate2::bufread::GzDecoder::new(compressed.as_slice()).read_to_end(&mut output).unwrap();
            assert!(output == content, "{} of {} bytes were decompressed", output.len(), content.len());
        }
    }

    #[test]
    fn output_does_not_depend_on_thread_count() {
        let content = content();
        let single = compress(&content, 1);
        assert!(single == compress(&content, 4) && single.len() < content.len());
    }
}
