//! Builds the host bundle: `svc-host-bundle.tar.gz`, its `.sha256`, and its signed manifest.
//!
//! The output is reproducible: entries are sorted and have no times or owners, and the number of cores has no effect.
//! Content is streamed. `apps` builds the default apps and the shell; `runtime` fetches the runtimes.

pub mod apps;
mod gzip;
mod manifest;
mod release;
pub mod runtime;
mod tree;

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
pub use flate2::Compression;
use jiff::Timestamp;
use sha2::{Digest, Sha256};

use crate::child;
use gzip::GzipWriter;
pub use manifest::{KeySet, Manifest, SigningKey};
use release::Component;
use tree::Tree;

pub const ARCHIVE: &str = "svc-host-bundle.tar.gz";
/// Default validity period of a signed manifest.
pub const DEFAULT_VALID_DAYS: u32 = 365;

const KIT_APPS: [(&str, &str); 5] = [
    ("app/apps/notes/svc.json", include_str!("../../apps/notes/svc.json")),
    ("app/apps/notes/dist/index.html", include_str!("../../apps/notes/dist/index.html")),
    ("app/apps/notes/dist/main.js", include_str!("../../apps/notes/dist/main.js")),
    ("app/apps/tasks/svc.json", include_str!("../../apps/tasks/svc.json")),
    ("app/apps/tasks/dist/index.html", include_str!("../../apps/tasks/dist/index.html")),
];

/// A bundle's default apps.
#[derive(Debug, Clone)]
pub enum Apps {
    /// The kit's two small apps, which need no build.
    Kit,
    /// A directory with one subdirectory per app, each with `svc.json` and `dist/`.
    Built(PathBuf),
}

/// A directory tree to pack, with the name and version of its component in `release.json`.
#[derive(Debug, Clone)]
pub struct BundlePart {
    pub name: String,
    pub version: String,
    pub dir: PathBuf,
}

/// The inputs for a build.
#[derive(Debug, Clone)]
pub struct Options {
    pub svc: PathBuf,
    pub image_version: String,
    pub out: PathBuf,
    /// The unit directory; if it does not exist, the bundle has no units.
    pub systemd: PathBuf,
    pub apps: Apps,
    /// The shell's static build.
    pub shell: Option<BundlePart>,
    /// Packages shared by apps: `app/packages/<name>`.
    pub packages: Vec<BundlePart>,
    /// Packed as `runtime/<name>`.
    pub runtime: Vec<BundlePart>,
    /// All of these keys sign the manifest.
    pub signing_keys: Vec<PathBuf>,
    pub trusted_keys: Option<KeySet>,
    /// Parts of earlier releases that this one removes on purpose.
    pub removes: Vec<String>,
    pub min_version: Option<String>,
    pub created_at: Timestamp,
    pub valid_days: u32,
    pub level: Compression,
}

impl Options {
    /// Returns options for the smallest bundle that boots.
    pub fn new(svc: &Path, image_version: &str, out: &Path) -> Result<Self> {
        Ok(Self {
            svc: svc.to_owned(),
            image_version: image_version.to_owned(),
            out: out.to_owned(),
            systemd: project_dir().join("systemd"),
            apps: Apps::Kit,
            shell: None,
            packages: Vec::new(),
            runtime: Vec::new(),
            signing_keys: Vec::new(),
            trusted_keys: None,
            removes: Vec::new(),
            min_version: None,
            created_at: Timestamp::from_second(source_date())?,
            valid_days: DEFAULT_VALID_DAYS,
            level: Compression::fast(),
        })
    }
}

/// A built bundle's directory, and the digest and size of its archive.
#[derive(Debug, Clone)]
pub struct Bundle {
    pub dir: PathBuf,
    pub sha256: String,
    pub size_bytes: u64,
}

/// Parts that no release may remove: hosts reject an update from a release with these parts to one without them.
const REQUIRED_PARTS: [&str; 2] = ["postgres", "shell"];

/// Builds the smallest bundle that boots, with the kit's apps and the project's units.
pub fn build_minimal(svc: &Path, image_version: &str, out: &Path) -> Result<Bundle> {
    build(&Options::new(svc, image_version, out)?)
}

/// Builds a bundle in `options.out`: the archive, `.sha256`, `.json`, and `.json.sig` if there are signing keys.
pub fn build(options: &Options) -> Result<Bundle> {
    let keys: Vec<_> =
        options.signing_keys.iter().map(|path| SigningKey::read(path)).collect::<Result<_>>()?;
    if let Some(set) = &options.trusted_keys {
        check_key_set(set, &keys)?;
    }
    let expires_at = manifest::add_days(options.created_at, options.valid_days)?;
    ensure!(
        keys.is_empty() || expires_at > Timestamp::now(),
        "the signed manifest would be expired on all hosts: it is valid until {}, {} days after {}\n  \
         next: set SOURCE_DATE_EPOCH to the time of the sources (default: the commit's time, or 1970 \
         without git), or increase --valid-days",
        manifest::format_time(expires_at),
        options.valid_days,
        manifest::format_time(options.created_at),
    );
    let out = &options.out;
    fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
    let staging = tempfile::tempdir_in(out)?;
    let program = strip_symbols(&options.svc, staging.path())?;
    let tree = assemble_tree(options, program)?;
    let staged = staging.path().join(ARCHIVE);
    let hashing_file = HashingFile { inner: File::create(&staged)?, hasher: Sha256::new(), size: 0 };
    let mut gzip = BufWriter::with_capacity(128 * 1024, GzipWriter::new(hashing_file, options.level)?);
    tree.write(&mut gzip)?;
    let written = gzip.into_inner().map_err(io::IntoInnerError::into_error)?.finish()?;
    written.inner.sync_all()?;
    let sha256 = hex::encode(written.hasher.finalize());
    let manifest = Manifest {
        version: 1,
        image_version: options.image_version.clone(),
        sha256: sha256.clone(),
        size_bytes: written.size,
        min_version: options.min_version.clone(),
        created_at: manifest::format_time(options.created_at),
        expires_at: manifest::format_time(expires_at),
        trusted_keys: options.trusted_keys.clone(),
        removes: options.removes.clone(),
    };
    let manifest = manifest.render()?;
    fs::rename(&staged, out.join(ARCHIVE))?;
    fs::write(out.join(format!("{ARCHIVE}.sha256")), format!("{sha256}  {ARCHIVE}\n"))?;
    fs::write(out.join(format!("{ARCHIVE}.json")), &manifest)?;
    let signature = out.join(format!("{ARCHIVE}.json.sig"));
    let lines: String = keys.iter().map(|key| key.signature_line(manifest.as_bytes())).collect();
    if !lines.is_empty() {
        fs::write(&signature, lines)?;
    } else if signature.exists() {
        // An earlier build's signature belongs to a different manifest.
        fs::remove_file(&signature)?;
    }
    Ok(Bundle { dir: out.clone(), sha256, size_bytes: written.size })
}

/// Rejects a key set that hosts would reject: one of its keys must sign the bundle.
fn check_key_set(set: &KeySet, signing: &[SigningKey]) -> Result<()> {
    ensure!(set.sequence > 0, "the sequence number of the trusted keys must be at least 1");
    ensure!(
        signing.iter().any(|key| set.keys.contains(&key.public_key_base64())),
        "none of the trusted keys signs this bundle: hosts would reject the set\n  \
         next: sign with a key from the set as well (repeat --signing-key)"
    );
    Ok(())
}

/// Rejects `--removes` for a part that the bundle still contains, or that hosts require.
fn check_removals(removes: &[String], components: &[Component]) -> Result<()> {
    for part in removes {
        ensure!(
            components.iter().all(|component| component.name != *part),
            "the bundle contains {part}, which --removes declares as removed: omit one of the two"
        );
        ensure!(
            !REQUIRED_PARTS.contains(&part.as_str()),
            "hosts reject an update that drops {part}: it cannot be removed"
        );
    }
    Ok(())
}

/// Reads the image version from the manifest in `dir`.
pub fn read_version(dir: &Path) -> Result<String> {
    let path = dir.join(format!("{ARCHIVE}.json"));
    let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let manifest: serde_json::Value = serde_json::from_slice(&text)?;
    let version = manifest["imageVersion"].as_str().map(str::to_owned);
    version.with_context(|| format!("no imageVersion in {}", path.display()))
}

fn assemble_tree(options: &Options, program: PathBuf) -> Result<Tree> {
    let mut tree = Tree::default();
    let mut components = Vec::new();
    // For example, "svc 0.1.0 (commit …, date)".
    let version = run_svc(&options.svc, "--version")?;
    let version = version.split_whitespace().nth(1).unwrap_or("unknown").to_owned();
    components.push(Component::new("svc", &version, "bin/svc"));
    for applet in run_svc(&options.svc, "--list")?.lines() {
        tree.add_link(format!("bin/{applet}"), "svc");
    }
    tree.add_executable("bin/svc", program);
    match &options.apps {
        Apps::Kit => {
            for (path, content) in KIT_APPS {
                tree.add_bytes(path, content);
                components.extend(release::app_component(path, content.as_bytes())?);
            }
        }
        Apps::Built(dir) => {
            tree.add_tree("app/apps", dir)?;
            for (path, manifest) in release::read_manifests(dir)? {
                components.extend(release::app_component(&path, &manifest)?);
            }
        }
    }
    let mut add = |path: String, part: &BundlePart| {
        components.push(Component::new(&part.name, &part.version, &path));
        tree.add_tree(&path, &part.dir)
    };
    if let Some(shell) = &options.shell {
        add("app/shell".to_owned(), shell)?;
    }
    for package in &options.packages {
        add(format!("app/packages/{}", package.name), package)?;
    }
    for runtime in &options.runtime {
        add(format!("runtime/{}", runtime.name), runtime)?;
    }
    for part in &options.runtime {
        let Some(name) = part.name.strip_prefix("agents/") else { continue };
        for command in runtime::list_commands(part)? {
            tree.add_link(format!("runtime/agents/bin/{command}"), format!("../{name}/bin/{command}"));
        }
    }
    tree.add_directory("runtime");
    tree.add_directory("systemd");
    if options.systemd.is_dir() {
        tree.add_tree("systemd", &options.systemd)?;
    }
    check_removals(&options.removes, &components)?;
    tree.add_bytes("release.json", release::render(&options.image_version, options.created_at, &components)?);
    Ok(tree)
}

/// Returns the project's root directory.
fn project_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new(".")).to_owned()
}

/// Returns the time of the sources, so that the build time does not affect the output: `SOURCE_DATE_EPOCH`, otherwise
/// the commit's time, otherwise 1970. A value that is not a number counts as 1970.
fn source_date() -> i64 {
    let epoch = std::env::var("SOURCE_DATE_EPOCH").ok();
    let commit = || {
        let mut git = Command::new("git");
        git.current_dir(env!("CARGO_MANIFEST_DIR")).args(["show", "-s", "--format=%ct", "HEAD"]);
        child::run(git, Duration::from_secs(20)).ok()
    };
    epoch.or_else(commit).and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// Runs `svc` and returns its output, which must not be empty.
fn run_svc(svc: &Path, arg: &str) -> Result<String> {
    let mut command = Command::new(svc);
    command.arg(arg);
    let output = child::run(command, Duration::from_secs(30))?;
    ensure!(!output.trim().is_empty(), "{} {arg} printed nothing", svc.display());
    Ok(output)
}

/// Copies the binary without debug information and symbols, which halves its size. If `strip` is missing or fails,
/// returns the original.
fn strip_symbols(svc: &Path, dir: &Path) -> Result<PathBuf> {
    let stripped = dir.join("svc");
    let mut strip = Command::new("strip");
    strip.arg("--strip-all").arg("-o").arg(&stripped).arg(svc);
    match child::run(strip, Duration::from_secs(60)) {
        Ok(_) => Ok(stripped),
        Err(_) => svc.canonicalize().with_context(|| format!("cannot find {}", svc.display())),
    }
}

struct HashingFile {
    inner: File,
    hasher: Sha256,
    size: u64,
}

impl Write for HashingFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..n]);
        self.size += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests;
