//! `cargo xtask bundle`: a host bundle from this tree, ready for `svcctl bundle publish`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use kit::bundle::{self, ARCHIVE, Compression, KeySet, Options, apps, runtime};
use kit::fetch::target_dir;

use crate::{dist, svc_or_built};

#[derive(Parser)]
pub struct Args {
    /// The release's name, under which the bundle is published
    #[arg(long, value_name = "VERSION")]
    image_version: String,
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// The binary that the bundle carries; else the static one of `cargo xtask dist`
    #[arg(long, value_name = "PATH")]
    svc: Option<PathBuf>,
    /// Signs the manifest: Ed25519, PKCS#8 PEM, as `openssl genpkey -algorithm ed25519` makes it; repeatable: hosts that
    /// trust any of the keys take the release
    #[arg(long = "signing-key", value_name = "FILE")]
    signing_keys: Vec<PathBuf>,
    /// All public keys that hosts are to trust once this release is well on them, base64 of 32 bytes each; one of them must
    /// be of a signing key
    #[arg(long, value_name = "KEYS", value_delimiter = ',', requires = "keys_sequence")]
    trust_keys: Vec<String>,
    /// The number of this set of trusted keys: higher than that of every set before
    #[arg(long, value_name = "N", requires = "trust_keys")]
    keys_sequence: Option<u32>,
    /// The oldest release that can be updated to this one
    #[arg(long, value_name = "VERSION")]
    min_version: Option<String>,
    /// How long the signed manifest holds, from the commit's date on
    #[arg(long, value_name = "DAYS", default_value_t = bundle::VALID_DAYS)]
    valid_days: u32,
    /// NAME=DIR or NAME=npm:PACKAGE@VERSION, as runtime/NAME: node, code-server, postgres (else the pinned
    /// client tools of PostgreSQL 16), agents/NAME; repeatable
    #[arg(long = "runtime", value_name = "SOURCE")]
    runtimes: Vec<runtime::Source>,
    /// Without the shell, which takes NEXT_PUBLIC_IDP_PUBLISHABLE_KEY
    #[arg(long)]
    no_shell: bool,
    /// Without PostgreSQL's client tools: for processes that find others; a machine could neither back up nor restore
    #[arg(long)]
    no_postgres: bool,
    /// The smallest one that boots: the binary as the tests build it, two test apps, and PostgreSQL's client tools
    #[arg(long, conflicts_with_all = ["no_shell", "runtimes"])]
    minimal: bool,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let minimal = args.minimal;
    let key = std::env::var(apps::KEY).unwrap_or_default();
    let key = (!args.no_shell && !minimal).then_some(key.as_str());
    let mut options = Options::new(&PathBuf::new(), &args.image_version, &args.out)?;
    options.signing_keys = args.signing_keys;
    options.trusted_keys = args.keys_sequence.map(|sequence| KeySet { sequence, keys: args.trust_keys });
    options.min_version = args.min_version;
    options.valid_days = args.valid_days;
    if !minimal {
        options.level = Compression::new(6);
        // What can be refused is refused before anything long begins.
        apps::build(&mut options, &target_dir().join("apps"), key)?;
        options.runtime = runtime::gather(&args.runtimes)?;
    }
    if !args.no_postgres {
        runtime::add_client_tools(&mut options.runtime)?;
    }
    options.svc = match args.svc {
        Some(svc) => svc_or_built(Some(svc))?,
        None if minimal => svc_or_built(None)?,
        None => dist::of_this_tree()?,
    };
    let built = bundle::build(&options)?;
    println!("{}\n{} bytes, sha256 {}", built.dir.join(ARCHIVE).display(), built.size_bytes, built.sha256);
    if options.signing_keys.is_empty() {
        println!("its manifest is not signed (--signing-key): hosts that demand a signature will refuse it");
    }
    Ok(ExitCode::SUCCESS)
}
