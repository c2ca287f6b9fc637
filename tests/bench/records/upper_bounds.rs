//! Upper bounds on this machine: the rates at which prepared events can be written in several ways, without the
//! product's writer.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::{EVENT_BYTES, event, print_figure};

const BLOCK_EVENTS: usize = 4_000_000;
const BUFFERED_EVENTS: usize = 2_000_000;
const SINGLE_EVENTS: usize = 400_000;
/// Duration of the load with fdatasync.
const SYNC_DURATION: Duration = Duration::from_millis(700);

pub fn measure(dir: &Path) -> Result<()> {
    let mut line = serde_json::to_vec(&event(1))?;
    line.push(b'\n');
    let measure_rate = |side: &str, events: usize, write: &dyn Fn(File) -> Result<()>| -> Result<()> {
        let path = dir.join("upper-bound");
        let started = Instant::now();
        write(File::create(&path)?)?;
        print_figure("events", side, events as f64 / started.elapsed().as_secs_f64());
        Ok(std::fs::remove_file(path)?)
    };
    let block = line.repeat((1 << 20) / EVENT_BYTES);
    measure_rate("block writes", BLOCK_EVENTS, &|mut file| {
        for _ in 0..BLOCK_EVENTS * EVENT_BYTES / block.len() {
            file.write_all(&block)?;
        }
        Ok(())
    })?;
    measure_rate("buffered, prepared", BUFFERED_EVENTS, &|file| {
        let mut file = BufWriter::with_capacity(64 << 10, file);
        for _ in 0..BUFFERED_EVENTS {
            file.write_all(&line)?;
        }
        Ok(file.flush()?)
    })?;
    measure_rate("one write(2) per event", SINGLE_EVENTS, &|mut file| {
        for _ in 0..SINGLE_EVENTS {
            file.write_all(&line)?;
        }
        Ok(())
    })?;
    let path = dir.join("upper-bound");
    let (mut file, started, mut written) = (File::create(&path)?, Instant::now(), 0_u32);
    while started.elapsed() < SYNC_DURATION {
        file.write_all(&line)?;
        file.sync_data()?;
        written += 1;
    }
    print_figure(
        "events",
        "write and fdatasync per event",
        f64::from(written) / started.elapsed().as_secs_f64(),
    );
    Ok(std::fs::remove_file(path)?)
}
