//! Runs the browser tests: starts the demo services with a bundle of the built apps and the shell, and runs the
//! Playwright tests from `tests/browser` in Chromium.
//!
//! Missing dependencies are fetched: Playwright by npm from its lock file, Chromium by apt-get, if permitted.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::bundle::{self, apps, runtime};
use crate::dev::{self, service_info::ServiceInfo};
use crate::scenario::stack::{IMAGE_VERSION, RouterTransport, Stack, USER};
use crate::{apt, child, fetch};

/// The host of a non-existent identity provider: no request may be sent to it.
const IDP_HOST: &str = "idp.svc.test";
const CHROMIUM: &str = "/usr/bin/chromium";
const INSTALL_TIMEOUT: Duration = Duration::from_secs(600);
const TESTS_TIMEOUT: Duration = Duration::from_secs(1200);

/// Options for a run.
#[derive(Debug, Clone)]
pub struct Options {
    pub svc: PathBuf,
    /// Adds code-server and its Node.js to the bundle, and runs only code-server's tests.
    pub code_server: bool,
    /// A pattern for the names of the tests to run; `None` runs all.
    pub only: Option<String>,
}

/// Starts all services, runs the tests, and stops the services.
///
/// # Errors
/// Fails if a dependency or service is unavailable, if the bundle cannot be built, or if a test fails.
pub async fn run(options: &Options) -> Result<()> {
    let out = fetch::target_dir().join("browser");
    fs::create_dir_all(&out)?;
    let (chromium, test_dir) = (find_chromium()?, install_playwright()?);
    let (svc, bundle_dir, with_code_server) = (options.svc.clone(), out.join("bundle"), options.code_server);
    println!("browser: building apps, shell and bundle");
    let bundle =
        tokio::task::spawn_blocking(move || build_bundle(&svc, &bundle_dir, with_code_server)).await??;
    // In `/tmp`, because a Unix socket's path is limited to 107 bytes.
    let dir = tempfile::Builder::new().prefix("svc-web-").tempdir_in("/tmp")?;
    child::remove_on_exit(dir.path());
    println!("browser: starting platform, router, provider, store, database, identity provider");
    let (stack, _) = Stack::start(&options.svc, dir.path(), RouterTransport::Plain).await?;
    let result = run_tests(&stack, &bundle, &chromium, &test_dir, &out, options).await;
    if result.is_err() {
        stack.print_logs();
    }
    stack.stop().await;
    result
}

async fn run_tests(
    stack: &Stack,
    bundle: &Path,
    chromium: &Path,
    test_dir: &Path,
    out: &Path,
    options: &Options,
) -> Result<()> {
    let machine = dev::provision(stack, Some(bundle)).await?;
    let info_file = out.join("dev.json");
    fs::write(&info_file, serde_json::to_vec_pretty(&ServiceInfo::collect(stack, &machine)?)?)?;
    let mut node = node_test_command();
    if let Some(only) = &options.only {
        node.arg(format!("--test-name-pattern={only}"));
    }
    let files: &[&str] = if options.code_server {
        &["code.test.mjs"]
    } else {
        &["shell.test.mjs", "router.test.mjs", "files.test.mjs", "apps.test.mjs", "hostile.test.mjs"]
    };
    node.args(files.iter().map(|file| test_dir.join(file)));
    node.env("SVC_SERVICE_INFO", &info_file).env("SVC_CHROMIUM", chromium).env("SVC_SCREENSHOTS", out);
    let output = tokio::task::spawn_blocking(move || child::run(node, TESTS_TIMEOUT)).await?;
    match &output {
        Ok(text) => println!("{text}"),
        Err(error) => println!("{error:#}"),
    }
    output.map(drop).context("the tests in tests/browser failed")
}

/// Opens the owner's code-server through the router, types a command into a terminal, and waits for the command to
/// exit.
///
/// # Errors
/// Fails if Chromium is unavailable, the terminal does not open, or the command does not exit.
pub async fn run_in_terminal(stack: &Stack, command: &str) -> Result<()> {
    let out = fetch::target_dir().join("browser");
    fs::create_dir_all(&out)?;
    let (chromium, test_dir) =
        tokio::task::spawn_blocking(|| anyhow::Ok((find_chromium()?, install_playwright()?))).await??;
    let info = json!({
        "routerUrl": stack.router_url(),
        "appHost": stack.transport.app_host(),
        "codeHost": stack.transport.code_host(),
        "idp": { "mintUrl": format!("{}/mint", stack.issuer()) },
        "owner": { "idpUserId": USER },
    });
    let info_file = out.join("terminal.json");
    fs::write(&info_file, serde_json::to_vec_pretty(&info)?)?;
    let mut node = node_test_command();
    node.arg(test_dir.join("terminal.test.mjs")).env("SVC_TERMINAL_COMMAND", command);
    node.env("SVC_SERVICE_INFO", &info_file).env("SVC_CHROMIUM", chromium).env("SVC_SCREENSHOTS", out);
    tokio::task::spawn_blocking(move || child::run(node, TESTS_TIMEOUT)).await?.map(drop)
}

fn node_test_command() -> Command {
    let mut node = Command::new("node");
    // `--test-force-exit` ends the run even if a page or browser is still open.
    node.args(["--test", "--test-concurrency=1", "--test-reporter=spec", "--test-force-exit"]);
    node
}

fn build_bundle(svc: &Path, out: &Path, with_code_server: bool) -> Result<PathBuf> {
    let mut options = bundle::Options::new(svc, IMAGE_VERSION, out)?;
    apps::build(&mut options, &fetch::target_dir().join("browser/apps"), Some(&apps::test_key(IDP_HOST)))?;
    if with_code_server {
        options.runtime = runtime::fetch_code_server()?;
    }
    bundle::build(&options)?;
    Ok(out.to_owned())
}

fn find_chromium() -> Result<PathBuf> {
    let path = PathBuf::from(CHROMIUM);
    if !path.exists() {
        apt::install(&["chromium"], "Chromium is missing")?;
    }
    ensure!(path.exists(), "the package chromium is installed, but {CHROMIUM} is still missing");
    Ok(path)
}

/// Installs the packages in the lock file and returns the directory with the tests.
fn install_playwright() -> Result<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("browser");
    let lock = fs::read_to_string(dir.join("package-lock.json"))?;
    let stamp = dir.join("node_modules/.svc-lock");
    if fs::read_to_string(&stamp).is_ok_and(|installed| installed == lock) {
        return Ok(dir);
    }
    let mut npm = Command::new("npm");
    npm.args(["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]).current_dir(&dir);
    child::run(npm, INSTALL_TIMEOUT).context("cannot fetch Playwright with npm")?;
    fs::write(stamp, lock)?;
    Ok(dir)
}
