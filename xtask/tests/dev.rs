//! Uses `cargo xtask dev` as a developer does: starts, stops and kills instances, and runs the commands they print.

#![allow(
    clippy::unwrap_used,
    reason = "the whole file is test code; clippy recognizes only #[test] functions"
)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

const START_TIMEOUT: Duration = Duration::from_secs(180);
const STOP_TIMEOUT: Duration = Duration::from_secs(60);

/// A running instance; killed on drop.
struct Dev {
    process: Child,
    dir: PathBuf,
    log: PathBuf,
}

impl Dev {
    fn start(dir: &Path) -> Self {
        let log = dir.with_added_extension("log");
        let out = fs::File::create(&log).unwrap();
        let process = command(dir).stdout(out.try_clone().unwrap()).stderr(out).spawn().unwrap();
        kit::child::kill_on_exit(process.id(), kit::child::AtExit::Kill);
        Self { process, dir: dir.to_owned(), log }
    }

    /// Waits for `dev: ready`. Returns the contents of `dev.json`.
    fn wait_until_ready(&mut self) -> Value {
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            if self.output().contains("dev: ready") {
                return serde_json::from_slice(&fs::read(self.dir.join("dev.json")).unwrap()).unwrap();
            }
            let status = self.process.try_wait().unwrap();
            assert!(status.is_none() && Instant::now() < deadline, "{status:?}: {}", self.output());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn output(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn signal(&self, signal: &str) {
        let pid = self.process.id().to_string();
        assert!(Command::new("kill").args(["-s", signal, &pid]).status().unwrap().success());
    }

    fn wait(&mut self) -> std::process::ExitStatus {
        kit::child::wait_until(&mut self.process, Instant::now() + STOP_TIMEOUT)
            .expect("the instance should exit")
    }
}

impl Drop for Dev {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
        kit::child::unregister(self.process.id());
    }
}

fn command(dir: &Path) -> Command {
    let xtask = Path::new(env!("CARGO_BIN_EXE_xtask"));
    let mut command = Command::new(xtask);
    command.arg("dev").arg("--svc").arg(xtask.with_file_name("svc")).arg("--dir").arg(dir);
    command.stdin(Stdio::null());
    command
}

/// Runs command lines in a new shell.
fn run_in_shell(script: &str) -> Output {
    Command::new("sh").args(["-ec", script]).env_remove("NO_COLOR").output().unwrap()
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Returns the command lines of the processes that have the directory in their arguments or whose working directory is
/// in it.
fn list_processes(dir: &str) -> Vec<String> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let lines = entries.filter_map(|entry| {
        let line = fs::read(entry.path().join("cmdline")).ok()?;
        let cwd = fs::read_link(entry.path().join("cwd")).ok()?;
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        (line.contains(dir) || cwd.starts_with(dir)).then_some(line)
    });
    lines.collect()
}

fn eventually(failure: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + STOP_TIMEOUT;
    while !condition() {
        assert!(Instant::now() < deadline, "timed out: {failure}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn is_listening(url: &str) -> bool {
    let address: std::net::SocketAddr = url.trim_start_matches("http://").parse().unwrap();
    std::net::TcpStream::connect(address).is_ok()
}

#[test]
fn dev_prints_working_commands_and_cleans_up() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("dev");
    let mut dev = Dev::start(&dir);
    let json = dev.wait_until_ready();
    for member in ["platformUrl", "appHost", "codeHost", "routerUrl", "operatorToken", "providerUrl"] {
        assert!(json[member].as_str().is_some_and(|text| !text.is_empty()), "{member}: {json}");
    }
    for member in ["endpoint", "accessKey", "secretKey", "bucket"] {
        assert!(json["s3"][member].is_string(), "{member}: {json}");
    }
    for file in ["dev.json", "operator.env"] {
        let mode = fs::metadata(dir.join(file)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{file}");
    }

    // Every printed command works when pasted.
    let output = dev.output();
    let lines_with_prefix = |prefix: &str| -> Vec<&str> {
        output.lines().map(str::trim).filter(|line| line.starts_with(prefix)).collect()
    };
    let operator_script = [
        lines_with_prefix(". ")[0],
        lines_with_prefix("svcctl list")[0],
        lines_with_prefix("svcctl status")[0],
    ]
    .join("\n");
    let output = stdout(&run_in_shell(&operator_script));
    assert!(output.contains("running") && output.contains("ada"), "{output}");
    let owner_script =
        [&[lines_with_prefix("TOKEN=")[0]][..], &lines_with_prefix("curl")].concat().join("\necho\n");
    let output = stdout(&run_in_shell(&owner_script));
    assert!(
        output.contains("\"slug\":\"notes\"") && output.matches("\"title\":\"hello\"").count() == 2,
        "{output}"
    );

    // The machine-readable values also work.
    let script = format!(
        "curl -sS --fail -H 'Host: {}' -H \"Authorization: Bearer $(curl -sS '{}?sub=user_demo')\" {}/api/apps\n\
         curl -sS --fail -H 'Authorization: Bearer {}' {}/vps/fleet",
        json["appHost"].as_str().unwrap(),
        json["idp"]["mintUrl"].as_str().unwrap(),
        json["routerUrl"].as_str().unwrap(),
        json["operatorToken"].as_str().unwrap(),
        json["platformUrl"].as_str().unwrap(),
    );
    let output = stdout(&run_in_shell(&script));
    assert!(output.contains("\"tasks\"") && output.contains("\"machines\":1"), "{output}");

    let second = command(&dir).output().unwrap();
    let error = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(!second.status.success());
    assert!(error.contains(json["platformUrl"].as_str().unwrap()), "{error}");
    assert!(is_listening(json["platformUrl"].as_str().unwrap()), "the first instance must still be running");

    let disks = json["dir"].as_str().unwrap().to_owned();
    assert!(!list_processes(&disks).is_empty());
    dev.signal("INT");
    assert!(dev.wait().success(), "{}", dev.output());
    assert!(!dir.exists(), "{:?}", fs::read_dir(&dir).map(Iterator::count));
    eventually("the instance's processes are still running", || list_processes(&disks).is_empty());
    eventually("the instance's disks still exist", || !Path::new(&disks).exists());
    assert!(
        !is_listening(json["platformUrl"].as_str().unwrap())
            && !is_listening(json["routerUrl"].as_str().unwrap())
    );
}

#[test]
fn killed_instance_does_not_block_the_next() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("dev");
    let mut killed = Dev::start(&dir);
    let json = killed.wait_until_ready();
    killed.signal("KILL");
    killed.wait();
    assert!(dir.join("dev.json").exists(), "a killed instance cannot delete it");
    let mut next = Dev::start(&dir);
    let next_json = next.wait_until_ready();
    assert_ne!(next_json["platformUrl"], json["platformUrl"]);
    assert_eq!(next_json["pid"], json!(next.process.id()));
    let disks = json["dir"].as_str().unwrap();
    eventually("the killed instance's processes are still running", || list_processes(disks).is_empty());
    eventually("the killed instance's disks still exist", || !Path::new(disks).exists());
    assert!(is_listening(next_json["platformUrl"].as_str().unwrap()));
    next.signal("TERM");
    assert!(next.wait().success(), "{}", next.output());
    assert!(!dir.exists());
}
