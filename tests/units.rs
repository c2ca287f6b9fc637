//! Uses systemd and the kernel to check that a machine's units, users, directories and network rules are valid, and
//! that services stay within the exposure limits below.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use kit::checkers;

/// The maximum scores from `systemd-analyze security`, in tenths.
const EXPOSURE_LIMITS: [(&str, u32); 24] = [
    // The product's own Rust programs.
    ("svc-apps", 20),
    ("svc-db-backup", 20),
    ("svc-db-backup-request", 20),
    ("svc-db-drill", 20),
    ("svc-db-drill-request", 20),
    ("svc-db-side", 20),
    ("svc-db-verify", 20),
    ("svc-files", 20),
    ("svc-files-history@", 20),
    ("svc-files-request", 30),
    ("svc-files-restore", 30),
    ("svc-files-verify", 20),
    ("svc-gateway", 20),
    ("svc-heartbeat", 20),
    ("svc-platform", 20),
    ("svc-register", 20),
    ("svc-restore", 20),
    ("svc-shell", 20),
    ("svc-sync-agent", 20),
    ("svc-watch", 20),
    // Runs as root, because it replaces units and the release.
    ("svc-update", 30),
    // The owner's terminals, agents and JavaScript, which need compilers and sandboxes.
    ("svc-code", 35),
    ("svc-agent@", 35),
    // To create a container, podman needs privileges that the other services lack. The container itself is restricted.
    ("svc-postgres", 100),
];

/// The platform's only unit, from its package.
const PLATFORM_UNIT: &str = "packaging/platform/usr/lib/systemd/system/svc-platform.service";

/// Programs that a machine's units run, but that belong to neither systemd nor the product.
const PROGRAMS: [&str; 2] = ["usr/bin/podman", "bin/sh"];

fn systemd_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("systemd")
}

struct Unit {
    name: String,
    path: PathBuf,
    text: String,
}

impl Unit {
    fn read(path: PathBuf) -> Self {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let text = fs::read_to_string(&path).unwrap();
        Self { name, path, text }
    }

    /// Creates a unit that has no file.
    fn from_text(name: &str, text: &str) -> Self {
        Self { name: name.to_owned(), path: PathBuf::new(), text: text.to_owned() }
    }

    fn values(&self, key: &str) -> Vec<&str> {
        let lines = self.text.lines().filter_map(|line| line.split_once('='));
        lines.filter(|(name, _)| *name == key).map(|(_, value)| value).collect()
    }

    fn split_values(&self, key: &str) -> Vec<&str> {
        self.values(key).iter().flat_map(|value| value.split_whitespace()).collect()
    }

    fn is_service(&self) -> bool {
        self.name.ends_with(".service")
    }

    fn is_oneshot(&self) -> bool {
        self.values("Type") == ["oneshot"]
    }
}

fn units() -> Vec<Unit> {
    let mut units: Vec<Unit> = fs::read_dir(systemd_dir().join("system"))
        .unwrap()
        .map(|entry| Unit::read(entry.unwrap().path()))
        .collect();
    units.sort_by(|a, b| a.name.cmp(&b.name));
    units
}

fn platform_unit() -> Unit {
    Unit::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(PLATFORM_UNIT))
}

/// Returns the services in `systemd/system`, and the platform's service.
fn services() -> Vec<Unit> {
    units().into_iter().filter(Unit::is_service).chain([platform_unit()]).collect()
}

fn output_text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Creates a root directory with the given units, this system's own units, and an empty file for each program that the
/// given units run.
fn build_root(units: &[Unit]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let unit_dir = root.path().join("etc/systemd/system");
    let system_dir = root.path().join("usr/lib/systemd/system");
    for dir in [&unit_dir, &system_dir] {
        fs::create_dir_all(dir).unwrap();
    }
    for entry in fs::read_dir("/usr/lib/systemd/system").unwrap() {
        let path = entry.unwrap().path();
        // Drop-in directories and dangling links are not needed.
        if path.is_file() {
            fs::copy(&path, system_dir.join(path.file_name().unwrap())).unwrap();
        }
    }
    let mut programs: Vec<String> = PROGRAMS.map(str::to_owned).to_vec();
    for unit in units {
        fs::write(unit_dir.join(&unit.name), &unit.text).unwrap();
        let started_programs =
            unit.values("ExecStart").into_iter().filter_map(|line| line.split_whitespace().next());
        programs.extend(started_programs.map(|program| program.trim_start_matches('/').to_owned()));
    }
    for program in programs {
        let path = root.path().join(program);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    root
}

fn verify_units(units: &[Unit]) -> String {
    let root = build_root(units);
    let mut analyze = checkers::find_or_install("systemd-analyze", "systemd").unwrap();
    analyze.args(["verify", "--man=no", "--recursive-errors=no", "--root"]).arg(root.path());
    let output = analyze.args(units.iter().map(|unit| &unit.name)).output().unwrap();
    let messages = output_text(&output);
    assert!(output.status.success() || !messages.is_empty(), "systemd-analyze: {}", output.status);
    messages
}

#[test]
fn systemd_verifies_all_units() {
    assert_eq!(verify_units(&units()), "");
    let first_boot = include_str!("../cloud-init/svc-first-boot.service");
    assert_eq!(verify_units(&[Unit::from_text("svc-first-boot.service", first_boot)]), "");
    assert!(
        !first_boot.contains("\nTimeoutStartSec="),
        "a start timeout would end a restore, which can take 18 hours"
    );
    assert_eq!(verify_units(&[platform_unit()]), "");
    for invalid in [
        "[Service]\nExecStart=/bin/sh\nRestrat=always\n",
        "[Service]\nExecStart=/opt/svc/bin/x\nType=often\n",
    ] {
        let messages = verify_units(&[Unit::from_text("svc-wrong.service", invalid)]);
        assert!(messages.contains("svc-wrong.service"), "{messages}");
    }
}

/// Returns the exposure score from `systemd-analyze security`, in tenths.
fn exposure_score(unit: &Path) -> u32 {
    let mut analyze = checkers::find_or_install("systemd-analyze", "systemd").unwrap();
    let output = analyze.args(["security", "--no-pager", "--offline=true"]).arg(unit).output().unwrap();
    let report = output_text(&output);
    let (_, after) = report.split_once("Overall exposure level for ").unwrap_or_else(|| panic!("{report}"));
    let number = after.split_once(": ").unwrap().1.split_whitespace().next().unwrap();
    number.replace('.', "").parse().unwrap()
}

#[test]
fn service_exposure_is_within_its_limit() {
    let limits = BTreeMap::from(EXPOSURE_LIMITS);
    let services = services();
    assert_eq!(services.len(), limits.len(), "services and limits must match");
    for service in services {
        let limit = limits[service.name.trim_end_matches(".service")];
        let score = exposure_score(&service.path);
        println!("{}: {score} of {limit}", service.name);
        assert!(
            score <= limit,
            "{} has an exposure score of {score}, but its limit is {limit}",
            service.name
        );
    }
}

/// A program and its libraries can handle an error, but not a kill.
#[test]
fn forbidden_system_call_returns_an_error() {
    for unit in services().iter().filter(|unit| !unit.values("SystemCallFilter").is_empty()) {
        assert_eq!(unit.values("SystemCallErrorNumber"), ["EPERM"], "{}", unit.name);
    }
}

#[test]
fn target_wants_every_untriggered_unit() {
    let units = units();
    let target = units.iter().find(|unit| unit.name == "svc.target").unwrap();
    let wanted = target.split_values("Wants");
    let triggered: Vec<String> = units
        .iter()
        .filter_map(|unit| {
            let (name, kind) = unit.name.rsplit_once('.').unwrap();
            match kind {
                "timer" | "path" => Some(format!("{name}.service")),
                // Each connection starts an instance.
                "socket" => Some(format!("{name}@.service")),
                _ => None,
            }
        })
        .collect();
    // systemd starts a slice together with its first unit.
    let is_startable = |unit: &&Unit| unit.name != "svc.target" && !unit.name.ends_with(".slice");
    for unit in units.iter().filter(is_startable) {
        let is_triggered = triggered.contains(&unit.name);
        assert_eq!(wanted.contains(&unit.name.as_str()), !is_triggered, "{}", unit.name);
        assert_eq!(unit.split_values("PartOf") == ["svc.target"], !is_triggered, "{}", unit.name);
    }
}

#[test]
fn long_running_services_restart_without_a_limit() {
    let is_long_running = |unit: &&Unit| unit.is_service() && !unit.is_oneshot() && !unit.name.contains('@');
    for unit in units().iter().filter(is_long_running) {
        assert!(["on-failure", "always"].contains(&unit.values("Restart")[0]), "{}", unit.name);
        assert_eq!(unit.values("StartLimitIntervalSec"), ["0"], "{}", unit.name);
        assert!(!unit.values("RestartSec").is_empty(), "{}", unit.name);
        if unit.name != "svc-postgres.service" {
            assert!(unit.split_values("RestartPreventExitStatus").contains(&"78"), "{}", unit.name);
        }
    }
}

/// Without `Restart=`, the path unit would start a failed update again immediately, with the same request and journal.
#[test]
fn failed_update_is_retried_each_minute_without_a_limit() {
    let units = units();
    let update = units.iter().find(|unit| unit.name == "svc-update.service").unwrap();
    assert_eq!(update.values("Restart"), ["on-failure"]);
    assert_eq!(update.values("RestartSec"), ["60"]);
    assert_eq!(update.values("StartLimitIntervalSec"), ["0"]);
}

/// Each retry of a backup whose snapshot is held back would upload another snapshot.
#[test]
fn requested_backup_is_not_retried_after_permanent_failure() {
    let units = units();
    for name in ["svc-db-backup-request.service", "svc-db-drill-request.service"] {
        let unit = units.iter().find(|unit| unit.name == name).unwrap();
        assert_eq!(unit.values("Restart"), ["on-failure"], "{name}");
        assert_eq!(unit.split_values("RestartPreventExitStatus"), ["65", "77", "78"], "{name}");
    }
}

#[test]
fn serving_and_uploading_units_wait_for_the_gate() {
    let gated = [
        "svc-gateway.service",
        "svc-shell.service",
        "svc-code.service",
        "svc-agent@.service",
        "svc-sync-agent.service",
        "svc-watch.service",
        "svc-files.service",
        "svc-register.service",
        "svc-db-backup.service",
        "svc-db-backup.timer",
        "svc-db-backup-request.service",
        "svc-db-drill.service",
        "svc-db-drill.timer",
        "svc-db-drill-request.service",
        "svc-db-side.service",
        "svc-db-verify.service",
        "svc-db-verify.timer",
        "svc-files-history@.service",
        "svc-files-request.service",
        "svc-files-verify.service",
        "svc-files-verify.timer",
        "svc-heartbeat.service",
        "svc-heartbeat.timer",
    ];
    let units = units();
    for name in gated {
        let unit = units.iter().find(|unit| unit.name == name).unwrap();
        assert!(unit.values("ConditionPathExists").contains(&"/opt/svc/restore-complete"), "{name}");
    }
}

#[test]
fn backup_timer_starts_a_backup_each_hour() {
    let units = units();
    let unit = |name: &str| units.iter().find(|unit| unit.name == name).unwrap();
    let timer = unit("svc-db-backup.timer");
    assert_eq!(timer.values("OnCalendar"), ["hourly"]);
    // If a run was missed while the machine was off, the timer triggers at the next boot.
    assert_eq!(timer.values("Persistent"), ["yes"]);
    assert!(timer.values("Unit").is_empty(), "the timer starts the service with the same name");
    assert_eq!(unit("svc-db-backup.service").values("ExecStart"), ["/opt/svc/bin/svc-db-backup run --retry"]);
}

#[test]
fn database_is_the_only_container_with_a_local_volume() {
    let join_lines = |unit: &Unit| Unit::from_text(&unit.name, &unit.text.replace("\\\n", ""));
    let units: Vec<Unit> = units().iter().map(join_lines).collect();
    let starts_container =
        |unit: &&Unit| unit.values("ExecStart").iter().any(|line| line.contains("podman run"));
    let names: Vec<&str> = units.iter().filter(starts_container).map(|unit| unit.name.as_str()).collect();
    assert_eq!(names, ["svc-postgres.service"]);
    let unit = units.iter().find(|unit| unit.name == "svc-postgres.service").unwrap();
    assert_eq!(unit.values("Environment"), ["SVC_POSTGRES_IMAGE=docker.io/library/postgres:16"]);
    let words = unit.split_values("ExecStart");
    let words_with_prefix = |prefix: &str| -> Vec<&str> {
        words.iter().copied().filter(|word| word.starts_with(prefix)).collect()
    };
    assert_eq!(words_with_prefix("--name"), ["--name=svc-postgres"]);
    assert_eq!(words_with_prefix("--volume"), ["--volume=svc-postgres:/var/lib/postgresql/data"]);
    assert_eq!(words_with_prefix("--mount"), Vec::<&str>::new());
    assert_eq!(words_with_prefix("listen_addresses"), ["listen_addresses=127.0.0.1"]);
    let image = words.iter().position(|word| *word == "${SVC_POSTGRES_IMAGE}").unwrap();
    assert_eq!(words[image + 1], "postgres", "the server's options must follow the image");
}

#[test]
fn watcher_can_open_directories() {
    // With `RestrictSUIDSGID`, systemd would block openat2(2), which the watcher needs.
    let units = units();
    let watch = units.iter().find(|unit| unit.name == "svc-watch.service").unwrap();
    assert!(watch.values("RestrictSUIDSGID").is_empty());
    assert!(watch.split_values("AmbientCapabilities").contains(&"CAP_DAC_READ_SEARCH"));
}

#[test]
fn agents_share_a_resource_limit() {
    let units = units();
    let unit = |name: &str| units.iter().find(|unit| unit.name == name).unwrap();
    assert_eq!(unit("svc-agent@.service").values("Slice"), ["svcagents.slice"]);
    let percent =
        |name: &str, key: &str| -> u32 { unit(name).values(key)[0].trim_end_matches('%').parse().unwrap() };
    for key in ["MemoryHigh", "MemoryMax"] {
        let (agent, slice) = (percent("svc-agent@.service", key), percent("svcagents.slice", key));
        assert!(agent < slice && slice < 100, "{key}: {agent} {slice}");
    }
}

#[test]
fn services_have_limits_and_no_secret_in_environment() {
    for unit in units().iter().filter(|unit| unit.is_service()) {
        for key in ["MemoryMax", "TasksMax", "OOMScoreAdjust"] {
            let count = unit.values(key).len();
            assert!(count == 1 || (key == "OOMScoreAdjust" && unit.is_oneshot()), "{}: {key}", unit.name);
        }
        assert!(unit.values("EnvironmentFile").is_empty(), "{}", unit.name);
        for value in unit.values("Environment") {
            let is_known =
                ["SVC_POSTGRES_IMAGE=", "GLIBC_TUNABLES="].iter().any(|name| value.starts_with(name));
            assert!(is_known, "{}: {value}", unit.name);
        }
        if !unit.is_oneshot() {
            assert!(!unit.values("TimeoutStopSec").is_empty(), "{}", unit.name);
        }
    }
    let score = |name: &str| -> i32 {
        let units = units();
        let unit = units.iter().find(|unit| unit.name == name).unwrap();
        unit.values("OOMScoreAdjust")[0].parse().unwrap()
    };
    for essential in
        ["svc-gateway.service", "svc-postgres.service", "svc-sync-agent.service", "svc-watch.service"]
    {
        assert!(
            score(essential) < 0 && score("svc-code.service") > 0,
            "the OOM killer must choose the owner's programs before {essential}"
        );
    }
}

/// Returns whether the test must be skipped, because only root can run it.
fn skip_unless_root() -> bool {
    let is_root = nix::unistd::geteuid().is_root();
    if !is_root {
        kit::skip::record("only root can create users' files and network rules");
    }
    !is_root
}

#[test]
fn users_and_directories_are_created_idempotently() {
    if skip_unless_root() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    for dir in ["etc/skel", "opt/svc/env", "var/lib", "home", "run"] {
        fs::create_dir_all(root.path().join(dir)).unwrap();
    }
    for name in ["host", "r2", "boot", "update", "postgres"] {
        fs::write(root.path().join(format!("opt/svc/env/{name}.env")), "").unwrap();
    }
    for _ in 0..2 {
        for (program, args, file) in [
            ("systemd-sysusers", vec![], "sysusers.d/svc.conf"),
            ("systemd-tmpfiles", vec!["--create"], "tmpfiles.d/svc.conf"),
        ] {
            let mut command = checkers::find_or_install(program, "systemd").unwrap();
            command.arg("--root").arg(root.path()).args(args).arg(systemd_dir().join(file));
            let output = command.output().unwrap();
            assert!(output.status.success(), "{program}: {}", output_text(&output));
        }
    }
    let (gateway, svc) = (940, 1940);
    for (path, mode, uid, gid) in [
        ("opt/svc", 0o755, 0, 0),
        ("opt/svc/env", 0o750, 0, gateway),
        ("opt/svc/env/host.env", 0o600, gateway, gateway),
        ("opt/svc/env/r2.env", 0o600, gateway, gateway),
        ("opt/svc/env/boot.env", 0o600, gateway, gateway),
        ("opt/svc/env/update.env", 0o600, 0, 0),
        ("opt/svc/env/postgres.env", 0o600, 0, 0),
        ("var/lib/svc", 0o1771, 0, gateway),
        ("var/lib/svc/update", 0o755, 0, 0),
        ("var/lib/svc/tls", 0o700, gateway, gateway),
        ("run/svc/gateway", 0o2750, gateway, svc),
        ("run/svc/watch", 0o2750, gateway, svc),
        ("run/svc/bridge", 0o2750, gateway, svc),
        ("run/svc/owner", 0o2770, svc, gateway),
        ("run/svc/hooks", 0o2770, svc, gateway),
        ("home/svc/home", 0o1770, 0, svc),
        ("home/svc/home/apps", 0o755, svc, svc),
        ("home/svc/home/system/logs", 0o2750, gateway, svc),
    ] {
        let meta = fs::metadata(root.path().join(path)).unwrap();
        assert_eq!((meta.mode() & 0o7777, meta.uid(), meta.gid()), (mode, uid, gid), "{path}");
    }
    let marker = root.path().join("opt/svc/restore-complete");
    assert_eq!(fs::read_link(&marker).unwrap(), Path::new("/var/lib/svc/restore-complete"));
}

/// Runs in a private network namespace, where the metadata address exists and responds.
#[test]
fn metadata_address_is_reachable_only_by_root() {
    if skip_unless_root() {
        return;
    }
    checkers::find_or_install("nft", "nftables").unwrap();
    checkers::find_or_install("ip", "iproute2").unwrap();
    let script = r#"
        set -e
        ip link set lo up; ip addr add 169.254.169.254/32 dev lo; ip addr add 10.0.0.1/32 dev lo
        nft -f "$RULES"; nft -f "$RULES"
        python3 -m http.server --bind 169.254.169.254 80 >/dev/null 2>&1 & metadata=$!
        python3 -m http.server --bind 127.0.0.1 80 >/dev/null 2>&1 & loopback=$!
        trap 'kill $metadata $loopback' EXIT
        fetch() { for _ in $(seq 600); do curl --silent --output /dev/null --max-time 30 "$1" && return; sleep 0.1; done; return 1; }
        fetch http://169.254.169.254/ && fetch http://127.0.0.1/ && echo up
        as() { setpriv --reuid 1940 --clear-groups curl --silent --output /dev/null --max-time 30 --interface 10.0.0.1 "$1" && echo 0 || echo $?; }
        echo "metadata $(as http://169.254.169.254/) loopback $(as http://127.0.0.1/)"
    "#;
    let mut command = Command::new("unshare");
    command.args(["--net", "sh", "-c", script]);
    command.env("RULES", concat!(env!("CARGO_MANIFEST_DIR"), "/cloud-init/nftables.conf"));
    let output = command.output().unwrap();
    assert_eq!(output_text(&output), "up\nmetadata 7 loopback 0\n", "curl exits with 7 if it cannot connect");
}
