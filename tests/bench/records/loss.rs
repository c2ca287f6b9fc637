//! Data loss in a crash: a child process records when it submits each event, and is killed. Then its file is checked.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use jiff::civil::Date;
use serde_json::Value;
use svc::host::records::writer::{LogFile, Writer};

use crate::{event, print_figure};

const DAY: Date = Date::constant(2026, 11, 22);
const KILLS: u64 = 6;
const EVENT_INTERVAL: Duration = Duration::from_micros(200);

fn now_nanos() -> u64 {
    let elapsed = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX)
}

/// Runs in the child: writes events until it is killed. The `n`th number in the file `times` is the submission time of
/// event `n`.
pub fn run_crash_child(dir: &Path) -> Result<()> {
    let writer = Writer::start(dir.join("logs"))?;
    let (records, times) = (writer.records(), File::create(dir.join("times"))?);
    println!("started");
    for n in 0_u64.. {
        let mut event = event(n);
        event.id = n.to_string();
        times.write_all_at(&now_nanos().to_le_bytes(), n * 8)?;
        records.append(LogFile::Interactions(DAY), &event)?;
        std::thread::sleep(EVENT_INTERVAL);
    }
    Ok(())
}

pub fn measure(dir: &Path) -> Result<()> {
    let mut max_age = Duration::ZERO;
    for kill in 0..KILLS {
        let run_dir = dir.join(format!("kill-{kill}"));
        fs::create_dir_all(&run_dir)?;
        let mut child = Command::new(std::env::current_exe()?)
            .arg("crash-child")
            .arg(&run_dir)
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a child process")?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().context("the child's output is not piped")?)
            .read_line(&mut line)?;
        // Each kill hits a different phase of the writer's flush interval.
        std::thread::sleep(Duration::from_millis(150 + 37 * kill));
        let killed_at = now_nanos();
        child.kill()?;
        child.wait()?;
        max_age = max_age.max(oldest_lost_age(&run_dir, killed_at)?);
        fs::remove_dir_all(run_dir)?;
    }
    print_figure("age of the oldest event lost to kill -9", "svc", max_age.as_secs_f64() * 1000.0);
    Ok(())
}

/// Returns the age, at the time of the kill, of the oldest event that is not in the file; zero if all events are in it.
fn oldest_lost_age(dir: &Path, killed_at: u64) -> Result<Duration> {
    let text = fs::read_to_string(dir.join(format!("logs/interactions-{DAY}.jsonl"))).unwrap_or_default();
    let complete = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    let mut next = 0;
    for line in complete {
        let line: Value = serde_json::from_str(line).context("cannot parse a line")?;
        ensure!(line["id"].as_str() == Some(&*u64::to_string(&next)), "event {next} is out of order: {line}");
        next += 1;
    }
    let times = fs::read(dir.join("times"))?;
    let times: Vec<u64> =
        times.chunks_exact(8).filter_map(|time| Some(u64::from_le_bytes(time.try_into().ok()?))).collect();
    ensure!(times.len() > 100, "the child submitted only {} events", times.len());
    let lost = times.get(usize::try_from(next)?).copied();
    Ok(lost
        .map_or(Duration::ZERO, |submitted_at| Duration::from_nanos(killed_at.saturating_sub(submitted_at))))
}
