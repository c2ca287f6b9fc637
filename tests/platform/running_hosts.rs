//! Tests with running hosts: their data survives a resize, and is restored from the snapshot after a deletion.

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

const VERSION: &str = "running-hosts-1";

struct RunningHostsTest {
    stack: Stack,
    idp: Idp,
    process: Process,
}

impl RunningHostsTest {
    async fn start() -> Result<Self> {
        let pg = tokio::task::spawn_blocking(|| PgBinaries::locate_or_fetch(&target_dir())).await??;
        let svc = Path::new(env!("CARGO_BIN_EXE_svc"));
        let stack = Stack::start_with_provider(|dir| {
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

    async fn fetch_record(&self, machine: &str) -> Value {
        self.stack.get(&self.process, &format!("/vps/{machine}")).await.body
    }

    /// Provisions a machine for `user_1`, and waits until its host has booted and registered.
    async fn provision(&self) -> Result<String> {
        self.stack.subscribe(&self.process, "user_1").await;
        let provisioned = self.stack.post(&self.process, "/vps/provision", &provision_body("user_1")).await;
        let machine =
            provisioned.body["machineId"].as_str().with_context(|| format!("{provisioned:?}"))?.to_owned();
        self.wait_until(&machine, "running", |record| record["status"] == "running").await;
        Ok(machine)
    }

    async fn wait_until(&self, machine: &str, condition: &str, is_met: impl Fn(&Value) -> bool) -> Value {
        let check = || async { Some(self.fetch_record(machine).await).filter(|record| is_met(record)) };
        self.stack.eventually(condition, check).await
    }

    /// Connects to the owner's database on the machine's host.
    async fn connect_to_host_database(&self, machine: &str) -> Result<tokio_postgres::Client> {
        let disk = self.stack.provider.disk(&format!("svc-{machine}"))?;
        let env = std::fs::read_to_string(disk.join("opt/svc/env/host.env"))?;
        let url =
            env.lines().find_map(|line| line.strip_prefix("DATABASE_URL=")).context("no DATABASE_URL")?;
        let (client, connection) = tokio_postgres::connect(url.trim_matches('"'), NoTls).await?;
        tokio::spawn(connection);
        Ok(client)
    }

    /// Sends a request as the owner through the router. Returns the status.
    async fn request_as_owner(&self) -> Result<u16> {
        let token = self.idp.mint("user_1", &MintOptions::default());
        let request = reqwest::Client::new().get(format!("{}/api/apps", self.process.router));
        Ok(request.header("host", "app.test").bearer_auth(token).send().await?.status().as_u16())
    }

    async fn wait_until_owner_gets(&self, status: u16) {
        let check = || async { (self.request_as_owner().await.ok()? == status).then_some(()) };
        self.stack.eventually(&format!("the owner gets {status}"), check).await;
    }

    async fn list_notes(&self, machine: &str) -> Result<Vec<String>> {
        let rows = self
            .connect_to_host_database(machine)
            .await?
            .query("SELECT text FROM notes ORDER BY text", &[])
            .await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn resized_host_keeps_its_data_without_another_restore() -> Result<()> {
    let test = RunningHostsTest::start().await?;
    let machine = test.provision().await?;
    let client = test.connect_to_host_database(&machine).await?;
    client.batch_execute("CREATE TABLE notes (text text); INSERT INTO notes VALUES ('mine')").await?;
    drop(client);
    let disk = test.stack.provider.disk(&format!("svc-{machine}"))?;
    std::fs::write(disk.join("home/svc/home/letter.txt"), "dear me")?;
    let restored_at = std::fs::metadata(disk.join("opt/svc/restore-complete"))?.modified()?;

    test.wait_until_owner_gets(200).await;
    let response = resize(&test.stack, &test.process, &machine, "cpx32").await;
    assert_eq!(response.status, 202, "{response:?}");
    test.wait_until_owner_gets(503).await;
    assert_eq!(test.fetch_record(&machine).await["status"], "resizing");
    let resized = test.wait_until(&machine, "the machine is running on the new type", |record| {
        record["status"] == "running" && record["serverType"] == "cpx32"
    });
    let resized = resized.await;
    assert_eq!(resized["operations"][0]["state"], "succeeded", "{resized}");
    test.wait_until_owner_gets(200).await;
    assert_eq!(test.list_notes(&machine).await?, ["mine"]);
    assert_eq!(std::fs::read_to_string(disk.join("home/svc/home/letter.txt"))?, "dear me");
    assert_eq!(std::fs::metadata(disk.join("opt/svc/restore-complete"))?.modified()?, restored_at);
    assert_eq!(test.stack.provider.creations().len(), 1);
    let server = test.stack.provider.servers().remove(0);
    assert_eq!((server.server_type.as_str(), server.disk_gb), ("cpx32", 80));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn next_machine_after_a_delete_has_the_backed_up_data() -> Result<()> {
    let test = RunningHostsTest::start().await?;
    let first = test.provision().await?;
    let client = test.connect_to_host_database(&first).await?;
    client.batch_execute("CREATE TABLE notes (text text); INSERT INTO notes VALUES ('kept')").await?;
    let response = test.stack.post(&test.process, &format!("/vps/{first}/backup"), &json!({})).await;
    assert_eq!(response.status, 202, "{response:?}\n{}", test.stack.log());
    let path = format!("/vps/{first}/backups");
    let has_backup = || async {
        let list = test.stack.get(&test.process, &path).await.body;
        (list["backups"].as_array()?.len() == 1 && list["latest"] == list["backups"][0]["key"])
            .then_some(list)
    };
    let list = test.stack.eventually("the host makes its backup", has_backup).await;
    assert_eq!(
        (&list["backups"][0]["machineId"], &list["backups"][0]["latest"]),
        (&json!(first), &json!(true))
    );
    client.batch_execute("INSERT INTO notes VALUES ('written later')").await?;
    drop(client);
    // The fleet report includes the backup after the host's next heartbeat.
    let is_reported = || async {
        let fleet = test.stack.get(&test.process, "/vps/fleet").await.body;
        (fleet["backups"]["never"] == 0).then_some(fleet)
    };
    test.stack.eventually("the host reports its backup", is_reported).await;

    // The final backup contains the later writes.
    let deleted = test.stack.delete(&test.process, &format!("/vps/{first}")).await;
    assert_eq!(deleted.status, 202, "{deleted:?}");
    test.stack
        .eventually("the server is deleted", || async {
            test.stack.provider.servers().is_empty().then_some(())
        })
        .await;
    let second = test.provision().await?;
    assert_ne!(first, second);
    let record = test.fetch_record(&second).await;
    assert_eq!((&record["epoch"], &record["restoreMode"]), (&json!(2), &json!("required")));
    assert_eq!(test.list_notes(&second).await?, ["kept", "written later"]);
    Ok(())
}
