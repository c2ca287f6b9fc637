//! `cargo xtask`: the project's developer commands. This file parses arguments; the kit and cargo do the work.

mod bench;
mod browser;
mod bundle;
mod cargo;
mod ci;
mod dist;
mod docs;
mod fuzz;
mod profile;
mod test;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use kit::pg::PgBinaries;
use kit::scenario::{self, InjectedDefect};
use kit::stores::StoreKind;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Builds, tests, packages and benchmarks the project")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Fetch missing dependencies for the demo and the tests
    Setup,
    /// Build a host bundle: archive, digest, and manifest with its signature
    Bundle(bundle::Args),
    /// Test the shell and the apps, or code-server, in Chromium; writes screenshots to target/browser
    Browser(browser::Args),
    /// Run the main scenario against real services; writes target/demo/report.json
    Demo {
        /// Inject a defect (backup|restore|pin|fence); the demo must then fail
        #[arg(long = "break", value_name = "WHAT", value_parser = InjectedDefect::from_str)]
        defect: Option<InjectedDefect>,
        /// The object store (kit|moto|seaweedfs)
        #[arg(long, value_name = "STORE", default_value = "kit", value_parser = StoreKind::from_str)]
        store: StoreKind,
        /// The binary to run (default: build it)
        #[arg(long, value_name = "PATH")]
        svc: Option<PathBuf>,
        /// Keep the directory with disks and logs
        #[arg(long)]
        keep: bool,
    },
    /// Run the demo's services and a machine for development until interrupted; writes target/dev/dev.json
    Dev {
        /// The binary to run (default: build it)
        #[arg(long, value_name = "PATH")]
        svc: Option<PathBuf>,
        /// Directory for dev.json and the operator's credential; use a different one for a second instance
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
        /// The machine's bundle, from `cargo xtask bundle --out DIR` (default: the minimal one)
        #[arg(long, value_name = "DIR")]
        bundle: Option<PathBuf>,
    },
    /// Run the main scenario on virtual machines, then the checks that need a real machine; writes target/lab
    Lab {
        /// Run only the main scenario: use, dispatch, reboot, backup, loss and recovery
        #[arg(long)]
        quick: bool,
        /// Run only these steps, on a newly provisioned machine: `--only update,bad-update`
        #[arg(long, value_name = "STEP", value_delimiter = ',', conflicts_with = "quick")]
        only: Vec<String>,
        /// Total size, in MiB, of the owner's files that the lab backs up and a recovery restores
        #[arg(long, value_name = "MIB", default_value_t = 32)]
        files_mib: u64,
        /// The binary to run (default: the one from `cargo xtask dist`)
        #[arg(long, value_name = "PATH")]
        svc: Option<PathBuf>,
    },
    /// Build the static executable target/dist/svc and verify it
    Dist,
    /// Record a profile of the benches for profile-guided optimization; writes packaging/profile
    Profile,
    /// Build the Debian packages and the software bill of materials into target/deb
    Deb {
        /// Install, start, upgrade, remove and purge the packages in a fresh Debian chroot (needs root)
        #[arg(long)]
        check: bool,
        /// The packaged binary (default: target/dist/svc, rebuilt if outdated)
        #[arg(long, value_name = "PATH")]
        svc: Option<PathBuf>,
    },
    /// Measure the static executable and its peers; writes target/bench/AREA.json
    Bench(bench::Args),
    /// Set up, build, and run all tests
    Test {
        /// Include the long tests
        #[arg(long)]
        long: bool,
        /// Run only the tests whose names contain one of these strings
        #[arg(value_name = "FILTER")]
        filters: Vec<String>,
    },
    /// Write the generated sections of the pages in docs
    Docs {
        /// Only report the pages that are out of date
        #[arg(long)]
        check: bool,
    },
    /// Fuzz the parsers with libFuzzer, a minute each; needs a C++ compiler; writes target/libfuzzer
    Fuzz(fuzz::Args),
    /// Run the quick checks for each edit: format, clippy on the product, unit tests, conventions
    Check,
    /// Run the static checks: format, clippy, documentation, dependencies
    Ci {
        /// Run the CI stage `static-checks`, the only stage that xtask runs
        #[arg(long, required = true)]
        static_checks: bool,
    },
}

fn main() -> ExitCode {
    let result = match Args::parse().command {
        Command::Setup => setup().map(|()| {
            fetch_test_tools();
            ExitCode::SUCCESS
        }),
        Command::Bundle(args) => bundle::run(args),
        Command::Browser(args) => browser::run(args),
        Command::Demo { defect, store, svc, keep } => demo(defect, store, svc, keep),
        Command::Dev { svc, dir, bundle } => dev(svc, dir, bundle.as_deref()),
        Command::Lab { quick, only, files_mib, svc } => lab(quick, &only, files_mib, svc),
        Command::Test { long, filters } => setup().and_then(|()| test::run(long, &filters)),
        Command::Bench(args) => bench::run(args),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::Docs { check } => docs::run(check),
        Command::Dist => dist::build().map(|_| ExitCode::SUCCESS),
        Command::Profile => profile::run(),
        Command::Deb { check, svc } => deb(check, svc),
        Command::Check => ci::run_quick_checks(),
        Command::Ci { .. } => ci::run_static_checks(),
    };
    result.unwrap_or_else(|error| {
        eprintln!("xtask: {error:#}");
        ExitCode::FAILURE
    })
}

fn setup() -> Result<()> {
    let target = kit::fetch::target_dir();
    let binaries = PgBinaries::locate_or_fetch(&target)?;
    println!("setup: PostgreSQL 16 at {}", binaries.dir().display());
    println!("setup: moto at {}", kit::moto::fetch(&target)?.display());
    println!("setup: the provider's Python library at {}", kit::hcloud::fetch_library(&target)?.display());
    // Tests that need SeaweedFS report themselves as skipped.
    match kit::seaweed::fetch(&target) {
        Ok(dir) => println!("setup: SeaweedFS at {}", dir.display()),
        Err(error) => println!("setup: SeaweedFS is unavailable, so its tests are skipped: {error:#}"),
    }
    Ok(())
}

/// Fetches the tools that only a few tests need. A test whose tool is still missing fetches it itself.
fn fetch_test_tools() {
    let tools = [
        ("shellcheck", kit::checkers::shellcheck().map(drop)),
        ("cloud-init", kit::checkers::cloud_init_schema().map(drop)),
        ("the provider's command-line program", kit::hcloud::fetch_cli().map(drop)),
        ("pebble", kit::pebble::fetch().map(drop)),
    ];
    for (name, fetched) in tools {
        match fetched {
            Ok(()) => println!("setup: {name} is available"),
            Err(error) => println!("setup: {name} cannot be fetched now: {error:#}"),
        }
    }
}

fn deb(check: bool, svc: Option<PathBuf>) -> Result<ExitCode> {
    let svc = match svc {
        Some(svc) => svc.canonicalize().with_context(|| format!("cannot find {}", svc.display()))?,
        None => dist::build_if_outdated()?,
    };
    let out = kit::fetch::target_dir().join("deb");
    let options = kit::deb::Options::new(svc, cargo::root(), out);
    if check {
        let runtime = tokio::runtime::Runtime::new().context("cannot start a runtime")?;
        runtime.block_on(kit::deb::check::check(&options))?;
        return Ok(ExitCode::SUCCESS);
    }
    for package in kit::deb::build(&options)? {
        println!("{}, sha256 {}", package.display(), kit::fetch::sha256(&package)?);
    }
    Ok(ExitCode::SUCCESS)
}

fn demo(
    defect: Option<InjectedDefect>,
    store: StoreKind,
    svc: Option<PathBuf>,
    keep: bool,
) -> Result<ExitCode> {
    let svc = resolve_svc(svc)?;
    let report = kit::fetch::target_dir().join("demo/report.json");
    let runtime = tokio::runtime::Runtime::new().context("cannot start a runtime")?;
    let options = scenario::ScenarioOptions { svc, defect, store, keep, report: Some(report) };
    let report = runtime.block_on(scenario::run(options))?;
    Ok(if report.ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn dev(svc: Option<PathBuf>, dir: Option<PathBuf>, bundle: Option<&Path>) -> Result<ExitCode> {
    let dir = dir.unwrap_or_else(kit::dev::default_dir);
    // Acquired before the build, so that a running instance keeps its binary.
    let lock = kit::dev::DevLock::acquire(&dir)?;
    let svc = resolve_svc(svc)?;
    let runtime = tokio::runtime::Runtime::new().context("cannot start a runtime")?;
    runtime.block_on(kit::dev::run(lock, &svc, bundle))?;
    Ok(ExitCode::SUCCESS)
}

fn lab(quick: bool, only: &[String], files_mib: u64, svc: Option<PathBuf>) -> Result<ExitCode> {
    let svc = match svc {
        Some(path) => path.canonicalize().with_context(|| format!("cannot find {}", path.display()))?,
        None => dist::build_if_outdated()?,
    };
    let mut lab = cargo::program_command("lab");
    lab.arg("--svc").arg(svc).args(quick.then_some("--quick"));
    lab.args(["--files-mib", &files_mib.to_string()]);
    lab.args(only.iter().flat_map(|step| ["--only", step]));
    cargo::exec(lab)
}

fn resolve_svc(svc: Option<PathBuf>) -> Result<PathBuf> {
    let path = match svc {
        Some(path) => path,
        None => {
            // Builds the same packages as the tests, because a different selection would rebuild the dependencies.
            cargo::run(&["build", "--workspace"])?;
            kit::fetch::target_dir().join("debug/svc")
        }
    };
    path.canonicalize().with_context(|| format!("cannot find {}", path.display()))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use kit::quoted_commands::{self, Language};

    use super::*;

    fn find_pages() -> Vec<PathBuf> {
        let root = cargo::root();
        let mut pages = Vec::new();
        let mut dirs = vec![root.join("docs"), root.join("packaging"), root.join("tests/kit")];
        while let Some(dir) = dirs.pop() {
            for entry in std::fs::read_dir(dir).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    dirs.push(path);
                } else if path.extension().is_some_and(|extension| extension == "md") {
                    pages.push(path);
                }
            }
        }
        pages.extend(["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"].map(|page| root.join(page)));
        pages
    }

    #[test]
    fn pages_quote_only_existing_commands() {
        let mut command = Args::command();
        command.build();
        let (mut checked, mut errors) = (0, Vec::new());
        for page in find_pages() {
            let text = std::fs::read_to_string(&page).unwrap();
            let quoted = quoted_commands::check(&command, &text, Language::Markdown);
            checked += quoted.checked;
            errors.extend(quoted.errors.iter().map(|error| format!("{}: {error}", page.display())));
        }
        assert!(errors.is_empty(), "{}", errors.join("\n"));
        assert!(checked > 40, "only {checked} commands were found");
    }
}
