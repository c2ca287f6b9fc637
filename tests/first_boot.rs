//! Runs a machine's first boot with the script in its user-data: stages and failures are reported to the platform
//! before and after the product's binary exists, interrupted work is completed, and no credential is a process
//! argument.
//!
//! The files come from rendered user-data, under a directory that stands in for `/`. The bundle, `svc`, curl and tar
//! are real; fakes stand in for the machine's own programs and record their calls.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use crate::userdata::{UserDataInput, parse_user_data};

const MACHINE: &str = "019a0000-0000-7000-8000-000000000001";
/// A fake `systemctl`: a unit starts and is active unless the file `UNIT.fails` exists.
const SYSTEMCTL: &str = r#"
unit=; for word; do unit=$word; done
case $1 in
  start) [ ! -e "$DIR/$unit.fails" ] ;;
  show) case $* in
    *ActiveState*) if [ -e "$DIR/$unit.fails" ]; then echo failed; else echo active; fi ;;
    *) echo exit-code ;;
  esac ;;
esac"#;
const JOURNALCTL: &str = r#"for word; do :; done
unit=${word#_SYSTEMD_UNIT=}; [ ! -e "$DIR/$unit.fails" ] || tail -n 1 "$DIR/$unit.fails""#;

struct Bundle {
    _dir: tempfile::TempDir,
    archive: Vec<u8>,
    sha256: String,
}

fn bundle() -> &'static Bundle {
    static BUNDLE: OnceLock<Bundle> = OnceLock::new();
    BUNDLE.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let svc = Path::new(env!("CARGO_BIN_EXE_svc"));
        let built = kit::bundle::build_minimal(svc, "v1", dir.path()).unwrap();
        let archive = fs::read(built.dir.join(kit::bundle::ARCHIVE)).unwrap();
        Bundle { _dir: dir, archive, sha256: built.sha256 }
    })
}

/// How the platform responds to a request for the bundle.
#[derive(Clone, Copy, PartialEq)]
enum BundleResponse {
    Complete,
    /// Complete, from the platform's public address, which hosts use only for bundles.
    FromPublicAddress,
    /// The first response ends halfway.
    CutOnce,
    /// One bit is flipped.
    Flipped,
}

struct Machine {
    dir: tempfile::TempDir,
    requests: Arc<Mutex<Vec<String>>>,
    /// The status of the platform's responses to reports.
    report_status: Arc<AtomicU16>,
}

impl Machine {
    async fn new(bundle_response: BundleResponse) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (requests, report_status) = (Arc::default(), Arc::new(AtomicU16::new(202)));
        let start = || start_platform(bundle_response, Arc::clone(&requests), Arc::clone(&report_status));
        let internal = start();
        let public = (bundle_response == BundleResponse::FromPublicAddress).then(start);
        let input = UserDataInput {
            bundle: format!(
                "{}/system-bundles/v1/svc-host-bundle.tar.gz",
                public.as_ref().unwrap_or(&internal)
            ),
            bundle_sha256: bundle().sha256.clone(),
            platform: internal,
            public,
            ..UserDataInput::typical()
        };
        for file in parse_user_data(&input.render().await)["write_files"].as_array().unwrap() {
            let path = dir.path().join(file["path"].as_str().unwrap().trim_start_matches('/'));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, file["content"].as_str().unwrap()).unwrap();
        }
        fs::create_dir_all(dir.path().join("etc/ssl/certs")).unwrap();
        let machine = Self { dir, requests, report_status };
        for program in ["apt-get", "podman", "sleep", "nft", "sysctl", "systemd-sysusers", "systemd-tmpfiles"]
        {
            machine.add_program(program, "exit 0");
        }
        machine.add_program("swapon", "echo /dev/some");
        machine.add_program("systemctl", SYSTEMCTL);
        machine.add_program("journalctl", JOURNALCTL);
        machine.add_program("curl", "exec \"$CURL\" \"$@\"");
        machine
    }

    /// Installs a fake program that records its call and then runs this script.
    fn add_program(&self, name: &str, script: &str) {
        let bin = self.dir.path().join("fakes");
        fs::create_dir_all(&bin).unwrap();
        let text = format!("#!/bin/sh\necho \"{name} $*\" >>\"$DIR/calls\"\n{script}\n");
        fs::write(bin.join(name), text).unwrap();
        fs::set_permissions(bin.join(name), fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Boots the machine and returns the script's exit code.
    async fn boot(&self) -> i32 {
        let status = self.run(&[]).await;
        let calls = self.calls();
        assert!(
            !["svcr_", "svcu_"].iter().any(|token| calls.contains(token)),
            "a token is an argument: {calls}"
        );
        status.code().unwrap()
    }

    async fn run(&self, extra: &[(&str, &str)]) -> ExitStatus {
        let root = self.dir.path().to_owned();
        let path = std::env::var("PATH").unwrap();
        let mut shell = Command::new("sh");
        shell.arg(root.join("opt/svc/first-boot.sh")).env_clear().env("DIR", &root).env("SVC_ROOT", &root);
        shell.env("CURL", which("curl", &path)).env("SVC_SYSTEMCTL", root.join("fakes/systemctl"));
        shell.env("PATH", format!("{}/fakes:{path}", root.display())).envs(extra.iter().copied());
        let output = tokio::task::spawn_blocking(move || shell.output().unwrap()).await.unwrap();
        println!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        output.status
    }

    fn calls(&self) -> String {
        fs::read_to_string(self.dir.path().join("calls")).unwrap_or_default()
    }

    fn started_units(&self) -> Vec<String> {
        let calls = self.calls();
        let started = calls.lines().filter_map(|line| line.strip_prefix("systemctl start "));
        started.map(|unit| unit.trim_start_matches("--no-block ").to_owned()).collect()
    }

    /// Returns the requests to the platform, with only the prefix of each token.
    fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }

    /// Returns the bodies of the requests that were sent to a route with the registration token.
    fn request_bodies(&self, route: &str) -> Vec<String> {
        let prefix = format!("POST /vps/{MACHINE}/{route} svcr_ ");
        self.requests().iter().filter_map(|line| line.strip_prefix(&prefix).map(str::to_owned)).collect()
    }

    fn is_complete(&self) -> bool {
        self.dir.path().join("opt/svc/first-boot-complete").exists()
    }
}

fn which(program: &str, path: &str) -> PathBuf {
    let mut files = path.split(':').map(|dir| Path::new(dir).join(program));
    files.find(|file| file.exists()).unwrap_or_else(|| panic!("this test needs {program}"))
}

/// Serves the bundle, responds to every report with `report_status`, and records the requests.
fn start_platform(
    bundle_response: BundleResponse,
    requests: Arc<Mutex<Vec<String>>>,
    report_status: Arc<AtomicU16>,
) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let base = format!("http://{}", listener.local_addr().unwrap());
    let served = Arc::new(AtomicUsize::new(0));
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (requests, served) = (Arc::clone(&requests), Arc::clone(&served));
            let status = report_status.load(Ordering::SeqCst);
            std::thread::spawn(move || respond(stream.unwrap(), bundle_response, status, &requests, &served));
        }
    });
    base
}

fn respond(
    mut stream: TcpStream,
    bundle_response: BundleResponse,
    report_status: u16,
    requests: &Mutex<Vec<String>>,
    served: &AtomicUsize,
) {
    let Some((head, body)) = read_request(&mut stream) else { return };
    let field = |name: &str| {
        head.lines().find_map(|line| {
            let (key, value) = line.split_once(": ")?;
            key.eq_ignore_ascii_case(name).then(|| value.to_owned())
        })
    };
    let line = head.lines().next().unwrap_or_default().trim_end_matches(" HTTP/1.1").to_owned();
    let bearer =
        field("authorization").and_then(|value| Some(value.strip_prefix("Bearer ")?.get(..5)?.to_owned()));
    let range = field("range").unwrap_or_default();
    let is_bundle = line.starts_with("GET ");
    let request_line = [line, bearer.unwrap_or_default(), range.clone(), body].join(" ");
    requests.lock().unwrap().push(request_line.split_whitespace().collect::<Vec<_>>().join(" "));
    if !is_bundle {
        let head = format!("HTTP/1.1 {report_status} -\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).ok();
        return;
    }
    let mut archive = bundle().archive.clone();
    if bundle_response == BundleResponse::Flipped {
        *archive.last_mut().unwrap() ^= 1;
    }
    let from: usize =
        range.strip_prefix("bytes=").and_then(|from| from.trim_end_matches('-').parse().ok()).unwrap_or(0);
    if from >= archive.len() {
        stream
            .write_all(
                b"HTTP/1.1 416 Range Not Satisfiable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
            )
            .ok();
        return;
    }
    let (rest, total) = (&archive[from..], archive.len());
    let status = if from > 0 { "206 Partial Content" } else { "200 OK" };
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-length: {}\r\ncontent-range: bytes {from}-{}/{total}\r\nconnection: close\r\n\r\n",
        rest.len(),
        total - 1
    );
    stream.write_all(head.as_bytes()).ok();
    let is_cut = bundle_response == BundleResponse::CutOnce && served.fetch_add(1, Ordering::SeqCst) == 0;
    stream.write_all(if is_cut { &rest[..rest.len() / 2] } else { rest }).ok();
}

fn read_request(stream: &mut TcpStream) -> Option<(String, String)> {
    let (mut bytes, mut chunk) = (Vec::new(), [0; 4096]);
    loop {
        let n = stream.read(&mut chunk).ok()?;
        bytes.extend_from_slice(&chunk[..n]);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head
                .lines()
                .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok())
                .unwrap_or(0_usize);
            if body.len() >= length {
                return Some((head.to_owned(), body.to_owned()));
            }
        }
        if n == 0 {
            return None;
        }
    }
}

const UNITS: [&str; 6] = [
    "svc-postgres.service",
    "svc-files-restore.service",
    "svc-restore.service",
    "svc-gateway.service",
    "svc-register.service",
    "svc.target",
];

#[tokio::test]
async fn user_data_boots_a_machine_to_its_target() {
    let machine = Machine::new(BundleResponse::Complete).await;
    assert_eq!(machine.boot().await, 0, "{}", machine.calls());
    let stages = ["bundle", "database", "restore", "gateway", "register"];
    assert_eq!(
        machine.request_bodies("boot-stage"),
        stages.map(|stage| format!("{{\"stage\":\"{stage}\"}}"))
    );
    let fetched: Vec<_> = machine.requests().into_iter().filter(|line| line.starts_with("GET ")).collect();
    assert_eq!(
        fetched,
        ["GET /system-bundles/v1/svc-host-bundle.tar.gz svcu_"],
        "the bundle must be fetched once, with the machine's token"
    );
    assert_eq!(machine.started_units(), UNITS);
    let opt = machine.dir.path().join("opt/svc");
    assert_eq!(fs::read_link(opt.join("current")).unwrap(), Path::new("releases/v1"));
    assert!(opt.join("bin/svc-gateway").exists() && !opt.join("bootstrap").exists() && machine.is_complete());
    let calls = machine.calls();
    // podman takes the file's values literally, including quotes.
    let postgres_env = fs::read_to_string(opt.join("env/postgres.env")).unwrap();
    let password = postgres_env.trim().strip_prefix("POSTGRES_PASSWORD=").unwrap();
    assert!(
        password.len() >= 32 && password.chars().all(|c| c.is_ascii_alphanumeric()),
        "the password is too short or needs quotes"
    );
    let host_env = fs::read_to_string(opt.join("env/host.env")).unwrap();
    assert!(host_env.contains(&format!(":{password}@127.0.0.1:5432/svc")) && !calls.contains(password));
    let line_of = |call: &str| {
        let index = calls.lines().position(|line| line.contains(call));
        index.unwrap_or_else(|| panic!("no {call} in {calls}"))
    };
    let (firewall, download) = (line_of("nft list table inet svc"), line_of("--output bundle.tar.gz"));
    assert!(firewall < download, "the firewall must be active before any download: {calls}");
    assert!(
        line_of("systemctl enable svc.target") < line_of("systemctl disable svc-first-boot.service"),
        "{calls}"
    );
}

#[tokio::test]
async fn interrupted_download_is_resumed() {
    let machine = Machine::new(BundleResponse::CutOnce).await;
    assert_eq!(machine.boot().await, 0, "{}", machine.calls());
    let fetched: Vec<_> = machine.requests().into_iter().filter(|line| line.starts_with("GET ")).collect();
    let half = bundle().archive.len() / 2;
    assert_eq!(fetched.len(), 2, "{fetched:?}");
    assert!(fetched[1].ends_with(&format!("bytes={half}-")), "{fetched:?}");
}

#[tokio::test]
async fn token_is_sent_to_public_address() {
    let machine = Machine::new(BundleResponse::FromPublicAddress).await;
    assert_eq!(machine.boot().await, 0, "{}", machine.calls());
    let fetched: Vec<_> = machine.requests().into_iter().filter(|line| line.starts_with("GET ")).collect();
    assert_eq!(fetched, ["GET /system-bundles/v1/svc-host-bundle.tar.gz svcu_"]);
}

/// A partial file from a different release, or one damaged in transit, is discarded, and the bundle is downloaded
/// again.
#[tokio::test]
async fn partial_download_with_different_content_is_discarded() {
    for partial_bytes in [10, bundle().archive.len() + 10] {
        let machine = Machine::new(BundleResponse::Complete).await;
        let bootstrap = machine.dir.path().join("opt/svc/bootstrap");
        fs::create_dir_all(&bootstrap).unwrap();
        fs::write(bootstrap.join("bundle.tar.gz"), vec![b'x'; partial_bytes]).unwrap();
        assert_eq!(machine.boot().await, 0, "{}", machine.calls());
    }
}

/// Only permanent failures are reported to the platform; after a transient one, the next boot tries again.
#[tokio::test]
async fn transient_program_failure_is_retried() {
    let machine = Machine::new(BundleResponse::Complete).await;
    let systemctl = |prelude: &str| machine.add_program("systemctl", &format!("{prelude}\n{SYSTEMCTL}"));
    systemctl("[ \"$*\" != 'enable svc.target' ] || exit 1");
    let exit_code = machine.boot().await;
    assert!(
        exit_code != 0 && exit_code != 99 && machine.request_bodies("boot-failure").is_empty(),
        "exit code {exit_code}"
    );
    systemctl("");
    assert_eq!(machine.boot().await, 0, "{}", machine.calls());
}

/// The database image treats a partly initialized cluster as complete, so a cluster that has never responded is
/// recreated. One that has responded is kept.
#[tokio::test]
async fn interrupted_database_cluster_is_recreated() {
    let machine = Machine::new(BundleResponse::Complete).await;
    machine.add_program("podman", "[ \"$1\" != exec ]");
    assert_eq!(
        machine.boot().await,
        99,
        "a boot whose database never responds must end with a permanent failure"
    );
    assert!(machine.request_bodies("boot-failure")[0].contains("\"stage\":\"database\""));
    machine.add_program("podman", "exit 0");
    fs::remove_file(machine.dir.path().join("calls")).unwrap();
    fs::write(machine.dir.path().join("svc-gateway.service.fails"), "no").unwrap();
    assert_eq!(machine.boot().await, 99);
    let calls = machine.calls();
    let (removed, started) = (calls.find("volume rm --force svc-postgres"), calls.find("start svc-postgres"));
    assert!(removed.is_some() && removed < started, "{calls}");
    fs::remove_file(machine.dir.path().join("svc-gateway.service.fails")).unwrap();
    fs::remove_file(machine.dir.path().join("calls")).unwrap();
    assert_eq!(machine.boot().await, 0);
    assert!(!machine.calls().contains("volume rm"), "{}", machine.calls());
}

#[tokio::test]
async fn bundle_with_wrong_digest_is_rejected_and_never_run() {
    let machine = Machine::new(BundleResponse::Flipped).await;
    assert_eq!(machine.boot().await, 99);
    let failures = machine.request_bodies("boot-failure");
    assert!(failures[0].contains("\"stage\":\"bundle\"") && failures[0].contains("SHA-256"), "{failures:?}");
    assert!(!machine.dir.path().join("opt/svc/bootstrap/bin").exists());
    assert!(machine.started_units().is_empty() && !machine.is_complete());
}

#[tokio::test]
async fn failure_before_the_binary_exists_is_reported() {
    let machine = Machine::new(BundleResponse::Complete).await;
    machine.add_program("nft", "exit 1");
    assert_eq!(machine.boot().await, 99);
    let failures = machine.request_bodies("boot-failure");
    let report: serde_json::Value = serde_json::from_str(&failures[0]).unwrap();
    assert_eq!(report["stage"], "bundle");
    assert!(report["message"].as_str().unwrap().contains("network"), "{report}");
}

#[tokio::test]
async fn failed_unit_is_reported_with_its_log_and_stops_the_boot() {
    let stages = ["database", "restore", "restore", "gateway", "register"];
    for (index, stage) in stages.into_iter().enumerate() {
        let machine = Machine::new(BundleResponse::Complete).await;
        fs::write(machine.dir.path().join(format!("{}.fails", UNITS[index])), "first\nthe \"last\" words\n")
            .unwrap();
        assert_eq!(machine.boot().await, 99, "{stage}");
        let report: serde_json::Value =
            serde_json::from_str(&machine.request_bodies("boot-failure")[0]).unwrap();
        assert_eq!(report["stage"], stage);
        assert_eq!(report["message"], format!("{}: the \"last\" words", UNITS[index]));
        assert_eq!(machine.started_units(), UNITS[..=index], "{stage}");
        assert!(!machine.is_complete());
    }
}

#[tokio::test]
async fn failure_that_cannot_be_reported_exits_with_75() {
    let machine = Machine::new(BundleResponse::Complete).await;
    machine.add_program("nft", "exit 1");
    machine.add_program("curl", "exit 7");
    assert_eq!(machine.boot().await, 75);
}

/// The boot ends only if sending the same report again would not help.
#[tokio::test]
async fn boot_is_retried_after_transient_report_failure() {
    let machine = Machine::new(BundleResponse::Complete).await;
    machine.add_program("nft", "exit 1");
    for (status, exit_code) in [(503, 75), (429, 75), (408, 75), (302, 75), (401, 99), (202, 99)] {
        machine.report_status.store(status, Ordering::SeqCst);
        assert_eq!(machine.boot().await, exit_code, "{status}");
    }
}

/// Power is cut when the script reaches each of these programs in turn; the next boot completes.
#[tokio::test]
async fn next_boot_recovers_from_power_cut_at_any_step() {
    for cut in [
        "nft list",
        "curl --config - --silent --show-error --connect-timeout 10 --fail",
        "systemd-sysusers",
        "systemctl start svc-postgres",
        "systemctl start svc-gateway",
        "systemctl enable svc.target",
        "systemctl start --no-block svc.target",
    ] {
        let machine = Machine::new(BundleResponse::Complete).await;
        let (program, _) = cut.split_once(' ').unwrap_or((cut, ""));
        let script = fs::read_to_string(machine.dir.path().join("fakes").join(program)).unwrap();
        let kill = format!("case \"{program} $*\" in \"{cut}\"*) kill -9 $PPID; exit ;; esac\n");
        let body = script.splitn(3, '\n').nth(2).unwrap();
        machine.add_program(program, &format!("{kill}{body}"));
        let status = machine.run(&[]).await;
        assert!(!machine.is_complete() && !status.success(), "{cut}: the power was not cut");
        machine.add_program(program, body);
        assert_eq!(machine.boot().await, 0, "{cut}: {}", machine.calls());
        assert!(machine.is_complete(), "{cut}");
        assert_eq!(machine.started_units().last().map(String::as_str), Some("svc.target"));
    }
}

/// An interrupted release setup is completed, without a second download.
#[tokio::test]
async fn interrupted_release_setup_is_completed() {
    for point in ["update.renamed", "update.switched", "update.linked"] {
        let machine = Machine::new(BundleResponse::Complete).await;
        let killed = machine.run(&[("FAILPOINTS", &format!("{point}=return(kill)"))]).await;
        assert!(!killed.success() && machine.started_units().is_empty(), "{point}");
        assert_eq!(machine.boot().await, 0, "{point}: {}", machine.calls());
        let opt = machine.dir.path().join("opt/svc");
        assert!(machine.is_complete() && opt.join("app/apps").exists() && !opt.join("bootstrap").exists());
        let download_count = machine.requests().iter().filter(|line| line.starts_with("GET ")).count();
        assert_eq!(download_count, 1, "{point}: a complete download must be kept");
    }
}
