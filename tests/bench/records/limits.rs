//! What the machine can do at all: the ways to write events that are made already.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::{BYTES, event, tell};

const BLOCKS: usize = 4_000_000;
const BUFFERED: usize = 2_000_000;
const SINGLE: usize = 400_000;
/// How long is synced.
const SYNCED: Duration = Duration::from_millis(700);

pub fn measure(dir: &Path) -> Result<()> {
    let mut line = serde_json::to_vec(&event(1))?;
    line.push(b'\n');
    let rate = |name: &str, events: usize, write: &dyn Fn(File) -> Result<()>| -> Result<()> {
        let path = dir.join("limit");
        let begun = Instant::now();
        write(File::create(&path)?)?;
        tell("events", name, events as f64 / begun.elapsed().as_secs_f64());
        Ok(std::fs::remove_file(path)?)
    };
    let block = line.repeat((1 << 20) / BYTES);
    rate("block writes", BLOCKS, &|mut file| {
        for _ in 0..BLOCKS * BYTES / block.len() {
            file.write_all(&block)?;
        }
        Ok(())
    })?;
    rate("buffered, made before", BUFFERED, &|file| {
        let mut file = BufWriter::with_capacity(64 << 10, file);
        for _ in 0..BUFFERED {
            file.write_all(&line)?;
        }
        Ok(file.flush()?)
    })?;
    rate("one write(2) each", SINGLE, &|mut file| {
        for _ in 0..SINGLE {
            file.write_all(&line)?;
        }
        Ok(())
    })?;
    let path = dir.join("limit");
    let (mut file, begun, mut written) = (File::create(&path)?, Instant::now(), 0_u32);
    while begun.elapsed() < SYNCED {
        file.write_all(&line)?;
        file.sync_data()?;
        written += 1;
    }
    tell("events", "write and fdatasync each", f64::from(written) / begun.elapsed().as_secs_f64());
    Ok(std::fs::remove_file(path)?)
}
