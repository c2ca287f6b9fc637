//! Earlier versions of files: lists, downloads, and restores into the home of a running machine.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use kit::s3::S3Server;
use serde_json::{Value, json};
use svc::host::files::restore_entry;

use super::machine::{FilesPlatform, Host, describe_tree};
use crate::host::machine::{BUCKET, RunningApplet, slot, start_store};

/// A machine with saved files, and the processes that save them and serve their history.
pub struct HistoryFixture {
    pub host: Host,
    pub store: S3Server,
    _platform: FilesPlatform,
    _services: [RunningApplet; 2],
}

impl HistoryFixture {
    pub async fn start() -> Result<Self> {
        let (store, platform) = (start_store()?, FilesPlatform::start().await?);
        let host = Host::new(&store, &platform, 1)?;
        fs::create_dir_all(host.machine.path("var/lib/svc/requests"))?;
        fs::create_dir_all(host.machine.path("home/svc/home/system/logs"))?;
        host.write("home/projects/plan.md", "version 1")?;
        host.write("home/projects/app/main.rs", "fn main() {}")?;
        let saver = host.start_and_save().await?;
        let listener = host.machine.spawn(&["svc-sync-agent", "history", "--listen"], &[])?;
        let deadline = Instant::now() + Duration::from_secs(60);
        while !host.machine.path("run/svc/files/history.sock").exists() {
            ensure!(Instant::now() < deadline, "history.sock does not exist: {}", listener.stderr());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(Self { host, store, _platform: platform, _services: [saver, listener] })
    }

    /// Damages all objects of a kind, such as `data` (packs) or `index`, in the store.
    pub fn damage(&self, kind: &str) {
        for object in self.store.objects(BUCKET, &format!("{}/{kind}/", slot().files())) {
            let mut damaged = self.store.read(BUCKET, &object.key).expect("the object exists");
            damaged.iter_mut().for_each(|byte| *byte ^= 1);
            self.store.write(BUCKET, &object.key, damaged);
        }
    }

    /// Saves the files, and returns a time that is after this save and before any later one.
    async fn save(&self) -> Result<Timestamp> {
        self.host.machine.run(&["svc-sync-agent", "now"])?.expect(0);
        let saved = Timestamp::now();
        tokio::time::sleep(Duration::from_millis(5)).await;
        Ok(saved)
    }

    pub fn socket(&self) -> PathBuf {
        self.host.machine.path("run/svc/files/history.sock")
    }

    async fn get(&self, path: &str) -> Result<(u16, Vec<u8>)> {
        let client = reqwest::Client::builder().unix_socket(self.socket()).build()?;
        let response = client.get(format!("http://history/api/files/{path}")).send().await?;
        let status = response.status().as_u16();
        Ok((status, response.bytes().await?.to_vec()))
    }

    async fn get_json(&self, path: &str) -> Result<Value> {
        let (status, body) = self.get(path).await?;
        ensure!(status == 200, "{path}: {status} {}", String::from_utf8_lossy(&body));
        Ok(serde_json::from_slice(&body)?)
    }

    fn request_restore(&self, fields: &Value) -> Result<()> {
        let mut request = json!({ "requestId": uuid::Uuid::now_v7(), "requestedAt": Timestamp::now(), "time": null,
            "into": null, "replace": false });
        request
            .as_object_mut()
            .context("not an object")?
            .extend(fields.as_object().cloned().unwrap_or_default());
        Ok(fs::write(self.host.machine.path("var/lib/svc/requests/files-restore"), request.to_string())?)
    }

    /// Requests and runs a restore, and returns its state.
    fn restore(&self, fields: &Value, exit_code: i32) -> Result<Value> {
        self.request_restore(fields)?;
        self.host.machine.run(&["svc-sync-agent", "serve-restore"])?.expect(exit_code);
        self.read_restore_state()
    }

    fn read_restore_state(&self) -> Result<Value> {
        let text = fs::read_to_string(self.host.machine.path("var/lib/svc/files/entry-restore.json"))?;
        Ok(serde_json::from_str(&text)?)
    }

    fn read(&self, path: &str) -> Result<String> {
        fs::read_to_string(self.host.home().join(path)).with_context(|| path.to_owned())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn versions_and_listings_reflect_requested_time() -> Result<()> {
    let history = HistoryFixture::start().await?;
    let first = history.save().await?;
    history.host.write("home/projects/plan.md", "version 2, longer")?;
    let second = history.save().await?;
    fs::remove_file(history.host.home().join("home/projects/plan.md"))?;
    history.save().await?;

    let page = history.get_json("versions?path=projects/plan.md").await?;
    assert_eq!(page["path"], "/home/svc/home/projects/plan.md");
    let sizes: Vec<_> = page["versions"]
        .as_array()
        .context("no versions")?
        .iter()
        .map(|v| &v["entry"]["sizeBytes"])
        .collect();
    assert_eq!(sizes, [&Value::Null, &json!(17), &json!(9)], "{page}");
    assert_eq!(page["nextBefore"], Value::Null);
    let before = page["versions"][1]["firstSavedAt"].as_str().context("no time")?;
    let older = history.get_json(&format!("versions?path=projects/plan.md&before={before}")).await?;
    assert_eq!(older["versions"][0]["entry"]["sizeBytes"], 9, "{older}");

    // A time in the response identifies its snapshot.
    let saved_at = page["versions"][1]["lastSavedAt"].as_str().context("no time")?;
    let version = history.get_json(&format!("at?path=projects/plan.md&time={saved_at}")).await?;
    assert_eq!((&version["entry"]["sizeBytes"], &version["savedAt"]), (&json!(17), &json!(saved_at)));
    let directory = history.get_json(&format!("at?path=projects&time={second}")).await?;
    let names: Vec<_> =
        directory["entries"].as_array().context("no entries")?.iter().map(|e| e["name"].as_str()).collect();
    assert_eq!(names, [Some("app"), Some("plan.md")]);
    let page = history.get_json(&format!("at?path=projects&time={second}&limit=1&cursor=1")).await?;
    assert_eq!((&page["entries"][0]["name"], &page["nextCursor"]), (&json!("plan.md"), &Value::Null));
    assert_eq!(history.get_json("at?path=projects").await?["entries"].as_array().map(Vec::len), Some(1));
    assert_eq!(history.get_json("at").await?["path"], "/home/svc/home");

    for (time, content) in [(first, "version 1"), (second, "version 2, longer")] {
        let downloaded = history.get(&format!("download?path=projects/plan.md&time={time}")).await?;
        assert_eq!(downloaded, (200, content.as_bytes().to_vec()));
    }
    for (query, status, part) in [
        ("download?path=projects/plan.md", 404, "is not in the snapshot"),
        ("download?path=projects&format=raw", 400, "raw is only for files"),
        ("at?path=../../etc/passwd", 400, "must be a path below"),
        ("at?path=projects&time=2001-01-01T00:00:00Z", 404, "no snapshot at or before"),
        ("versions", 400, "is required"),
        ("versions?path=/etc/shadow", 400, "must be a path below"),
    ] {
        let (actual_status, body) = history.get(query).await?;
        let body = String::from_utf8_lossy(&body).into_owned();
        assert!(actual_status == status && body.contains(part), "{query}: {actual_status} {body}");
    }

    // The snapshots can be read even if the pointer is damaged.
    history.store.write(BUCKET, &format!("{}/latest", slot().files()), b"damaged".to_vec());
    assert_eq!(history.get_json("at?path=projects").await?["entries"].as_array().map(Vec::len), Some(1));
    Ok(())
}

/// Independent programs can unpack the archives, and the archives are complete.
#[tokio::test(flavor = "multi_thread")]
async fn archives_contain_the_snapshot_files() -> Result<()> {
    let history = HistoryFixture::start().await?;
    let home = history.host.home();
    history.host.write("home/projects/app/empty", "")?;
    let deep = "d".repeat(120);
    history.host.write(&format!("home/projects/app/{deep}/{deep}/long name ü.txt"), "deep")?;
    history.host.write("home/projects/app/tool", &"x".repeat(3 << 20))?;
    fs::set_permissions(home.join("home/projects/app/tool"), fs::Permissions::from_mode(0o750))?;
    fs::hard_link(home.join("home/projects/app/tool"), home.join("home/projects/app/tool-2"))?;
    std::os::unix::fs::symlink("./main.rs", home.join("home/projects/app/link"))?;
    let long_target = format!("{}main.rs", "./".repeat(60));
    std::os::unix::fs::symlink(long_target, home.join("home/projects/app/long-link"))?;
    history.save().await?;
    let expected = describe_tree(&home.join("home/projects/app"))?;
    let contents = |tree: &std::collections::BTreeMap<String, String>| -> Vec<(String, String)> {
        // The zip format has no hard links, and its times have a resolution of two seconds.
        let strip = |text: &String| text.rsplit(": ").next().unwrap_or_default().to_owned();
        tree.iter().map(|(path, text)| (path.clone(), strip(text))).collect()
    };
    for (format, program) in [("tar", &["tar", "-xf"][..]), ("zip", &["unzip", "-q"])] {
        let (status, body) = history.get(&format!("download?path=projects/app&format={format}")).await?;
        ensure!(status == 200, "{format}: {status}");
        let dir = tempfile::tempdir()?;
        let file = dir.path().join(format!("archive.{format}"));
        fs::write(&file, body)?;
        let output =
            Command::new(program[0]).args(&program[1..]).arg(&file).current_dir(dir.path()).output()?;
        ensure!(output.status.success(), "{format}: {}", String::from_utf8_lossy(&output.stderr));
        let unpacked = describe_tree(&dir.path().join("app"))?;
        assert_eq!(contents(&unpacked), contents(&expected), "{format}");
        let mode = fs::metadata(dir.path().join("app/tool"))?.mode() & 0o777;
        assert_eq!(mode, 0o750, "{format}");
    }

    // A client must not mistake an incomplete archive for a complete one.
    history.damage("data");
    for query in ["path=projects/app&format=tar", "path=projects/app/tool"] {
        assert!(history.get(&format!("download?{query}")).await.is_err(), "{query}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn restore_never_overwrites_existing_files() -> Result<()> {
    let history = HistoryFixture::start().await?;
    let first = history.save().await?;
    let time = first.to_string();
    history.host.write("home/projects/plan.md", "version 2")?;
    history.save().await?;

    // If the path exists, the restored file is placed beside it.
    let state = history.restore(&json!({ "path": "projects/plan.md", "time": time }), 0)?;
    assert_eq!((&state["status"], &state["error"]), (&json!("done"), &Value::Null), "{state}");
    let beside = state["restoredTo"].as_str().context("no restoredTo")?.to_owned();
    assert!(
        beside.starts_with("/home/svc/home/projects/plan.restored-") && beside.ends_with("Z.md"),
        "{beside}"
    );
    let beside = beside.strip_prefix("/home/svc/").context("not in the home")?;
    assert_eq!(
        (history.read(beside)?, history.read("home/projects/plan.md")?),
        ("version 1".into(), "version 2".into())
    );
    // A second restore does not replace the first one's result.
    let second_restore = history.restore(&json!({ "path": "projects/plan.md", "time": time }), 0)?;
    assert_ne!(second_restore["restoredTo"], state["restoredTo"]);

    // With `replace`, the current file is saved first and kept under another name.
    history.host.write("home/projects/plan.md", "not saved yet")?;
    let state = history.restore(&json!({ "path": "projects/plan.md", "time": time, "replace": true }), 0)?;
    assert_eq!(history.read("home/projects/plan.md")?, "version 1", "{state}");
    let kept_path =
        state["keptAs"].as_str().and_then(|path| path.strip_prefix("/home/svc/")).context("not kept")?;
    assert_eq!(history.read(kept_path)?, "not saved yet");
    let versions = history.get_json("versions?path=projects/plan.md").await?;
    assert_eq!(
        versions["versions"][0]["entry"]["sizeBytes"], 13,
        "the replaced file must be saved first: {versions}"
    );

    // If the path does not exist, it is restored in place, even if its parent directory is missing.
    fs::remove_dir_all(history.host.home().join("home/projects"))?;
    let state = history.restore(&json!({ "path": "/home/svc/home/projects/app", "time": time }), 0)?;
    assert_eq!(state["restoredTo"], "/home/svc/home/projects/app", "{state}");
    assert_eq!(history.read("home/projects/app/main.rs")?, "fn main() {}");
    let state = history.restore(&json!({ "path": "projects", "time": time, "into": "old/projects" }), 0)?;
    assert_eq!(
        (&state["restoredTo"], &state["files"]),
        (&json!("/home/svc/home/old/projects"), &json!(2)),
        "{state}"
    );

    for (fields, part) in [
        (json!({ "path": "projects", "into": "old" }), "already exists"),
        (json!({ "path": "system/logs" }), "is reserved for the machine"),
        (
            json!({ "path": "projects", "into": "system/config.json", "replace": true }),
            "is reserved for the machine",
        ),
        (json!({ "path": ".", "replace": true }), "is reserved for the machine"),
        (json!({ "path": "never" }), "is not in the snapshot"),
        (json!({ "path": "../.." }), "invalid path"),
    ] {
        let state = history.restore(&fields, 69)?;
        let error = state["error"].as_str().unwrap_or_default();
        assert!(state["status"] == "failed" && error.contains(part), "{fields}: {state}");
        assert!(!history.host.machine.path("var/lib/svc/requests/files-restore").exists(), "{fields}");
    }
    // Without a time, or with one in the future, the last save before the request is restored, not the save made just
    // before the replacement.
    let soon = (Timestamp::now() + jiff::SignedDuration::from_mins(2)).to_string();
    for time in [Value::Null, Value::String(soon)] {
        history.save().await?;
        history.host.write("home/projects/app/main.rs", "broken")?;
        let fields = json!({ "path": "projects/app/main.rs", "time": time, "replace": true });
        let state = history.restore(&fields, 0)?;
        assert_eq!(history.read("home/projects/app/main.rs")?, "fn main() {}", "{state}");
    }
    // A `.svc-restore-entry` directory that belongs to another user is not removed, and the request fails.
    if nix::unistd::getuid().is_root() {
        let foreign = history.host.home().join(".svc-restore-entry");
        fs::create_dir(&foreign)?;
        std::os::unix::fs::chown(&foreign, Some(12_345), None)?;
        let state = history.restore(&json!({ "path": "projects/app", "into": "elsewhere" }), 69)?;
        assert!(state["error"].as_str().is_some_and(|error| error.contains("remove it")), "{state}");
        fs::remove_dir(&foreign)?;
    }
    // Symbolic links in the home are not followed.
    let outside = tempfile::tempdir()?;
    std::os::unix::fs::symlink(outside.path(), history.host.home().join("home/link"))?;
    history.restore(&json!({ "path": "projects", "into": "link/projects" }), 69)?;
    assert_eq!(fs::read_dir(outside.path())?.count(), 0);
    assert!(!history.host.home().join(".svc-restore-entry").exists());
    let log = fs::read_to_string(history.host.home().join("home/system/logs/activity.log"))?;
    assert!(log.contains(" restored /home/svc") && log.contains("could not be restored"), "{log}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn restore_survives_a_kill_at_every_fail_point() -> Result<()> {
    for point in restore_entry::FAILPOINTS {
        let history = HistoryFixture::start().await?;
        let time = history.save().await?.to_string();
        history.host.write("home/projects/app/main.rs", "newer")?;
        history.request_restore(&json!({ "path": "projects/app", "time": time, "replace": true }))?;
        let failpoints = format!("{point}=return(kill)");
        let serve = ["svc-sync-agent", "serve-restore"];
        history.host.machine.run_with(&serve, &[("FAILPOINTS", &failpoints)])?.expect_killed();
        history.host.machine.run(&serve)?.expect(0);
        let state = history.read_restore_state()?;
        assert_eq!(state["status"], "done", "{point}: {state}");
        assert_eq!(history.read("home/projects/app/main.rs")?, "fn main() {}", "{point}");
        let kept_path =
            state["keptAs"].as_str().and_then(|path| path.strip_prefix("/home/svc/")).context("not kept")?;
        assert_eq!(history.read(&format!("{kept_path}/main.rs"))?, "newer", "{point}");
        let entry_count = fs::read_dir(history.host.home().join("home/projects"))?.count();
        assert_eq!(entry_count, 3, "{point}: there must be app, its previous version, and plan.md");
        for leftover in [".svc-restore-entry", "home/projects/app/entry"] {
            assert!(!Path::new(&history.host.home().join(leftover)).exists(), "{point}: {leftover}");
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn restored_directory_lacks_only_damaged_files() -> Result<()> {
    let history = HistoryFixture::start().await?;
    let content: String = (0..60_000_u32).map(|n| n.wrapping_mul(2_654_435_761).to_string()).collect();
    history.host.write("home/projects/app/large", &content)?;
    history.save().await?;
    // The largest pack contains the file's content.
    let packs = history.store.objects(BUCKET, &format!("{}/data/", slot().files()));
    let pack = packs.iter().max_by_key(|object| object.size).context("no pack")?;
    let mut damaged = history.store.read(BUCKET, &pack.key).context("no pack")?;
    damaged[100] ^= 1;
    history.store.write(BUCKET, &pack.key, damaged);
    for format in ["tar", "zip"] {
        let client = reqwest::Client::builder().unix_socket(history.socket()).build()?;
        let url = format!("http://history/api/files/download?path=projects/app&format={format}");
        let mut response = client.get(url).send().await?;
        let mut archive = Vec::new();
        let error = loop {
            match response.chunk().await {
                Ok(Some(chunk)) => archive.extend(chunk),
                Ok(None) => break None,
                Err(error) => break Some(error),
            }
        };
        assert!(error.is_some(), "the incomplete {format} ended without an error");
        let end_of_zip = b"PK\x05\x06";
        assert!(!archive.windows(4).any(|window| window == end_of_zip), "the incomplete zip looks complete");
    }
    let state = history.restore(&json!({ "path": "projects/app", "into": "projects/copy" }), 0)?;
    assert_eq!((&state["status"], &state["files"]), (&"done".into(), &1.into()), "{state}");
    let left_out = "the content of 1 damaged item was left out: /home/svc/home/projects/app/large";
    assert_eq!(state["error"], left_out);
    assert_eq!(history.read("home/projects/copy/main.rs")?, "fn main() {}");
    assert!(!history.host.home().join("home/projects/copy/large").exists());
    let file = history.restore(&json!({ "path": "projects/app/large", "into": "projects/large" }), 69)?;
    assert_eq!(file["status"], "failed", "{file}");
    Ok(())
}

/// One of the owner's programs creates an entry under the name that was planned for the replaced entry, and the restore
/// is killed again.
#[tokio::test(flavor = "multi_thread")]
async fn restore_reports_actual_path_of_replaced_entry() -> Result<()> {
    let history = HistoryFixture::start().await?;
    let time = history.save().await?.to_string();
    history.host.write("home/projects/plan.md", "newer")?;
    history.request_restore(&json!({ "path": "projects/plan.md", "time": time, "replace": true }))?;
    let serve = ["svc-sync-agent", "serve-restore"];
    let kill_at = |point: &str| -> Result<()> {
        let failpoints = format!("{point}=return(kill)");
        history.host.machine.run_with(&serve, &[("FAILPOINTS", &failpoints)])?.expect_killed();
        Ok(())
    };
    kill_at("files.entry.exchanged")?;
    let placement: Value = serde_json::from_str(&history.read(".svc-restore-entry/complete")?)?;
    let planned_name = String::from_utf8(serde_json::from_value(placement["kept_as"].clone())?)?;
    history.host.write(&format!("home/projects/{planned_name}"), "unrelated")?;
    kill_at("files.entry.placed")?;
    history.host.machine.run(&serve)?.expect(0);
    let state = history.read_restore_state()?;
    let kept_path =
        state["keptAs"].as_str().and_then(|path| path.strip_prefix("/home/svc/")).context("not kept")?;
    assert_eq!(history.read(kept_path)?, "newer", "{state}");
    assert_eq!(history.read(&format!("home/projects/{planned_name}"))?, "unrelated");
    Ok(())
}

/// A restore that needs more memory than the machine has would be killed on every attempt, and block all others.
#[tokio::test(flavor = "multi_thread")]
async fn repeatedly_killed_restore_fails() -> Result<()> {
    let history = HistoryFixture::start().await?;
    history.request_restore(&json!({ "path": "projects/app" }))?;
    let serve = ["svc-sync-agent", "serve-restore"];
    for _ in 0..5 {
        let killed = [("FAILPOINTS", "files.restore.created=return(kill)")];
        history.host.machine.run_with(&serve, &killed)?.expect_killed();
    }
    history.host.machine.run(&serve)?.expect(69);
    let state = history.read_restore_state()?;
    assert_eq!(state["status"], "failed", "{state}");
    assert!(state["error"].as_str().is_some_and(|error| error.contains("too little memory")), "{state}");
    history.request_restore(&json!({ "path": "projects/plan.md" }))?;
    history.host.machine.run(&serve)?.expect(0);
    assert_eq!(history.read_restore_state()?["status"], "done");
    Ok(())
}

/// systemd restarts the program while the request exists, so a run that rejects its configuration must remove the
/// request.
#[tokio::test(flavor = "multi_thread")]
async fn restore_with_invalid_configuration_fails() -> Result<()> {
    let history = HistoryFixture::start().await?;
    history.request_restore(&json!({ "path": "projects/app" }))?;
    let invalid = [("FILES_UPLOAD_KIB_PER_SECOND", "fast")];
    history.host.machine.run_with(&["svc-sync-agent", "serve-restore"], &invalid)?.expect(78);
    let state = history.read_restore_state()?;
    assert_eq!(state["status"], "failed", "{state}");
    let error = state["error"].as_str().unwrap_or_default();
    assert!(error.contains("FILES_UPLOAD_KIB_PER_SECOND"), "{state}");
    assert!(!history.host.machine.path("var/lib/svc/requests/files-restore").exists());
    Ok(())
}
