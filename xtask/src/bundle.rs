//! `cargo xtask bundle`: builds a host bundle from this tree, ready for `svcctl bundle publish`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use kit::bundle::{self, ARCHIVE, Compression, KeySet, Options, apps, runtime};
use kit::fetch::target_dir;

use crate::{dist, resolve_svc};

#[derive(Parser)]
pub struct Args {
    /// Version under which the release is published
    #[arg(long, value_name = "VERSION")]
    image_version: String,
    /// Directory to write the bundle to
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// The binary in the bundle (default: the static one from `cargo xtask dist`)
    #[arg(long, value_name = "PATH")]
    svc: Option<PathBuf>,
    /// Key that signs the manifest: Ed25519, PKCS#8 PEM, as from `openssl genpkey -algorithm ed25519`; repeatable. A
    /// host that trusts any of the keys accepts the release
    #[arg(long = "signing-key", value_name = "FILE")]
    signing_keys: Vec<PathBuf>,
    /// Public keys that a host trusts once this release is healthy there, base64 of 32 bytes each; at least one must
    /// belong to a signing key
    #[arg(long, value_name = "KEYS", value_delimiter = ',', requires = "keys_sequence")]
    trust_keys: Vec<String>,
    /// Sequence number of this key set; must be higher than all earlier ones
    #[arg(long, value_name = "N", requires = "trust_keys")]
    keys_sequence: Option<u32>,
    /// The oldest release that can update to this one
    #[arg(long, value_name = "VERSION")]
    min_version: Option<String>,
    /// Name, in `release.json`, of a part of earlier releases that this one deliberately removes, such as code-server;
    /// repeatable. Hosts refuse a release that lacks any other part they have. Repeat the option in later releases
    /// until no machine is running a release with that part
    #[arg(long, value_name = "PART")]
    removes: Vec<String>,
    /// Days for which the signed manifest is valid, from the commit date
    #[arg(long, value_name = "DAYS", default_value_t = bundle::DEFAULT_VALID_DAYS)]
    valid_days: u32,
    /// Add Node.js, code-server, Claude Code and Codex, each at its pinned version unless --runtime names another
    #[arg(long)]
    full: bool,
    /// The source of runtime/NAME, as NAME=DIR or NAME=npm:PACKAGE@VERSION; repeatable. NAME is node, code-server,
    /// postgres (default: the pinned client tools of PostgreSQL 16) or agents/AGENT
    #[arg(long = "runtime", value_name = "SOURCE")]
    runtimes: Vec<runtime::RuntimeSource>,
    /// Leave out the shell, which needs NEXT_PUBLIC_IDP_PUBLISHABLE_KEY
    #[arg(long)]
    no_shell: bool,
    /// Leave out PostgreSQL's client tools, for hosts that run as local processes and have others; without any, a
    /// machine can neither back up nor restore
    #[arg(long)]
    no_postgres: bool,
    /// The smallest bundle that boots: the test build of the binary, two test apps, and PostgreSQL's client tools
    #[arg(long, conflicts_with_all = ["no_shell", "full", "runtimes"])]
    minimal: bool,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let minimal = args.minimal;
    let publishable_key = std::env::var(apps::KEY_VAR).unwrap_or_default();
    let publishable_key = (!args.no_shell && !minimal).then_some(publishable_key.as_str());
    let mut options = Options::new(&PathBuf::new(), &args.image_version, &args.out)?;
    options.signing_keys = args.signing_keys;
    options.trusted_keys = args.keys_sequence.map(|sequence| KeySet { sequence, keys: args.trust_keys });
    options.min_version = args.min_version;
    options.removes = args.removes;
    options.valid_days = args.valid_days;
    if !minimal {
        options.level = Compression::new(6);
        // Built first, so that a missing publishable key is reported before any long step.
        apps::build(&mut options, &target_dir().join("apps"), publishable_key)?;
        let sources = if args.full { runtime::prepare_full_sources(&args.runtimes)? } else { args.runtimes };
        options.runtime = runtime::fetch_parts(&sources)?;
    }
    if !args.no_postgres {
        runtime::add_client_tools(&mut options.runtime)?;
    }
    options.svc = match args.svc {
        Some(svc) => resolve_svc(Some(svc))?,
        None if minimal => resolve_svc(None)?,
        None => dist::build_if_outdated()?,
    };
    let built = bundle::build(&options)?;
    println!("{}\n{} bytes, sha256 {}", built.dir.join(ARCHIVE).display(), built.size_bytes, built.sha256);
    if options.signing_keys.is_empty() {
        println!("the manifest is unsigned, so hosts that require a signature refuse it: use --signing-key");
    }
    Ok(ExitCode::SUCCESS)
}
