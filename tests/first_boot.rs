//! The first boot of a real machine, by the shell that user-data carries: its stages and failures reach the platform before
//! and after our own binary is there, and no credential is an argument of a process.
//!
//! Below a directory that stands for `/`; the machine's own programs are stand-ins that write down how they were called.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

use sha2::{Digest, Sha256};

const SCRIPT: &str = include_str!("../src/platform/first-boot.sh");
const MACHINE: &str = "019a0000-0000-7000-8000-000000000001";

/// What a bundle's `svc` does here: it installs links to itself, and each applet ends as `$DIR/<applet>.fails` says.
const SVC: &str = r#"#!/bin/sh
name=$(basename "$0"); [ "$name" = svc ] && { name=$1; shift; }
echo "$name $*" >>"$DIR/calls"
if [ -e "$DIR/$name.fails" ] && [ "$1" != stage ] && [ "$1" != failure ]; then cat "$DIR/$name.fails" >&2; exit 69; fi
if [ "$name" = svc-update ]; then
  mkdir -p "$DIR/opt/svc/bin" "$DIR/opt/svc/current"
  for applet in svc-register svc-restore; do cp "$0" "$DIR/opt/svc/bin/$applet"; done
fi
"#;

struct Machine {
    dir: tempfile::TempDir,
    heard: Arc<Mutex<Vec<String>>>,
}

impl Machine {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let bundle = bundle(dir.path());
        let sha256 = hex::encode(Sha256::digest(&bundle));
        let heard = Arc::default();
        let platform = platform(bundle, Arc::clone(&heard));
        let env = dir.path().join("opt/svc/env");
        fs::create_dir_all(&env).unwrap();
        let host = format!(
            "SVC_MACHINE_ID={MACHINE}\nPLATFORM_INTERNAL_URL=\"{platform}/\"\nUPGRADE_TOKEN=upgrade-me\n"
        );
        fs::write(env.join("host.env"), host).unwrap();
        let boot = format!(
            "REGISTRATION_TOKEN=register-me\nSVC_BUNDLE_SHA256={sha256}\nSVC_HOST_BUNDLE_URL={platform}/bundle\n"
        );
        fs::write(env.join("boot.env"), boot).unwrap();
        let machine = Self { dir, heard };
        for program in ["apt-get", "useradd", "id", "systemctl", "podman", "sleep"] {
            machine.program(program, "exit 0");
        }
        machine.program("curl", "exec \"$CURL\" \"$@\"");
        machine
    }

    /// A stand-in, which writes down how it was called and then does this.
    fn program(&self, name: &str, script: &str) {
        let bin = self.dir.path().join("stand-ins");
        fs::create_dir_all(&bin).unwrap();
        executable(&bin.join(name), &format!("#!/bin/sh\necho \"{name} $*\" >>\"$DIR/calls\"\n{script}\n"));
    }

    /// Boots; whether it came through.
    fn boots(&self) -> bool {
        let root = self.dir.path().display().to_string();
        let script = SCRIPT
            .replace("/opt/svc", &format!("{root}/opt/svc"))
            .replace("/home/svc", &format!("{root}/home"));
        let path = std::env::var("PATH").unwrap();
        let mut shell = Command::new("sh");
        shell.args(["-ec", &script]).env_clear().env("DIR", &root);
        shell.env("CURL", which("curl", &path)).env("PATH", format!("{root}/stand-ins:{path}"));
        let ended = shell.output().unwrap();
        println!("{}{}", String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
        let calls = self.calls();
        assert!(
            !calls.contains("register-me") && !calls.contains("upgrade-me"),
            "a credential is an argument: {calls}"
        );
        ended.status.success()
    }

    fn calls(&self) -> String {
        fs::read_to_string(self.dir.path().join("calls")).unwrap_or_default()
    }

    fn heard(&self) -> Vec<String> {
        self.heard.lock().unwrap().clone()
    }

    fn fails(&self, applet: &str, words: &str) {
        fs::write(self.dir.path().join(format!("{applet}.fails")), words).unwrap();
    }
}

fn executable(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn which(program: &str, path: &str) -> PathBuf {
    let there = path.split(':').map(|dir| Path::new(dir).join(program)).find(|file| file.exists());
    there.unwrap_or_else(|| panic!("this test needs {program}"))
}

fn bundle(dir: &Path) -> Vec<u8> {
    let bin = dir.join("build/bin");
    fs::create_dir_all(&bin).unwrap();
    executable(&bin.join("svc"), SVC);
    let mut tar = Command::new("tar");
    tar.args(["--create", "--gzip", "--file", "-", "bin/svc"]).current_dir(dir.join("build"));
    tar.output().unwrap().stdout
}

/// Answers any request with the bundle, and writes down what was asked.
fn platform(bundle: Vec<u8>, heard: Arc<Mutex<Vec<String>>>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let base = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let (mut bytes, mut chunk) = (Vec::new(), [0; 4096]);
            let text = loop {
                let n = stream.read(&mut chunk).unwrap_or(0);
                bytes.extend_from_slice(&chunk[..n]);
                let text = String::from_utf8_lossy(&bytes).into_owned();
                let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
                let length = head.lines().find_map(|line| {
                    line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok()
                });
                if n == 0 || body.len() >= length.unwrap_or(0) {
                    break text;
                }
            };
            let (head, body) = text.split_once("\r\n\r\n").unwrap_or_default();
            let line = head.lines().next().unwrap_or_default().trim_end_matches(" HTTP/1.1");
            let bearer = head.lines().find_map(|line| line.strip_prefix("Authorization: Bearer "));
            heard
                .lock()
                .unwrap()
                .push(format!("{line} {} {body}", bearer.unwrap_or_default()).trim().to_owned());
            let answer =
                format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", bundle.len());
            stream.write_all(answer.as_bytes()).ok();
            stream.write_all(&bundle).ok();
        }
    });
    base
}

#[test]
fn every_stage_is_told_by_whoever_is_there_to_tell_it() {
    let machine = Machine::new();
    assert!(machine.boots(), "{}", machine.calls());
    let told = |what: &str, body: &str| format!("POST /vps/{MACHINE}/{what} register-me {body}");
    assert_eq!(
        machine.heard(),
        [
            told("boot-stage", r#"{"stage":"database"}"#),
            told("boot-stage", r#"{"stage":"bundle"}"#),
            "GET /bundle upgrade-me".to_owned(),
        ]
    );
    let calls = machine.calls();
    let ours: Vec<_> = calls.lines().filter(|line| line.starts_with("svc-")).collect();
    let then =
        ["svc-update boot", "svc-register stage restore", "svc-restore ", "svc-register stage gateway"];
    assert_eq!(ours[..4], then, "{calls}");
    assert_eq!(ours[4..], ["svc-register stage register", "svc-register "], "{calls}");
    let env = fs::read_to_string(machine.dir.path().join("opt/svc/env/host.env")).unwrap();
    let password = env.split("postgres://postgres:").nth(1).and_then(|rest| rest.split('@').next()).unwrap();
    assert!(password.len() == 64 && !calls.contains(password), "{env}");
}

#[test]
fn a_failure_before_our_binary_is_there_is_reported_all_the_same() {
    let machine = Machine::new();
    machine.program("podman", "exit 125");
    assert!(!machine.boots());
    let last = machine.heard().pop().unwrap();
    assert!(
        last.starts_with(&format!("POST /vps/{MACHINE}/boot-failure register-me {{\"stage\":\"database\"")),
        "{last}"
    );
    assert!(last.contains("PostgreSQL"), "{last}");
    let body = last.split_once('{').map(|(_, rest)| format!("{{{rest}")).unwrap();
    assert!(serde_json::from_str::<serde_json::Value>(&body).is_ok(), "{body}");
}

#[test]
fn a_program_that_fails_is_reported_with_its_last_words() {
    for (applet, stage) in
        [("svc-update", "bundle"), ("svc-restore", "restore"), ("svc-register", "register")]
    {
        let machine = Machine::new();
        machine.fails(applet, "first\nthe \"last\" words\n");
        assert!(!machine.boots(), "{applet}");
        let report = format!("svc-register failure --stage {stage} --message the \"last\" words");
        assert_eq!(machine.calls().lines().last(), Some(report.as_str()), "{applet}");
    }
}
