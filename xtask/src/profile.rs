//! `cargo xtask profile`: records how often the workloads of `tests/bench` execute each part of the executable, and
//! writes the counts to `packaging/profile`. With them, `cargo xtask dist` optimizes frequently executed code for
//! speed, and the rest for size. Counts of functions that have changed since the recording are ignored, so an outdated
//! profile costs speed, but never correctness.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result};
use kit::packages::{Deb, DebTool};
use kit::{child, fetch};

use crate::{cargo, dist};

/// The tool that merges the counts. Its LLVM is older than the compiler's, but both use the same version of the raw
/// profile format. If a Rust update changes that version, the merge fails, and a newer package is needed.
const LLVM_PROFDATA: DebTool = DebTool {
    path: "usr/lib/llvm-19/bin/llvm-profdata",
    debs: &[
        Deb {
            name: "llvm-19",
            version: "1:19.1.7-3~deb12u1",
            sha256: "f91492c5b361ff12f540b9f6145cf638b5e0fb3f145fceabd6c4b9540eab4bf9",
        },
        Deb {
            name: "libllvm19",
            version: "1:19.1.7-3~deb12u1",
            sha256: "6edf3a8b28495cdba883d9760e0dca1a81983fc497a5f989dc64d0d96d23b4aa",
        },
    ],
};
const MERGE_TIMEOUT: Duration = Duration::from_secs(120);
const GIT_TIMEOUT: Duration = Duration::from_secs(20);
/// Compresses the profile to an eighth of its size.
const COMPRESSION_LEVEL: i32 = 19;

/// The workloads whose speed matters, as arguments for the bench program. `restore` also backs up the database.
const WORKLOADS: [&[&str]; 6] = [
    &["router"],
    &["bridge"],
    &["files", "--files", "8000", "--file-bytes", "20000", "--without-rclone"],
    &["hook"],
    &["restore"],
    &["bundle"],
];

/// The path of the profile, relative to the root.
const PROFILE_PATH: &str = "packaging/profile/svc.profdata.zst";

pub fn run() -> Result<ExitCode> {
    let dir = fetch::target_dir().join("profile");
    let counts = dir.join("counts");
    fs::create_dir_all(&dir)?;
    let svc = dist::compile_instrumented(&counts, &dir.join("build"))?;
    if counts.exists() {
        fs::remove_dir_all(&counts)?;
    }
    for workload in WORKLOADS {
        println!("profile: bench {}", workload.join(" "));
        let mut bench = cargo::program_command("bench");
        bench.args(workload).args(["--rounds", "1"]).arg("--svc").arg(&svc);
        bench.arg("--out").arg(fetch::target_dir().join("bench/profile"));
        cargo::run_checked(bench)?;
    }
    let merged = dir.join("svc.profdata");
    merge(&counts, &merged)?;
    let profile = cargo::root().join(PROFILE_PATH);
    compress(&merged, &profile)?;
    println!("profile: {}, {} KiB", profile.display(), fs::metadata(&profile)?.len() >> 10);
    Ok(ExitCode::SUCCESS)
}

/// Unpacks the profile for the compiler; returns `None` if there is no profile for this architecture. The file's name
/// depends on its content, so that cargo rebuilds when the profile changes.
pub fn unpack() -> Result<Option<PathBuf>> {
    if !cfg!(target_arch = "x86_64") {
        return Ok(None);
    }
    let packed = cargo::root().join(PROFILE_PATH);
    let dir = fetch::target_dir().join("profile");
    fs::create_dir_all(&dir)?;
    let unpacked = dir.join(format!("svc-{}.profdata", &fetch::sha256(&packed)?[..16]));
    if !unpacked.exists() {
        let file = File::open(&packed).with_context(|| format!("cannot open {}", packed.display()))?;
        let mut staged = tempfile::NamedTempFile::new_in(&dir)?;
        zstd::stream::copy_decode(file, &mut staged)
            .with_context(|| format!("cannot unpack {}", packed.display()))?;
        staged.persist(&unpacked)?;
    }
    Ok(Some(unpacked))
}

/// Describes what has changed in `src` since the commit that recorded the profile; `None` if nothing has, or if git
/// fails.
pub fn describe_changes() -> Option<String> {
    let git = |args: &[&str]| {
        let mut git = Command::new("git");
        git.args(args).current_dir(cargo::root());
        let output = child::run(git, GIT_TIMEOUT).ok()?;
        Some(output.trim().to_owned()).filter(|text| !text.is_empty())
    };
    let recorded = git(&["log", "-1", "--format=%H", "--", PROFILE_PATH])?;
    git(&["diff", "--shortstat", &recorded, "--", "src"])
}

/// Merges the counts of all processes. Functions that were never executed are kept in the profile: otherwise, the
/// compiler would also optimize them for speed, and the executable would be 2.4 MiB larger.
fn merge(counts: &Path, merged: &Path) -> Result<()> {
    let tool = LLVM_PROFDATA.locate_or_fetch()?;
    let mut merge = tool.command();
    merge.args(["merge", "--output"]).arg(merged).arg(counts);
    let hint =
        "cannot merge the counts; after an update of Rust, LLVM_PROFDATA may have to name a newer LLVM";
    child::run(merge, MERGE_TIMEOUT).context(hint)?;
    Ok(())
}

fn compress(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to.parent().context("the profile has no directory")?)?;
    let mut packed = File::create(to)?;
    zstd::stream::copy_encode(File::open(from)?, &mut packed, COMPRESSION_LEVEL)?;
    packed.sync_all()?;
    Ok(())
}
