//! `cargo xtask bench`: measures the product, its peers and upper bounds in alternating rounds. It measures the release
//! binary with all features that users get: TLS, sessions, proofs, validation, the app's role. Absolute figures depend
//! on the machine; targets are ratios within one run where possible.

mod archive;
mod backup;
mod bench_store;
mod bridge;
mod bundle;
mod compare;
mod connections;
mod database;
mod echo;
mod figures;
mod files;
mod footprint;
mod gateway;
mod hook;
mod peers;
mod process;
mod records;
mod report;
mod restore;
mod router;
mod scale;
mod site;
mod task;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;

use anyhow::{Context, Result};
use clap::Parser;
use tempfile::TempDir;

use self::compare::{Build, Comparison, Verdict};
use self::figures::{Spec, Tally};
use self::report::Report;
use kit::child;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Area {
    Footprint,
    Router,
    Bridge,
    Bundle,
    Backup,
    Restore,
    Records,
    Hook,
    Scale,
    Files,
}

impl Area {
    pub const ALL: [Self; 10] = [
        Self::Footprint,
        Self::Router,
        Self::Bridge,
        Self::Bundle,
        Self::Backup,
        Self::Restore,
        Self::Records,
        Self::Hook,
        Self::Scale,
        Self::Files,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Footprint => "footprint",
            Self::Router => "router",
            Self::Bridge => "bridge",
            Self::Bundle => "bundle",
            Self::Backup => "backup",
            Self::Restore => "restore",
            Self::Records => "records",
            Self::Hook => "hook",
            Self::Scale => "scale",
            Self::Files => "files",
        }
    }
}

impl FromStr for Area {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = Self::ALL.map(Self::name).join(", ");
        let area = Self::ALL.into_iter().find(|area| area.name() == text);
        area.ok_or_else(|| format!("must be one of {names}"))
    }
}

#[derive(Debug, Clone, Parser)]
#[command(name = "cargo xtask bench")]
struct Options {
    #[arg(value_name = "AREA")]
    area: Area,
    /// Rounds for the product and for each peer
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=50))]
    rounds: u32,
    /// Seconds per load
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=60))]
    seconds: u32,
    /// For the area `files`: the number of files
    #[arg(long, value_name = "N", default_value_t = 200_000)]
    files: u32,
    /// For the area `files`: the average size of a file, in bytes
    #[arg(long, value_name = "N", default_value_t = 50_000)]
    file_bytes: u32,
    /// For the area `files`: leave out rclone, which takes far longer than the others for many small files
    #[arg(long)]
    without_rclone: bool,
    /// The measured binary; for records, the program that links the measured code
    #[arg(long, value_name = "PATH")]
    svc: PathBuf,
    /// Also measure this earlier build, in alternation, and fail if a figure is worse
    #[arg(long, value_name = "PATH")]
    baseline: Option<PathBuf>,
    /// Directory for `AREA.json`
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Fail if a target is missed
    #[arg(long)]
    strict: bool,
}

fn main() -> ExitCode {
    let options = Options::parse();
    // Cannot fail: no provider is installed yet.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let succeeded = tokio::runtime::Runtime::new().context("cannot start the runtime").and_then(|runtime| {
        runtime.block_on(async {
            match &options.baseline {
                Some(baseline) => compare_builds(&options, baseline).await,
                None => run(&options).await.map(|report| !options.strict || report.all_met()),
            }
        })
    });
    match succeeded {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Measures an area, prints its table, and writes its JSON.
///
/// # Errors
/// Fails if a figure cannot be measured or the JSON cannot be written; a missed target is not an error.
async fn run(options: &Options) -> Result<Report> {
    let (area, svc) = (options.area, options.svc.display());
    println!("bench {}: {svc}, {} rounds, {} s per load", area.name(), options.rounds, options.seconds);
    let (specs, tally) = measure(options).await?;
    let row = |spec: &Spec| tally.row(spec).with_context(|| format!("{} was not measured", spec.name));
    let is_left_out = |spec: &&Spec| options.without_rclone && spec.against == Some(files::RCLONE);
    let rows = specs.iter().filter(|spec| !is_left_out(spec)).map(row).collect::<Result<_>>()?;
    let report = Report { area: area.name(), rounds: options.rounds, rows };
    print!("{}", report.table());
    let file = options.out.join(format!("{}.json", area.name()));
    report.write(&file)?;
    println!("{}", file.display());
    Ok(report)
}

/// Measures both builds in each round, prints their table, and returns whether no figure got worse.
async fn compare_builds(options: &Options, baseline: &Path) -> Result<bool> {
    let area = options.area.name();
    println!(
        "bench {area}: {} against {}, {} rounds",
        options.svc.display(),
        baseline.display(),
        options.rounds
    );
    let mut comparison = Comparison::default();
    let mut specs: &[Spec] = &[];
    for round in 0..options.rounds {
        let mut builds = [(Build::Baseline, baseline), (Build::Current, options.svc.as_path())];
        // The order alternates, because the first build changes the caches for the second.
        if round % 2 == 1 {
            builds.reverse();
        }
        for (build, svc) in builds {
            let one_round = Options { rounds: 1, svc: svc.to_owned(), ..options.clone() };
            let (measured, tally) = measure(&one_round).await?;
            specs = measured;
            comparison.add(build, specs, &tally);
        }
    }
    let rows = comparison.rows(specs);
    print!("{}", report::comparison_table(&rows));
    let count = |verdict| rows.iter().filter(|row| row.verdict == verdict).count();
    let (worse, better) = (count(Verdict::Worse), count(Verdict::Better));
    println!(
        "{area}: {worse} worse, {better} better, {} the same; medians of {} rounds",
        count(Verdict::Same),
        options.rounds
    );
    Ok(worse == 0)
}

async fn measure(options: &Options) -> Result<(&'static [Spec], Tally)> {
    Ok(match options.area {
        Area::Footprint => (&footprint::ROWS, footprint::measure(options).await?),
        Area::Router => (&router::ROWS, router::measure(options).await?),
        Area::Bridge => (&bridge::ROWS, bridge::measure(options).await?),
        Area::Bundle => (&bundle::ROWS, bundle::measure(options).await?),
        Area::Backup => (&backup::ROWS, backup::measure(options).await?),
        Area::Restore => (&restore::ROWS, restore::measure(options).await?),
        Area::Records => (&records::ROWS, records::measure(options).await?),
        Area::Hook => (&hook::ROWS, hook::measure(options).await?),
        Area::Files => (&files::ROWS, files::measure(options).await?),
        Area::Scale => (&scale::ROWS, scale::measure(options).await?),
    })
}

/// Creates a temporary directory for sockets, logs and settings.
fn create_temp_dir() -> Result<TempDir> {
    // In `/tmp`, because the path of a Unix socket is limited to 107 bytes.
    let dir = tempfile::Builder::new().prefix("svc-bench-").tempdir_in("/tmp")?;
    child::remove_on_exit(dir.path());
    Ok(dir)
}

fn print_round(round: u32, rounds: u32) {
    println!("  round {} of {rounds}", round + 1);
}

fn file_size_mib(file: &Path) -> Result<f64> {
    let size = std::fs::metadata(file).with_context(|| format!("cannot stat {}", file.display()))?.len();
    Ok(size as f64 / f64::from(1 << 20))
}
