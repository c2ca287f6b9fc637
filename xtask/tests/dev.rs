//! `cargo xtask dev` as a developer has it: started, used by what it says, refused a second time, ended, killed.

#![allow(
    clippy::unwrap_used,
    reason = "all of it is tests; clippy sees only the functions with #[test] as such"
)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

const START: Duration = Duration::from_secs(180);
const END: Duration = Duration::from_secs(60);

/// One that runs; dropped, it is killed.
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
        kit::child::end_with_us(process.id(), kit::child::AtExit::Kill);
        Self { process, dir: dir.to_owned(), log }
    }

    /// What it published once it was up.
    fn ready(&mut self) -> Value {
        let deadline = Instant::now() + START;
        loop {
            if self.said().contains("dev: ready") {
                return serde_json::from_slice(&fs::read(self.dir.join("dev.json")).unwrap()).unwrap();
            }
            let ended = self.process.try_wait().unwrap();
            assert!(ended.is_none() && Instant::now() < deadline, "{ended:?}: {}", self.said());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn signal(&self, signal: &str) {
        let pid = self.process.id().to_string();
        assert!(Command::new("kill").args(["-s", signal, &pid]).status().unwrap().success());
    }

    fn end(&mut self) -> std::process::ExitStatus {
        kit::child::wait_until(&mut self.process, Instant::now() + END).expect("it ends")
    }
}

impl Drop for Dev {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
        kit::child::ended(self.process.id());
    }
}

fn command(dir: &Path) -> Command {
    let xtask = Path::new(env!("CARGO_BIN_EXE_xtask"));
    let mut command = Command::new(xtask);
    command.arg("dev").arg("--svc").arg(xtask.with_file_name("svc")).arg("--dir").arg(dir);
    command.stdin(Stdio::null());
    command
}

/// A line of what it printed, in a shell of its own.
fn shell(script: &str) -> Output {
    Command::new("sh").args(["-ec", script]).env_remove("NO_COLOR").output().unwrap()
}

fn printed(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The processes of the story that have this directory in their command line.
fn processes(dir: &str) -> Vec<String> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let lines = entries.filter_map(|entry| {
        let line = fs::read(entry.path().join("cmdline")).ok()?;
        let root = fs::read_link(entry.path().join("cwd")).ok()?;
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        (line.contains(dir) || root.starts_with(dir)).then_some(line)
    });
    lines.collect()
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + END;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn answers(url: &str) -> bool {
    let address: std::net::SocketAddr = url.trim_start_matches("http://").parse().unwrap();
    std::net::TcpStream::connect(address).is_ok()
}

#[test]
fn it_is_used_by_what_it_says_refused_a_second_time_and_leaves_nothing() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("dev");
    let mut dev = Dev::start(&dir);
    let json = dev.ready();
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

    // Pasted, every line of it works.
    let said = dev.said();
    let line = |start: &str| -> Vec<&str> {
        said.lines().map(str::trim).filter(|line| line.starts_with(start)).collect()
    };
    let operator = [line(". ")[0], line("svcctl list")[0], line("svcctl status")[0]].join("\n");
    let shown = printed(&shell(&operator));
    assert!(shown.contains("running") && shown.contains("ada"), "{shown}");
    let owner = [&[line("TOKEN=")[0]][..], &line("curl")].concat().join("\necho\n");
    let shown = printed(&shell(&owner));
    assert!(
        shown.contains("\"slug\":\"notes\"") && shown.matches("\"title\":\"hello\"").count() == 2,
        "{shown}"
    );

    // And so does what programs are told.
    let script = format!(
        "curl -sS --fail -H 'Host: {}' -H \"Authorization: Bearer $(curl -sS '{}?sub=user_story')\" {}/api/apps\n\
         curl -sS --fail -H 'Authorization: Bearer {}' {}/vps/fleet",
        json["appHost"].as_str().unwrap(),
        json["idp"]["mintUrl"].as_str().unwrap(),
        json["routerUrl"].as_str().unwrap(),
        json["operatorToken"].as_str().unwrap(),
        json["platformUrl"].as_str().unwrap(),
    );
    let shown = printed(&shell(&script));
    assert!(shown.contains("\"tasks\"") && shown.contains("\"machines\":1"), "{shown}");

    let second = command(&dir).output().unwrap();
    let refused = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(!second.status.success());
    assert!(refused.contains(json["platformUrl"].as_str().unwrap()), "{refused}");
    assert!(answers(json["platformUrl"].as_str().unwrap()), "the first one does not mind");

    let disks = json["dir"].as_str().unwrap().to_owned();
    assert!(!processes(&disks).is_empty());
    dev.signal("INT");
    assert!(dev.end().success(), "{}", dev.said());
    assert!(!dir.exists(), "{:?}", fs::read_dir(&dir).map(Iterator::count));
    eventually("its processes end", || processes(&disks).is_empty());
    eventually("its disks are gone", || !Path::new(&disks).exists());
    assert!(!answers(json["platformUrl"].as_str().unwrap()) && !answers(json["routerUrl"].as_str().unwrap()));
}

#[test]
fn what_a_killed_one_left_is_in_nobodys_way() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("dev");
    let mut killed = Dev::start(&dir);
    let json = killed.ready();
    killed.signal("KILL");
    killed.end();
    assert!(dir.join("dev.json").exists(), "it had no time to take it back");
    let mut next = Dev::start(&dir);
    let fresh = next.ready();
    assert_ne!(fresh["platformUrl"], json["platformUrl"]);
    assert_eq!(fresh["pid"], json!(next.process.id()));
    let disks = json["dir"].as_str().unwrap();
    eventually("the killed one's processes end by themselves", || processes(disks).is_empty());
    eventually("and its disks go", || !Path::new(disks).exists());
    assert!(answers(fresh["platformUrl"].as_str().unwrap()));
    next.signal("TERM");
    assert!(next.end().success(), "{}", next.said());
    assert!(!dir.exists());
}
