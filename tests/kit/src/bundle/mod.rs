//! The host bundle: `svc-host-bundle.tar.gz`, its `.sha256`, and its manifest with signature.
//!
//! The same inputs give the same bytes: entries in order, no times, no owners, no number of cores. Content is streamed,
//! whatever its size. What builds apps, shell and runtimes is not here.

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
use gzip::Gzip;
pub use manifest::{KeySet, Manifest, SigningKey};
use release::Component;
use tree::Tree;

pub const ARCHIVE: &str = "svc-host-bundle.tar.gz";
/// How long a signed manifest holds, where nothing else is said.
pub const VALID_DAYS: u32 = 365;

const KIT_APPS: [(&str, &str); 4] = [
    ("app/apps/notes/svc.json", include_str!("../../apps/notes/svc.json")),
    ("app/apps/notes/dist/index.html", include_str!("../../apps/notes/dist/index.html")),
    ("app/apps/tasks/svc.json", include_str!("../../apps/tasks/svc.json")),
    ("app/apps/tasks/dist/index.html", include_str!("../../apps/tasks/dist/index.html")),
];

/// Which default apps a bundle has.
#[derive(Debug, Clone)]
pub enum Apps {
    /// The kit's two small ones, which need no build.
    Kit,
    /// A directory with one of each app's name, with `svc.json` and `dist/`.
    Built(PathBuf),
}

/// A tree that is taken as it is.
#[derive(Debug, Clone)]
pub struct Part {
    pub name: String,
    pub version: String,
    pub dir: PathBuf,
}

/// What to build.
#[derive(Debug, Clone)]
pub struct Options {
    pub svc: PathBuf,
    pub image_version: String,
    pub out: PathBuf,
    /// The tree of units; where there is none, the bundle's is empty.
    pub systemd: PathBuf,
    pub apps: Apps,
    /// The shell's static build.
    pub shell: Option<Part>,
    /// Packages that apps share: `app/packages/<name>`.
    pub packages: Vec<Part>,
    /// `runtime/<name>`.
    pub runtime: Vec<Part>,
    /// Each of them signs the manifest.
    pub signing_keys: Vec<PathBuf>,
    pub trusted_keys: Option<KeySet>,
    pub min_version: Option<String>,
    pub created_at: Timestamp,
    pub valid_days: u32,
    pub level: Compression,
}

impl Options {
    /// The smallest bundle that boots.
    pub fn new(svc: &Path, image_version: &str, out: &Path) -> Result<Self> {
        Ok(Self {
            svc: svc.to_owned(),
            image_version: image_version.to_owned(),
            out: out.to_owned(),
            systemd: project().join("systemd"),
            apps: Apps::Kit,
            shell: None,
            packages: Vec::new(),
            runtime: Vec::new(),
            signing_keys: Vec::new(),
            trusted_keys: None,
            min_version: None,
            created_at: Timestamp::from_second(source_date())?,
            valid_days: VALID_DAYS,
            level: Compression::fast(),
        })
    }
}

/// A built bundle.
#[derive(Debug, Clone)]
pub struct Bundle {
    pub dir: PathBuf,
    pub sha256: String,
    pub size_bytes: u64,
}

/// Builds the smallest bundle that boots, with the kit's apps and the project's units.
pub fn minimal(svc: &Path, image_version: &str, out: &Path) -> Result<Bundle> {
    build(&Options::new(svc, image_version, out)?)
}

/// Builds a bundle in `options.out`: the archive, `.sha256`, `.json`, and with a key `.json.sig`.
pub fn build(options: &Options) -> Result<Bundle> {
    let keys: Vec<_> = options.signing_keys.iter().map(|key| SigningKey::read(key)).collect::<Result<_>>()?;
    if let Some(set) = &options.trusted_keys {
        check_key_set(set, &keys)?;
    }
    let expires_at = manifest::days_after(options.created_at, options.valid_days)?;
    ensure!(
        keys.is_empty() || expires_at > Timestamp::now(),
        "no host would believe the signed manifest: it would have expired at {}, {} days after {}\n  \
         next: set SOURCE_DATE_EPOCH to when the sources were made (without it, it is the commit's time, or 1970 \
         without one), or give more --valid-days",
        manifest::time(expires_at),
        options.valid_days,
        manifest::time(options.created_at),
    );
    let out = &options.out;
    fs::create_dir_all(out).with_context(|| format!("make {}", out.display()))?;
    let staging = tempfile::tempdir_in(out)?;
    let program = without_symbols(&options.svc, staging.path())?;
    let tree = gather(options, program)?;
    let unfinished = staging.path().join(ARCHIVE);
    let hashing = Hashing { inner: File::create(&unfinished)?, hasher: Sha256::new(), size: 0 };
    let mut gzip = BufWriter::with_capacity(128 * 1024, Gzip::new(hashing, options.level)?);
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
        created_at: manifest::time(options.created_at),
        expires_at: manifest::time(expires_at),
        trusted_keys: options.trusted_keys.clone(),
    };
    let manifest = manifest.text()?;
    fs::rename(&unfinished, out.join(ARCHIVE))?;
    fs::write(out.join(format!("{ARCHIVE}.sha256")), format!("{sha256}  {ARCHIVE}\n"))?;
    fs::write(out.join(format!("{ARCHIVE}.json")), &manifest)?;
    let signature = out.join(format!("{ARCHIVE}.json.sig"));
    let lines: String = keys.iter().map(|key| key.signature_line(manifest.as_bytes())).collect();
    if !lines.is_empty() {
        fs::write(&signature, lines)?;
    } else if signature.exists() {
        // One of an earlier build would be of another manifest.
        fs::remove_file(&signature)?;
    }
    Ok(Bundle { dir: out.clone(), sha256, size_bytes: written.size })
}

/// A set that hosts would refuse is not built: it must have a key that signs it.
fn check_key_set(set: &KeySet, signing: &[SigningKey]) -> Result<()> {
    ensure!(set.sequence > 0, "the sequence of the trusted keys begins with 1");
    ensure!(
        signing.iter().any(|key| set.keys.contains(&key.public_key_base64())),
        "none of the trusted keys signs this bundle: no host would believe the set\n  \
         next: sign with a key that stays trusted, too (--signing-key, repeated)"
    );
    Ok(())
}

/// The image version of a bundle that was built into `dir`, as its manifest says.
pub fn version_of(dir: &Path) -> Result<String> {
    let path = dir.join(format!("{ARCHIVE}.json"));
    let text = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
    let manifest: serde_json::Value = serde_json::from_slice(&text)?;
    let version = manifest["imageVersion"].as_str().map(str::to_owned);
    version.with_context(|| format!("no imageVersion in {}", path.display()))
}

fn gather(options: &Options, program: PathBuf) -> Result<Tree> {
    let mut tree = Tree::default();
    let mut components = Vec::new();
    // "svc 0.1.0 (commit …, date)"
    let version = ask(&options.svc, "--version")?;
    let version = version.split_whitespace().nth(1).unwrap_or("unknown").to_owned();
    components.push(Component::new("svc", &version, "bin/svc"));
    for applet in ask(&options.svc, "--list")?.lines() {
        tree.link(format!("bin/{applet}"), "svc");
    }
    tree.program("bin/svc", program);
    match &options.apps {
        Apps::Kit => {
            for (path, content) in KIT_APPS {
                tree.bytes(path, content);
                components.extend(release::app(path, content.as_bytes())?);
            }
        }
        Apps::Built(dir) => {
            tree.copy("app/apps", dir)?;
            for (path, manifest) in release::manifests(dir)? {
                components.extend(release::app(&path, &manifest)?);
            }
        }
    }
    let mut add = |path: String, part: &Part| {
        components.push(Component::new(&part.name, &part.version, &path));
        tree.copy(&path, &part.dir)
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
    for agent in &options.runtime {
        let Some(name) = agent.name.strip_prefix("agents/") else { continue };
        for command in runtime::commands(agent)? {
            tree.link(format!("runtime/agents/bin/{command}"), format!("../{name}/bin/{command}"));
        }
    }
    tree.directory("runtime");
    tree.directory("systemd");
    if options.systemd.is_dir() {
        tree.copy("systemd", &options.systemd)?;
    }
    tree.bytes("release.json", release::text(&options.image_version, options.created_at, &components)?);
    Ok(tree)
}

/// The root of the project.
fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new(".")).to_owned()
}

/// When the sources were made, so that the time of the build is in no byte: `SOURCE_DATE_EPOCH`, else the commit's.
fn source_date() -> i64 {
    let said = std::env::var("SOURCE_DATE_EPOCH").ok();
    let commit = || {
        let mut git = Command::new("git");
        git.current_dir(env!("CARGO_MANIFEST_DIR")).args(["show", "-s", "--format=%ct", "HEAD"]);
        child::run(git, Duration::from_secs(20)).ok()
    };
    said.or_else(commit).and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

fn ask(svc: &Path, word: &str) -> Result<String> {
    let mut command = Command::new(svc);
    command.arg(word);
    let said = child::run(command, Duration::from_secs(30))?;
    ensure!(!said.trim().is_empty(), "{} {word} says nothing", svc.display());
    Ok(said)
}

/// A copy without debug information, a quarter of the size; without `strip`, the binary as it is.
fn without_symbols(svc: &Path, dir: &Path) -> Result<PathBuf> {
    let stripped = dir.join("svc");
    let mut strip = Command::new("strip");
    strip.arg("--strip-debug").arg("-o").arg(&stripped).arg(svc);
    match child::run(strip, Duration::from_secs(60)) {
        Ok(_) => Ok(stripped),
        Err(_) => svc.canonicalize().with_context(|| format!("find {}", svc.display())),
    }
}

struct Hashing {
    inner: File,
    hasher: Sha256,
    size: u64,
}

impl Write for Hashing {
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
