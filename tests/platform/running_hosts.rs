//! Running hosts: their data survives a resize, and is restored from the snapshot after a delete.

use std::path::Path;

use anyhow::{Context, Result};
use kit::bundle;
use kit::fetch::target_dir;
use kit::idp::{Idp, MintOptions};
use kit::pg::PgBinaries;
use kit::provider::{HostSettings, SimulatorOptions};
use serde_json::{Value, json};
use tokio_postgres::NoTls;

use super::resize::resize;
use super::stack::{BUCKET, Process, Stack, provision_body};

const VERSION: &str = "lives-1";

struct Lives {
    stack: Stack,
    idp: Idp,
    process: Process,
}

impl Lives {
    async fn start() -> Result<Self> {
        let pg = tokio::task::spawn_blocking(|| PgBinaries::locate_or_fetch(&target_dir())).await??;
        let svc = Path::new(env!("CARGO_BIN_EXE_svc"));
        let stack = Stack::start_on(|dir| {
            let mut hosts = HostSettings::new(svc.to_owned(), pg, dir.join("h"));
            hosts.extra_env.push(("HEARTBEAT_SECONDS".to_owned(), "1".to_owned()));
            SimulatorOptions::process(hosts)
        })
        .await;
        let out = tempfile::tempdir()?;
        let built = bundle::build_minimal(svc, VERSION, out.path())?;
        let key = format!("system-bundles/{VERSION}/{}", bundle::ARCHIVE);
        stack.store.write(BUCKET, &key, std::fs::read(built.dir.join(bundle::ARCHIVE))?);
        let digest = format!("{}  {}\n", built.sha256, bundle::ARCHIVE);
        stack.store.write(BUCKET, &format!("{key}.sha256"), digest);
        let address = format!("127.0.0.1:{}", kit::net::free_port()?);
        let idp = Idp::start()?;
        let mut settings = idp.env();
        for (name, value) in [
            ("PLATFORM_LISTEN", &*address),
            ("PLATFORM_PUBLIC_URL", &format!("http://{address}")),
            ("CUSTOMER_VPS_IMAGE_VERSION", VERSION),
            ("RESIZE_SHUTDOWN_SECONDS", "20"),
            ("RESIZE_HEALTH_SECONDS", "60"),
            ("LAST_BACKUP_DEADLINE_SECONDS", "20"),
        ] {
            settings.push((name.to_owned(), value.to_owned()));
        }
        let settings: Vec<(&str, &str)> = settings.iter().map(|(name, value)| (&**name, &**value)).collect();
        let process = stack.start_platform_with(&settings);
        Ok(Self { stack, idp, process })
    }

    async fn record(&self, machine: &str) -> Value {
        self.stack.get(&self.process, &format!("/vps/{machine}")).await.body
    }

    /// A machine of `user_1` whose host has booted and registered.
    async fn provision(&self) -> Result<String> {
        self.stack.subscribe(&self.process, "user_1").await;
        let provisioned = self.stack.post(&self.process, "/vps/provision", &provision_body("user_1")).await;
        let machine =
            provisioned.body["machineId"].as_str().with_context(|| format!("{provisioned:?}"))?.to_owned();
        self.until(&machine, "running", |record| record["status"] == "running").await;
        Ok(machine)
    }

    async fn until(&self, machine: &str, what: &str, is: impl Fn(&Value) -> bool) -> Value {
        let check = || async { Some(self.record(machine).await).filter(|record| is(record)) };
        self.stack.eventually(what, check).await
    }

    /// The owner's database on the machine's host.
    async fn database(&self, machine: &str) -> Result<tokio_postgres::Client> {
        let disk = self.stack.provider.disk(&format!("svc-{machine}"))?;
        let env = std::fs::read_to_string(disk.join("opt/svc/env/host.env"))?;
        let url =
            env.lines().find_map(|line| line.strip_prefix("DATABASE_URL=")).context("no DATABASE_URL")?;
        let (client, connection) = tokio_postgres::connect(url.trim_matches('"'), NoTls).await?;
        tokio::spawn(connection);
        Ok(client)
    }

    /// The owner's status through the router.
    async fn status_for_owner(&self) -> Result<u16> {
        let token = self.idp.mint("user_1", &MintOptions::default());
        let request = reqwest::Client::new().get(format!("{}/api/apps", self.process.router));
        Ok(request.header("host", "app.test").bearer_auth(token).send().await?.status().as_u16())
    }

    async fn until_owner_gets(&self, status: u16) {
        let check = || async { (self.status_for_owner().await.ok()? == status).then_some(()) };
        self.stack.eventually(&format!("the owner gets {status}"), check).await;
    }

    async fn notes(&self, machine: &str) -> Result<Vec<String>> {
        let rows = self.database(machine).await?.query("SELECT text FROM notes ORDER BY text", &[]).await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn resized_host_keeps_its_data_without_another_restore() -> Result<()> {
    let lives = Lives::start().await?;
    let machine = lives.provision().await?;
    let client = lives.database(&machine).await?;
    client.batch_execute("CREATE TABLE notes (text text); INSERT INTO notes VALUES ('mine')").await?;
    drop(client);
    let disk = lives.stack.provider.disk(&format!("svc-{machine}"))?;
    std::fs::write(disk.join("home/svc/home/letter.txt"), "dear me")?;
    let marker = std::fs::metadata(disk.join("opt/svc/restore-complete"))?.modified()?;

    lives.until_owner_gets(200).await;
    let response = resize(&lives.stack, &lives.process, &machine, "cpx32").await;
    assert_eq!(response.status, 202, "{response:?}");
    lives.until_owner_gets(503).await;
    assert_eq!(lives.record(&machine).await["status"], "resizing");
    let back = lives.until(&machine, "it runs on the new type", |record| {
        record["status"] == "running" && record["serverType"] == "cpx32"
    });
    let back = back.await;
    assert_eq!(back["operations"][0]["state"], "succeeded", "{back}");
    lives.until_owner_gets(200).await;
    assert_eq!(lives.notes(&machine).await?, ["mine"]);
    assert_eq!(std::fs::read_to_string(disk.join("home/svc/home/letter.txt"))?, "dear me");
    assert_eq!(std::fs::metadata(disk.join("opt/svc/restore-complete"))?.modified()?, marker);
    assert_eq!(lives.stack.provider.creations().len(), 1);
    let server = lives.stack.provider.servers().remove(0);
    assert_eq!((server.server_type.as_str(), server.disk_gb), ("cpx32", 80));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn next_machine_after_a_delete_has_the_backed_up_data() -> Result<()> {
    let lives = Lives::start().await?;
    let first = lives.provision().await?;
    let client = lives.database(&first).await?;
    client.batch_execute("CREATE TABLE notes (text text); INSERT INTO notes VALUES ('kept')").await?;
    let response = lives.stack.post(&lives.process, &format!("/vps/{first}/backup"), &json!({})).await;
    assert_eq!(response.status, 202, "{response:?}\n{}", lives.stack.log());
    let path = format!("/vps/{first}/backups");
    let taken = || async {
        let list = lives.stack.get(&lives.process, &path).await.body;
        (list["backups"].as_array()?.len() == 1 && list["latest"] == list["backups"][0]["key"])
            .then_some(list)
    };
    let list = lives.stack.eventually("the host makes its backup", taken).await;
    assert_eq!(
        (&list["backups"][0]["machineId"], &list["backups"][0]["latest"]),
        (&json!(first), &json!(true))
    );
    client.batch_execute("INSERT INTO notes VALUES ('written after it')").await?;
    drop(client);
    // The fleet gets the backup from the host's heartbeat.
    let reported = || async {
        let fleet = lives.stack.get(&lives.process, "/vps/fleet").await.body;
        (fleet["backups"]["never"] == 0).then_some(fleet)
    };
    lives.stack.eventually("the host reports its backup", reported).await;

    // Its final backup contains the later writes.
    let deleted = lives.stack.delete(&lives.process, &format!("/vps/{first}")).await;
    assert_eq!(deleted.status, 202, "{deleted:?}");
    lives
        .stack
        .eventually("its server is gone", || async {
            lives.stack.provider.servers().is_empty().then_some(())
        })
        .await;
    let second = lives.provision().await?;
    assert_ne!(first, second);
    let record = lives.record(&second).await;
    assert_eq!((&record["epoch"], &record["restoreMode"]), (&json!(2), &json!("required")));
    assert_eq!(lives.notes(&second).await?, ["kept", "written after it"]);
    Ok(())
}
