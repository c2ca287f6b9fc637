//! The owner's archive contains and lists all of the owner's data, and can be imported on another machine.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use kit::s3::S3Server;
use serde_json::Value;

use super::machine::{self, Machine, RunResult, wait_until};

const CREATE_NOTES: &str = "CREATE ROLE app_notes NOLOGIN; CREATE SCHEMA app_notes AUTHORIZATION app_notes; \
     CREATE TABLE app_notes.notes (id int PRIMARY KEY, body text); ALTER TABLE app_notes.notes OWNER TO app_notes; \
     INSERT INTO app_notes.notes SELECT n, md5(n::text) FROM generate_series(1, 5000) n";

fn write_file(machine: &Machine, path: &str, content: &[u8]) -> Result<PathBuf> {
    let path = machine.path("home/svc/home").join(path);
    fs::create_dir_all(path.parent().context("the path has no parent")?)?;
    fs::write(&path, content)?;
    Ok(path)
}

/// Creates a machine with a database and files of all kinds, and exports its archive.
async fn machine_with_archive(store: &S3Server) -> Result<(Machine, PathBuf)> {
    let machine = Machine::in_use(store, 1).await?;
    machine.client().await?.batch_execute(CREATE_NOTES).await?;
    write_file(&machine, "projects/a/main.rs", b"fn main() {}")?;
    let program = write_file(&machine, "projects/a/run", b"#!/bin/sh\n")?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    let large: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
    write_file(&machine, "projects/large.bin", &large)?;
    write_file(&machine, &format!("projects/{}/deep", "long-name-".repeat(15)), b"deep")?;
    write_file(&machine, "apps/notes/svc.json", b"{}")?;
    write_file(&machine, "system/logs/activity.log", b"started\n")?;
    fs::create_dir_all(machine.path("home/svc/home/empty"))?;
    std::os::unix::fs::symlink("../projects/a/main.rs", machine.path("home/svc/home/empty/link"))?;
    std::os::unix::fs::symlink("/etc", machine.path("home/svc/home/empty/outside"))?;
    std::os::unix::fs::symlink("..//projects/./a", machine.path("home/svc/home/empty/not-normalized"))?;
    let odd: &std::ffi::OsStr = std::os::unix::ffi::OsStrExt::from_bytes(b"odd \xff \n name%");
    fs::write(machine.path("home/svc/home/empty").join(odd), "odd")?;
    let archive = machine.path("ada.tar");
    machine
        .run(&["svc-db-backup", "export", "--output", archive.to_str().context("the path is not UTF-8")?])?
        .expect(0);
    Ok((machine, archive))
}

fn run_import(machine: &Machine, archive: &Path, extra_args: &[&str]) -> Result<RunResult> {
    let args = ["svc-restore", "import", archive.to_str().context("the path is not UTF-8")?];
    let args: Vec<&str> = args.iter().chain(extra_args).copied().collect();
    machine.run(&args)
}

/// Lists every path under the home directory: a link with its target, a directory with its mode, a file with its mode,
/// modification time and content hash. Leaves out anything that an import has moved aside.
fn list_tree(machine: &Machine) -> Result<Vec<String>> {
    let home = machine.path("home/svc/home");
    let (mut lines, mut pending) = (Vec::new(), vec![home.clone()]);
    while let Some(path) = pending.pop() {
        let meta = fs::symlink_metadata(&path)?;
        let name = path.strip_prefix(&home)?.to_owned();
        let is_moved_aside = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with(".before-import-");
        if path.file_name().is_some_and(is_moved_aside) {
            continue;
        }
        let description = if meta.is_symlink() {
            format!("-> {}", fs::read_link(&path)?.display())
        } else if meta.is_dir() {
            pending.extend(fs::read_dir(&path)?.flatten().map(|entry| entry.path()));
            format!("{:o}", meta.mode())
        } else {
            let digest = svc::host::snapshots::archive::sha256(&fs::read(&path)?);
            format!("{:o} {} {digest}", meta.mode(), meta.mtime())
        };
        lines.push(format!("{name:?} {description}"));
    }
    lines.sort_unstable();
    Ok(lines)
}

async fn count_rows(machine: &Machine) -> Result<i64> {
    Ok(machine.client().await?.query_one("SELECT count(*) FROM app_notes.notes", &[]).await?.get(0))
}

#[tokio::test]
async fn import_restores_the_archive_and_keeps_existing_data() -> Result<()> {
    let store = machine::start_store()?;
    let (machine, archive) = machine_with_archive(&store).await?;
    let new_machine = Machine::in_use(&store, 2).await?;
    write_file(&new_machine, "projects/here", b"was here")?;
    write_file(&new_machine, "untouched/file", b"stays")?;
    write_file(&new_machine, "system/config.json", b"{}")?;
    write_file(&new_machine, "system/logs/activity.log", b"from the new machine\n")?;
    new_machine.client().await?.batch_execute("CREATE TABLE before (a int)").await?;
    // `--check` changes nothing.
    run_import(&new_machine, &archive, &["--check"])?.expect(0);
    assert!(new_machine.path("home/svc/home/projects/here").exists());
    let printed = run_import(&new_machine, &archive, &[])?.expect(0).stdout;
    assert!(
        printed.contains("5000 rows")
            && printed.contains(".before-import-")
            && printed.contains("svc_before_"),
        "{printed}"
    );

    assert_eq!(count_rows(&new_machine).await?, 5000);
    let owner = "SELECT tableowner::text FROM pg_tables WHERE tablename = 'notes'";
    let owner = new_machine.client().await?.query_one(owner, &[]).await?;
    assert_eq!(
        owner.get::<_, &str>(0),
        "postgres",
        "the table must belong to postgres; the gateway grants the app's role its privileges"
    );
    let mut expected = list_tree(&machine)?;
    let mut imported = list_tree(&new_machine)?;
    let is_outside_archive = |line: &String| line.contains("untouched") || line.contains("config.json");
    assert_eq!(
        imported.iter().filter(|line| is_outside_archive(line)).count(),
        3,
        "files that are not in the archive must be kept"
    );
    imported.retain(|line| !is_outside_archive(line));
    let is_backup_log = |line: &String| line.contains("backup");
    imported.retain(|line| !is_backup_log(line));
    expected.retain(|line| !is_backup_log(line));
    assert_eq!(imported, expected);
    let find_moved_aside = |directory: &str| {
        let entries = fs::read_dir(new_machine.path(directory))?.flatten().map(|entry| entry.path());
        entries
            .into_iter()
            .find(|path| path.to_string_lossy().contains(".before-import-"))
            .context("no directory of replaced files")
    };
    assert_eq!(fs::read(find_moved_aside("home/svc/home")?.join("projects/here"))?, b"was here");
    // The backup that preceded the import has also appended a line.
    let replaced = fs::read(find_moved_aside("home/svc/home/system")?.join("logs/activity.log"))?;
    assert!(replaced.starts_with(b"from the new machine\n"));
    assert!(new_machine.databases().await?.iter().any(|name| name.starts_with("svc_before_")));
    assert!(new_machine.path("var/lib/svc/requests/backup").exists(), "a backup must be requested");
    new_machine.run(&["svc-db-backup", "run", "--request"])?.expect(0);
    Ok(())
}

#[tokio::test]
async fn archive_is_readable_with_stock_tools() -> Result<()> {
    let store = machine::start_store()?;
    let (machine, archive) = machine_with_archive(&store).await?;
    let into = tempfile::tempdir()?;
    let status = Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(into.path()).status()?;
    assert!(status.success());
    assert_eq!(fs::read(into.path().join("home/projects/a/main.rs"))?, b"fn main() {}");
    let manifest: Value = serde_json::from_slice(&fs::read(into.path().join("manifest.json"))?)?;
    let dump = manifest["entries"]
        .as_array()
        .context("no entries")?
        .iter()
        .find(|entry| entry["path"] == "database.dump");
    let digest = svc::host::snapshots::archive::sha256(&fs::read(into.path().join("database.dump"))?);
    assert_eq!(dump.context("the dump is missing")?["sha256"], digest.as_str());
    let postgres = machine.postgres.as_ref().context("the machine has no database")?;
    postgres.create_database("elsewhere").await?;
    let mut restore = Command::new(machine::binaries()?.dir().join("pg_restore"));
    restore
        .arg("-d")
        .arg(postgres.url("elsewhere"))
        .arg("--exit-on-error")
        .arg(into.path().join("database.dump"));
    assert!(restore.status()?.success());
    let client = postgres.connect("elsewhere").await?;
    assert_eq!(client.query_one("SELECT count(*) FROM app_notes.notes", &[]).await?.get::<_, i64>(0), 5000);
    let mode = fs::metadata(&archive)?.mode() & 0o777;
    assert_eq!(mode, 0o600, "only the owner may read the archive, which contains all data");
    // An existing archive is not overwritten, and a failed export leaves no file.
    let output = archive.to_str().context("the path is not UTF-8")?;
    let before = fs::read(&archive)?;
    machine.run(&["svc-db-backup", "export", "--output", output])?.expect(65);
    assert!(fs::read(&archive)? == before, "the existing archive was overwritten");
    for point in svc::host::snapshots::backup::EXPORT_FAILPOINTS {
        let next = machine.path("next.tar");
        let args = ["svc-db-backup", "export", "--output", next.to_str().context("the path is not UTF-8")?];
        machine.run_with(&args, &[("FAILPOINTS", &format!("{point}=return(error)"))])?.expect(70);
        assert!(!next.exists() && !machine.path("next.tar.partial").exists(), "after an error at {point}");
        let kill = format!("{point}=return(kill)");
        machine.run_with(&args, &[("FAILPOINTS", &kill)])?.expect_step_killed();
        assert!(!next.exists() && !machine.path("next.tar.partial").exists(), "after a kill at {point}");
        machine.run(&args)?.expect(0);
        fs::remove_file(next)?;
    }
    Ok(())
}

#[tokio::test]
async fn import_stops_unless_replaced_database_is_stored() -> Result<()> {
    let store = machine::start_store()?;
    let (_machine, archive) = machine_with_archive(&store).await?;
    let new_machine = Machine::in_use(&store, 2).await?;
    let rows = "CREATE TABLE t (id int); INSERT INTO t SELECT * FROM generate_series(1, 1000)";
    new_machine.client().await?.batch_execute(rows).await?;
    new_machine.run(&["svc-db-backup"])?.expect(0);
    let for_each_role = |statement: &str| {
        format!(
            "DO $$ BEGIN FOR n IN 1..6000 LOOP EXECUTE format('{statement} ROLE role_%s', n); END LOOP; END $$"
        )
    };
    // The sidecar would be too large, so the snapshot is not stored.
    new_machine.client().await?.batch_execute(&for_each_role("CREATE")).await?;
    let result = run_import(&new_machine, &archive, &[])?.expect(75);
    assert!(result.stderr.contains("drop roles or tables"), "{}", result.stderr);
    new_machine.client().await?.batch_execute("SELECT FROM t").await?;
    // The snapshot is held back because of the lost rows, but it is stored, so the import continues.
    new_machine.client().await?.batch_execute(&for_each_role("DROP")).await?;
    new_machine.client().await?.batch_execute("DELETE FROM t WHERE id > 10").await?;
    let result = run_import(&new_machine, &archive, &[])?.expect(0);
    assert!(result.stderr.contains("10 rows instead of 1000"), "{}", result.stderr);
    assert_eq!(count_rows(&new_machine).await?, 5000);
    Ok(())
}

#[tokio::test]
async fn import_completes_with_closed_standard_output() -> Result<()> {
    let store = machine::start_store()?;
    let (_machine, archive) = machine_with_archive(&store).await?;
    let new_machine = Machine::in_use(&store, 2).await?;
    let (reader, writer) = std::io::pipe()?;
    drop(reader);
    let mut import = new_machine.command(&["svc-restore", "import", machine::path_str(&archive)], &[]);
    let output = import.stdout(writer).output()?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(count_rows(&new_machine).await?, 5000);
    assert!(new_machine.path("home/svc/home/projects/large.bin").exists());
    Ok(())
}

/// Two exports to the same file would write to the same partial archive.
#[tokio::test]
async fn second_export_is_refused_until_the_first_ends() -> Result<()> {
    let store = machine::start_store()?;
    let machine = Machine::in_use(&store, 1).await?;
    let archive = machine.path("ada.tar");
    let args = ["svc-db-backup", "export", "--output", machine::path_str(&archive)];
    let first = machine.spawn(&args, &[("FAILPOINTS", "export.dumped=sleep(3000)")])?;
    wait_until("the partial archive", || machine.path("ada.tar.partial").exists()).await?;
    let second = machine.run(&args)?.expect(75);
    assert!(second.stderr.contains("another export is running"), "{}", second.stderr);
    first.wait()?.expect(0);
    run_import(&machine, &archive, &["--check"])?.expect(0);
    Ok(())
}

#[tokio::test]
async fn killed_import_is_resumed() -> Result<()> {
    let store = machine::start_store()?;
    let (_machine, archive) = machine_with_archive(&store).await?;
    let new_machine = Machine::in_use(&store, 2).await?;
    new_machine.client().await?.batch_execute("CREATE TABLE before (a int)").await?;
    write_file(&new_machine, "projects/here", b"was here")?;
    let args = ["svc-restore", "import", archive.to_str().context("the path is not UTF-8")?];
    for point in svc::host::snapshots::restore::IMPORT_FAILPOINTS {
        let result = new_machine.run_with(&args, &[("FAILPOINTS", &format!("{point}=return(kill)"))])?;
        match *point {
            "import.done" => drop(result.expect_killed()),
            _ => drop(result.expect_step_killed()),
        }
        if ["import.begin", "import.checked", "import.staged", "import.settings_reset", "import.loaded"]
            .contains(point)
        {
            new_machine.client().await?.batch_execute("SELECT FROM before").await?;
            assert!(new_machine.path("home/svc/home/projects/here").exists(), "after a kill at {point}");
        }
    }
    new_machine.run(&args)?.expect(0);
    assert_eq!(count_rows(&new_machine).await?, 5000);
    let remaining: Vec<_> =
        fs::read_dir(new_machine.path("home/svc/home"))?.flatten().map(|entry| entry.file_name()).collect();
    assert!(!remaining.iter().any(|name| name.to_string_lossy().starts_with(".import-")), "{remaining:?}");
    let moved_aside = remaining
        .iter()
        .filter_map(|name| fs::read(new_machine.path("home/svc/home").join(name).join("projects/here")).ok());
    assert_eq!(
        moved_aside.collect::<Vec<_>>(),
        [b"was here"],
        "the directory must be moved aside once, and kept"
    );
    Ok(())
}

#[tokio::test]
async fn invalid_archive_changes_nothing() -> Result<()> {
    let store = machine::start_store()?;
    let (machine, archive) = machine_with_archive(&store).await?;
    let new_machine = Machine::in_use(&store, 2).await?;
    let bytes = fs::read(&archive)?;
    let file = new_machine.path("bad.tar");
    let assert_refused = |content: &[u8], expected: &str| -> Result<()> {
        fs::write(&file, content)?;
        let result = run_import(&new_machine, &file, &[])?.expect(65);
        assert!(result.stderr.contains(expected), "{expected}: {}", result.stderr);
        Ok(())
    };
    let find = |needle: &[u8]| {
        bytes.windows(needle.len()).position(|window| window == needle).context("not found in the archive")
    };
    let with_flipped_bit = |index: usize| {
        let mut bytes = bytes.clone();
        bytes[index] ^= 1;
        bytes
    };
    assert_refused(&with_flipped_bit(find(b"fn main()")?), "but the archive's entry differs")?;
    assert_refused(&with_flipped_bit(find(b"PGDMP")? + 3000), "but the archive's entry differs")?;
    assert_refused(&bytes[..bytes.len() / 2], "not a valid archive")?;
    let manifest_name_start = bytes
        .windows(13)
        .rposition(|window| window == b"manifest.json")
        .context("the manifest is missing")?;
    assert_refused(&bytes[..manifest_name_start], "it is truncated")?;
    assert_refused(&bytes[..manifest_name_start + 600], "not a valid archive")?;
    assert_refused(b"", "export.json")?;
    assert_refused(&vec![7; 4096], "not a valid archive")?;
    for (path, expected) in [
        ("../x", "not a valid path"),
        ("home/../../x", "not a valid path"),
        ("elsewhere/x", "not a valid path"),
        ("home/empty/outside/x", "not a valid path"),
    ] {
        let mut tar = tar::Builder::new(Vec::new());
        for entry in tar::Archive::new(bytes.as_slice()).entries()? {
            let mut entry = entry?;
            let (mut header, name) = (entry.header().clone(), entry.path()?.into_owned());
            if name == Path::new("manifest.json") {
                let mut hostile = tar::Header::new_gnu();
                hostile.set_size(1);
                hostile.set_mode(0o600);
                hostile.set_mtime(0);
                // The path is copied into the header, because the library refuses to write some of these paths.
                let name = &mut hostile.as_old_mut().name;
                name[..path.len()].copy_from_slice(path.as_bytes());
                hostile.set_cksum();
                tar.append(&hostile, &b"x"[..])?;
            }
            match entry.link_name()?.map(std::borrow::Cow::into_owned) {
                Some(target) => tar.append_link(&mut header, name, target)?,
                None => tar.append_data(&mut header, name, &mut entry)?,
            }
        }
        assert_refused(&tar.into_inner()?, expected)?;
    }
    // An import also fails while the gate is closed, or with an archive from another user.
    fs::write(&file, &bytes)?;
    let archive = file;
    drop(machine);
    let fresh = Machine::new(&store, 3).await?;
    run_import(&fresh, &archive, &[])?.expect(75);
    new_machine.set_env_vars("host.env", &[("SVC_USER_ID", "user_2")])?;
    let result = run_import(&new_machine, &archive, &[])?.expect(65);
    assert!(result.stderr.contains("--from-another-user"), "{}", result.stderr);
    assert_eq!(new_machine.databases().await?.iter().filter(|name| name.starts_with("svc_")).count(), 0);
    assert!(!new_machine.path("home/svc/home/projects").exists());
    run_import(&new_machine, &archive, &["--from-another-user"])?.expect(0);
    Ok(())
}
