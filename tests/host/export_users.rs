//! Export and import on a machine with two separate users. Root runs both commands, but each user's files are read and
//! written by a process that runs as that user.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown, symlink};
use std::path::Path;

use anyhow::{Context, Result};
use kit::s3::S3Server;
use tokio_postgres::error::SqlState;

use super::machine::{self, Machine};

/// The user ids, which are also the group ids, that the machine's sysusers configuration assigns.
const GATEWAY_ID: u32 = 940;
const OWNER_ID: u32 = 1940;

/// Creates a machine in use whose directories have the owners that tmpfiles assigns. Returns `None` unless the test
/// runs as root.
async fn machine_with_two_users(store: &S3Server, epoch: u32) -> Result<Option<Machine>> {
    if !nix::unistd::geteuid().is_root() {
        kit::skip::record("only root can run processes as two users");
        return Ok(None);
    }
    let machine = Machine::in_use(store, epoch).await?;
    let create_dir = |path: &str, mode: u32, uid: u32, gid: u32| -> Result<()> {
        let path = machine.path(path);
        fs::create_dir_all(&path)?;
        chown(&path, Some(uid), Some(gid))?;
        Ok(fs::set_permissions(&path, Permissions::from_mode(mode))?)
    };
    create_dir("", 0o755, 0, 0)?;
    for env in ["host.env", "r2.env", "boot.env"] {
        let env = machine.path("opt/svc/env").join(env);
        chown(&env, Some(GATEWAY_ID), Some(GATEWAY_ID))?;
        fs::set_permissions(&env, Permissions::from_mode(0o600))?;
    }
    create_dir("var/lib/svc", 0o1771, 0, GATEWAY_ID)?;
    for state in ["restore", "requests"] {
        create_dir(&format!("var/lib/svc/{state}"), 0o700, GATEWAY_ID, GATEWAY_ID)?;
    }
    create_dir("run/svc", 0o755, 0, 0)?;
    create_dir("run/svc/owner", 0o2770, OWNER_ID, GATEWAY_ID)?;
    create_dir("home/svc", 0o1770, 0, OWNER_ID)?;
    create_dir("home/svc/home", 0o1770, 0, OWNER_ID)?;
    create_dir("home/svc/home/apps", 0o755, OWNER_ID, OWNER_ID)?;
    for system in ["home/svc/home/system", "home/svc/home/system/logs"] {
        create_dir(system, 0o2750, GATEWAY_ID, OWNER_ID)?;
    }
    // The marker is in a directory where the gateway's user can replace it.
    fs::remove_file(machine.path("opt/svc/restore-complete"))?;
    let marker = machine.path("var/lib/svc/restore-complete");
    fs::write(&marker, "")?;
    chown(&marker, Some(GATEWAY_ID), Some(GATEWAY_ID))?;
    symlink(&marker, machine.path("opt/svc/restore-complete"))?;
    Ok(Some(machine))
}

fn write_owned_file(machine: &Machine, path: &str, content: &str, uid: u32, gid: u32) -> Result<()> {
    let path = machine.path("home/svc/home").join(path);
    let parent = path.parent().context("the path has no parent")?;
    if !parent.exists() {
        fs::create_dir_all(parent)?;
        chown(parent, Some(uid), Some(gid))?;
    }
    fs::write(&path, content)?;
    chown(&path, Some(uid), Some(gid))?;
    Ok(fs::set_permissions(&path, Permissions::from_mode(0o640))?)
}

fn path_str(path: &Path) -> Result<&str> {
    path.to_str().context("the path is not UTF-8")
}

#[tokio::test]
async fn files_are_accessed_as_their_owner() -> Result<()> {
    let store = machine::start_store()?;
    let Some(machine) = machine_with_two_users(&store, 1).await? else { return Ok(()) };
    machine.client().await?.batch_execute("CREATE TABLE public.t AS SELECT 1 AS a").await?;
    write_owned_file(&machine, "projects/file", "mine", OWNER_ID, OWNER_ID)?;
    write_owned_file(&machine, "system/logs/activity.log", "a record", GATEWAY_ID, OWNER_ID)?;
    // Root's secret is in a file that the owner cannot read, and behind a link.
    write_owned_file(&machine, "roots", "S3CRET", 0, 0)?;
    fs::write(machine.path("secret"), "S3CRET")?;
    fs::set_permissions(machine.path("secret"), Permissions::from_mode(0o600))?;
    symlink(machine.path("secret"), machine.path("home/svc/home/projects/link"))?;
    // Read-only directories, like those of Go's module cache.
    for path in ["go", "go/pkg"] {
        write_owned_file(&machine, &format!("{path}/file"), "read-only", OWNER_ID, OWNER_ID)?;
    }
    for path in ["home/svc/home/go/pkg", "home/svc/home/go"] {
        fs::set_permissions(machine.path(path), Permissions::from_mode(0o555))?;
    }

    fs::create_dir(machine.path("backups"))?;
    let archive = machine.path("backups/ada.tar");
    let export = |to: &Path| machine.run(&["svc-db-backup", "export", "--output", path_str(to)?]);
    let result = export(&archive)?.expect(0);
    assert!(result.stderr.contains("left out: roots: "), "{}", result.stderr);
    let meta = fs::metadata(&archive)?;
    assert_eq!((meta.uid(), meta.mode() & 0o777), (0, 0o600));
    assert!(!fs::read(&archive)?.windows(6).any(|part| part == b"S3CRET"));
    // Root creates no file where the owner could place a link.
    let result = export(&machine.path("home/svc/home/projects/ada.tar"))?.expect(65);
    assert!(result.stderr.contains("can be changed by users other than root"), "{}", result.stderr);
    assert!(!machine.path("home/svc/home/projects/ada.tar.partial").exists());
    // The owner can enter the home directory, but cannot list it.
    let home = machine.path("home/svc/home");
    fs::set_permissions(&home, Permissions::from_mode(0o1710))?;
    let result = export(&machine.path("backups/unlisted.tar"))?.expect(70);
    assert!(result.stderr.contains("Permission denied"), "{}", result.stderr);
    assert!(!machine.path("backups/unlisted.tar").exists());

    let Some(new_machine) = machine_with_two_users(&store, 2).await? else { return Ok(()) };
    // A link is planted where the import would create a directory.
    let trap = new_machine.path("trap");
    fs::create_dir(&trap)?;
    let planted = new_machine.path("home/svc/home/projects");
    symlink(&trap, &planted)?;
    let refused = new_machine.run(&["svc-restore", "import", path_str(&archive)?])?.expect(70);
    assert!(refused.stderr.contains("move it away first"), "{}", refused.stderr);
    let error = new_machine
        .client()
        .await?
        .query("SELECT FROM public.t", &[])
        .await
        .expect_err("the table must be absent");
    assert_eq!(error.code(), Some(&SqlState::UNDEFINED_TABLE), "{error}");
    for entry in fs::read_dir(new_machine.path("home/svc/home"))? {
        let name = entry?.file_name();
        assert!(
            !name.to_string_lossy().starts_with(".import-"),
            "the staged files must be removed: {name:?}"
        );
    }
    lchown(&planted, Some(OWNER_ID), Some(OWNER_ID))?;
    write_owned_file(&new_machine, "system/logs/activity.log", "another record", GATEWAY_ID, OWNER_ID)?;
    new_machine.run(&["svc-restore", "import", path_str(&archive)?])?.expect(0);
    // A second import moves the read-only directories aside.
    new_machine.run(&["svc-restore", "import", path_str(&archive)?, "--no-backup"])?.expect(0);
    let owner_of = |path: &str| -> Result<(u32, u32)> {
        let meta = fs::symlink_metadata(new_machine.path("home/svc/home").join(path))?;
        Ok((meta.uid(), meta.gid()))
    };
    assert_eq!(owner_of("projects/file")?, (OWNER_ID, OWNER_ID));
    for path in ["home/svc/home/go/pkg", "home/svc/home/go"] {
        assert_eq!(fs::metadata(new_machine.path(path))?.mode() & 0o777, 0o555, "{path}");
    }
    assert_eq!(owner_of("system/logs/activity.log")?, (GATEWAY_ID, OWNER_ID));
    assert_eq!(fs::read_to_string(new_machine.path("home/svc/home/projects/file"))?, "mine");
    assert_eq!(fs::read_dir(&trap)?.count(), 0, "no file may be written through the link");
    assert_eq!(fs::metadata(new_machine.path("var/lib/svc/restore-complete"))?.uid(), GATEWAY_ID);
    assert_eq!(fs::metadata(new_machine.path("var/lib/svc/requests/backup"))?.uid(), GATEWAY_ID);
    let rows: i64 = new_machine.client().await?.query_one("SELECT count(*) FROM public.t", &[]).await?.get(0);
    assert_eq!(rows, 1);
    Ok(())
}

/// Opening a FIFO like a regular file would block forever.
#[tokio::test]
async fn fifo_is_refused_as_archive() -> Result<()> {
    let store = machine::start_store()?;
    let Some(machine) = machine_with_two_users(&store, 1).await? else { return Ok(()) };
    let fifo = machine.path("home/svc/home/apps/ada.tar");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU)?;
    let result = machine.run(&["svc-restore", "import", path_str(&fifo)?])?.expect(65);
    assert!(result.stderr.contains("not a regular file"), "{}", result.stderr);
    Ok(())
}
