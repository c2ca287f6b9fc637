//! The lab's bundles: a small one with the binary, the units, the kit's apps and PostgreSQL's client tools, and a full
//! one with every part of a release.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use kit::bundle::{Options, apps, runtime};
use kit::fetch::target_dir;
use kit::pg::PgBinaries;

/// A host name that does not exist and is never contacted.
const IDP_HOST: &str = "idp.svc.test";

/// Prefetches the parts of [`full_options`]; requires Node.js 20 or newer and npm.
pub fn prefetch_full_parts() -> Result<()> {
    for program in ["node", "npm"] {
        let version = Command::new(program).arg("--version").output();
        version.with_context(|| {
            format!("a full release requires Node.js 20 or newer and npm: {program} is missing")
        })?;
    }
    runtime::fetch_parts(&runtime::prepare_full_sources(&[])?).map(drop)
}

/// Like [`small_options`], with the default apps, the shell, and the runtimes of `cargo xtask bundle --full`.
pub fn full_options(svc: &Path, postgres: &PgBinaries, version: &str, dir: &Path) -> Result<Options> {
    let mut options = small_options(svc, postgres, version, dir)?;
    apps::build(&mut options, &target_dir().join("lab/apps"), Some(&apps::test_key(IDP_HOST)))?;
    options.runtime.extend(runtime::fetch_parts(&runtime::prepare_full_sources(&[])?)?);
    Ok(options)
}

/// Returns options for a bundle that boots on a machine; its parts are assembled in `dir`.
pub fn small_options(svc: &Path, postgres: &PgBinaries, version: &str, dir: &Path) -> Result<Options> {
    let mut options = Options::new(svc, version, &dir.join("out"))?;
    options.runtime.push(runtime::copy_client_tools(postgres, &dir.join("postgres"))?);
    Ok(options)
}
