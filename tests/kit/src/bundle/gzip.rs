//! gzip on all cores, with the same bytes whatever their number.
//!
//! The content is cut into blocks of one fixed size; each is deflated by itself and ends on a byte boundary, and the
//! results follow each other as one stream of one member, which every gzip reads. Memory holds a few blocks per core.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use flate2::{Compress, Compression, Crc, FlushCompress, Status};

/// Cut anywhere else, the bytes would be others.
const BLOCK: usize = 1 << 20;
/// Deflate; no flags, no time, no extra flags; Unix.
const HEADER: [u8; 10] = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3];

struct Job {
    block: Vec<u8>,
    end: FlushCompress,
    answer: SyncSender<io::Result<Deflated>>,
}

struct Deflated {
    bytes: Vec<u8>,
    crc: Crc,
}

/// A writer that compresses; what it was given is only whole after [`finish`](Self::finish).
pub struct Gzip<W: Write> {
    out: W,
    block: Vec<u8>,
    jobs: SyncSender<Job>,
    pending: VecDeque<Receiver<io::Result<Deflated>>>,
    crc: Crc,
    threads: usize,
}

impl<W: Write> Gzip<W> {
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
                    let Ok(Job { block, end, answer }) = next else { return };
                    // Who asked may have failed meanwhile.
                    answer.send(deflate(&block, level, end)).ok();
                }
            })?;
        }
        let block = Vec::with_capacity(BLOCK);
        Ok(Self { out, block, jobs, pending: VecDeque::new(), crc: Crc::new(), threads })
    }

    fn send(&mut self, end: FlushCompress) -> io::Result<()> {
        let block = std::mem::replace(&mut self.block, Vec::with_capacity(BLOCK));
        let (answer, answered) = sync_channel(1);
        self.jobs.send(Job { block, end, answer }).map_err(|_| gone())?;
        self.pending.push_back(answered);
        while self.pending.len() > 2 * self.threads {
            self.take_one()?;
        }
        Ok(())
    }

    fn take_one(&mut self) -> io::Result<()> {
        let Some(answered) = self.pending.pop_front() else { return Ok(()) };
        let deflated = answered.recv().map_err(|_| gone())??;
        self.crc.combine(&deflated.crc);
        self.out.write_all(&deflated.bytes)
    }

    /// Writes what is left and the trailer.
    pub fn finish(mut self) -> io::Result<W> {
        self.send(FlushCompress::Finish)?;
        while !self.pending.is_empty() {
            self.take_one()?;
        }
        self.out.write_all(&self.crc.sum().to_le_bytes())?;
        self.out.write_all(&self.crc.amount().to_le_bytes())?;
        self.out.flush()?;
        Ok(self.out)
    }
}

impl<W: Write> Write for Gzip<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(BLOCK - self.block.len());
        self.block.extend_from_slice(&bytes[..taken]);
        if self.block.len() == BLOCK {
            self.send(FlushCompress::Full)?;
        }
        Ok(taken)
    }

    /// Nothing: a block that ended early would change the bytes.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn gone() -> io::Error {
    io::Error::other("a compressing thread ended")
}

fn deflate(block: &[u8], level: Compression, end: FlushCompress) -> io::Result<Deflated> {
    let mut crc = Crc::new();
    crc.update(block);
    let mut deflate = Compress::new(level, false);
    let mut bytes = Vec::with_capacity(block.len() / 2 + 1024);
    loop {
        let consumed = usize::try_from(deflate.total_in()).unwrap_or(block.len());
        let status = deflate.compress_vec(&block[consumed..], &mut bytes, end).map_err(io::Error::other)?;
        let all_in = deflate.total_in() == block.len() as u64;
        // With room left, nothing is held back.
        let flushed = end == FlushCompress::Full && all_in && bytes.len() < bytes.capacity();
        if status == Status::StreamEnd || flushed {
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
        while bytes.len() < 3 * BLOCK + 12_345 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // Half of it compresses and half does not.
            bytes.extend_from_slice(&state.to_le_bytes());
            bytes.extend_from_slice(b"the same");
        }
        bytes
    }

    fn packed(content: &[u8], threads: usize) -> Vec<u8> {
        let mut gzip = Gzip::with_threads(Vec::new(), Compression::new(6), threads).unwrap();
        // In pieces that no block is a multiple of.
        for piece in content.chunks(10_007) {
            gzip.write_all(piece).unwrap();
        }
        gzip.finish().unwrap()
    }

    #[test]
    fn any_reader_of_one_member_reads_it() {
        for content in [content(), vec![0; BLOCK], Vec::new()] {
            let packed = packed(&content, 3);
            let mut read = Vec::new();
            flate2::bufread::GzDecoder::new(packed.as_slice()).read_to_end(&mut read).unwrap();
            assert!(read == content, "{} bytes came back as {}", content.len(), read.len());
        }
    }

    #[test]
    fn the_bytes_do_not_depend_on_the_number_of_threads() {
        let content = content();
        let one = packed(&content, 1);
        assert!(one == packed(&content, 4) && one.len() < content.len());
    }
}
