//! The bundles of the lab: a small one, with the executable, the units, the kit's apps and PostgreSQL's client tools; and
//! a full one, with all that a release may have.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::browser;
use crate::bundle::{Options, Part, apps};
use crate::fetch::target_dir;
use crate::pg::PgBinaries;

/// What a machine needs of PostgreSQL beside its server.
const CLIENT_TOOLS: [&str; 4] = ["pg_dump", "pg_restore", "psql", "pg_isready"];

/// Of no identity provider; nothing here asks it.
const IDP_HOST: &str = "idp.svc.test";

/// What [`full`] fetches and builds, once; it takes Node.js 20 or newer and npm.
pub fn prepare() -> Result<()> {
    for program in ["node", "npm"] {
        let found = Command::new(program).arg("--version").output();
        found.with_context(|| format!("a full release takes Node.js 20 or newer: there is no {program}"))?;
    }
    browser::code_server().map(drop)
}

/// As [`small`], with the default apps, the shell, code-server and its Node.js.
pub fn full(svc: &Path, postgres: &PgBinaries, version: &str, dir: &Path) -> Result<Options> {
    let mut options = small(svc, postgres, version, dir)?;
    apps::build(&mut options, &target_dir().join("lab/apps"), Some(&apps::test_key(IDP_HOST)))?;
    options.runtime.extend(browser::code_server()?);
    Ok(options)
}

/// Options for a bundle that boots on a machine; `dir` is a place to put its parts together.
pub fn small(svc: &Path, postgres: &PgBinaries, version: &str, dir: &Path) -> Result<Options> {
    let mut options = Options::new(svc, version, &dir.join("out"))?;
    let tools = dir.join("postgres");
    client_tools(postgres, &tools)?;
    options.runtime.push(Part { name: "postgres".to_owned(), version: "16.14".to_owned(), dir: tools });
    Ok(options)
}

/// The programs find their libraries by the path between the two, so that is kept.
fn client_tools(postgres: &PgBinaries, into: &Path) -> Result<()> {
    let install = postgres.dir().parent().context("PostgreSQL's programs lie in no installation")?;
    let (name, package) = (install.file_name(), install.parent());
    let (name, package) = name.zip(package).context("PostgreSQL's programs lie in no package")?;
    let package_name = package.file_name().context("a package has a name")?;
    let place = into.join(package_name).join(name).join("bin");
    fs::create_dir_all(&place)?;
    for tool in CLIENT_TOOLS {
        let from = postgres.dir().join(tool);
        fs::copy(&from, place.join(tool)).with_context(|| format!("copy {}", from.display()))?;
    }
    symlink(Path::new(package_name).join(name).join("bin"), into.join("bin"))?;
    let libraries = package.with_added_extension("libs");
    if let (true, Some(name)) = (libraries.is_dir(), libraries.file_name()) {
        let there = into.join(name);
        fs::create_dir_all(&there)?;
        for library in fs::read_dir(&libraries)? {
            let library = library?;
            fs::copy(library.path(), there.join(library.file_name()))?;
        }
    }
    Ok(())
}
