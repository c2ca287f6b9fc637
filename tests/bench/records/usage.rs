//! The usage store with three years of usage by fifty users with ten models.

use std::fs;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use jiff::ToSpan;
use jiff::civil::Date;
use svc::host::records::ledger::{GroupBy, UsageQuery};
use svc::host::records::usage_store::UsageStore;
use svc::host::records::writer::Writer;
use svc::wire::usage::UsageReport;

use crate::{elapsed_nanos, print_figure, quantile};

const FIRST_DAY: Date = Date::constant(2023, 11, 24);
const DAYS: i32 = 1095;
const USERS: u64 = 50;
const MODELS: u64 = 10;
const QUERIES: usize = 60;

pub fn measure(dir: &Path) -> Result<()> {
    let logs = dir.join("usage");
    fs::create_dir_all(&logs)?;
    write_usage(&logs.join("usage.jsonl"))?;
    let writer = Writer::start(logs.clone())?;
    let before_mib = resident_mib()?;
    let started = Instant::now();
    let store = UsageStore::open(writer.records(), logs.clone(), dir.join("seals.json"))?;
    print_figure("3 years of usage: open", "svc", started.elapsed().as_secs_f64() * 1000.0);
    print_figure("3 years of usage: memory", "svc", resident_mib()? - before_mib);
    for (name, group_by) in [
        ("3 years of usage: by day, p99", GroupBy::Day),
        ("3 years of usage: by week, p99", GroupBy::Week),
        ("3 years of usage: by month, p99", GroupBy::Month),
        ("3 years of usage: by model, p99", GroupBy::Model),
        ("3 years of usage: by user, p99", GroupBy::User),
    ] {
        let mut samples = Vec::new();
        for _ in 0..QUERIES {
            let started = Instant::now();
            let report = store.report(&UsageQuery { group_by, ..UsageQuery::default() });
            let report = UsageReport::from(report);
            let text = serde_json::to_vec(&report)?;
            samples.push(elapsed_nanos(started));
            ensure!(
                report.total_dispatches == u64::from(DAYS.unsigned_abs()) * USERS * MODELS
                    && !text.is_empty()
            );
        }
        print_figure(name, "svc", quantile(&mut samples, 0.99) / 1e6);
    }
    let query = UsageQuery { user_id: Some("user_7".to_owned()), ..UsageQuery::default() };
    let mut samples: Vec<u64> = (0..QUERIES)
        .map(|_| {
            let started = Instant::now();
            std::hint::black_box(store.report(&query));
            elapsed_nanos(started)
        })
        .collect();
    print_figure("3 years of usage: for one user, p99", "svc", quantile(&mut samples, 0.99) / 1e6);
    let started = Instant::now();
    store.compact();
    print_figure("3 years of usage: compaction", "svc", started.elapsed().as_secs_f64() * 1000.0);
    drop((store, writer));
    Ok(fs::remove_dir_all(logs)?)
}

fn write_usage(path: &Path) -> Result<()> {
    let mut file = BufWriter::new(fs::File::create(path)?);
    for day in 0..DAYS {
        let date = FIRST_DAY.checked_add(day.days())?;
        for user in 0..USERS {
            for model in 0..MODELS {
                let nanos = (u64::from(day.unsigned_abs()) * 7919 + user * 104_729 + model) % 1_000_000_000;
                writeln!(
                    file,
                    r#"{{"version":1,"date":"{date}","userId":"user_{user}","model":"model-{model}","cost":0.{nanos:09},"tokensIn":{nanos},"tokensOut":77,"dispatches":1,"seq":500}}"#
                )?;
            }
        }
    }
    Ok(file.flush()?)
}

fn resident_mib() -> Result<f64> {
    let statm = fs::read_to_string("/proc/self/statm")?;
    let pages: f64 =
        statm.split_whitespace().nth(1).context("/proc/self/statm has no resident pages")?.parse()?;
    Ok(pages * 4096.0 / f64::from(1 << 20))
}
