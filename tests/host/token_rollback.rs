//! Combines the rollback of an update with a host token rotation, using a real platform, agent and updater. The host
//! can always reach the platform, even if the previous release does not support rotation.

use std::fs;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use reqwest::Method;
use serde_json::{Value, json};

use super::machine::{self, Machine};
use super::update_fixture::{NEW_VERSION, OLD_VERSION, PublishedRelease, UpdateFixture, signing_key};
use crate::platform::stack::{BUCKET, Process, Stack, UserDataSettings};

const TOKEN_FILE: &str = "var/lib/svc/upgrade-token.json";
const OVERLAP: [(&str, &str); 1] = [("UPGRADE_TOKEN_OVERLAP_SECONDS", "1")];

/// A machine, and a real platform that has published a release that does not start.
struct Fixture {
    platform: Stack,
    process: Process,
    host_settings: UserDataSettings,
    host: UpdateFixture,
}

impl Fixture {
    async fn setup() -> Result<Self> {
        let platform = Stack::start().await;
        let process = platform.start_platform_with(&OVERLAP);
        let host_settings = platform.start_machine(&process, "user_1").await;
        let store = machine::start_store()?;
        let host = UpdateFixture::for_machine(Machine::in_use(&store, 1).await?).await?;
        store.take_down();
        let env = [
            ("SVC_MACHINE_ID", host_settings.machine.as_str()),
            ("SVC_USER_ID", "user_1"),
            ("UPGRADE_TOKEN", &host_settings.upgrade_token),
            ("PLATFORM_INTERNAL_URL", &process.base),
        ];
        host.machine.set_env_vars("host.env", &env)?;
        host.machine.set_env_vars("update.env", &env[3..])?;
        publish(&platform, &PublishedRelease::new(NEW_VERSION, &[("app/broken", "")])?)?;
        Ok(Self { platform, process, host_settings, host })
    }

    async fn request_rotation(&self) {
        let path = format!("/vps/{}/rotate-token", self.host_settings.machine);
        let response = self.platform.post(&self.process, &path, &json!({})).await;
        assert_eq!(response.status, 200, "{response:?}");
    }

    async fn fetch_record(&self) -> Value {
        self.platform.get(&self.process, &format!("/vps/{}", self.host_settings.machine)).await.body
    }

    /// Runs the real agent until the platform's record of the machine satisfies the condition.
    async fn run_agent_until(&self, event: &str, condition: impl Fn(&Value) -> bool) -> Result<()> {
        let agent = self.host.machine.spawn(&["svc-sync-agent"], &[("HEARTBEAT_SECONDS", "1")])?;
        let check = || async { condition(&self.fetch_record().await).then_some(()) };
        self.platform.eventually(event, check).await;
        agent.signal(Signal::SIGTERM)?;
        tokio::task::spawn_blocking(move || agent.wait()).await??.expect(0);
        Ok(())
    }

    async fn send_heartbeat(&self) -> Result<()> {
        let before = self.fetch_record().await["heartbeatAt"].clone();
        self.run_agent_until("a heartbeat is accepted", |record| record["heartbeatAt"] != before).await
    }

    /// Waits until the platform rejects the token from user-data.
    async fn wait_until_first_token_is_refused(&self) {
        let path = format!("/vps/{}/storage-credentials", self.host_settings.machine);
        let check = || async {
            let call = self.platform.request(&self.process, Method::POST, &path);
            let response = self.platform.send(call.bearer_auth(&self.host_settings.upgrade_token)).await;
            (response.status == 401).then_some(())
        };
        self.platform.eventually("the first token is refused", check).await;
    }

    fn read_host_env_token(&self) -> Result<String> {
        let text = fs::read_to_string(self.host.machine.path("opt/svc/env/host.env"))?;
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("UPGRADE_TOKEN="))
            .context("no token in host.env")?;
        Ok(line.trim_matches('"').to_owned())
    }
}

fn publish(platform: &Stack, published: &PublishedRelease) -> Result<()> {
    let put = |suffix: &str, content: Vec<u8>| {
        let key = format!("system-bundles/{NEW_VERSION}/svc-host-bundle.tar.gz{suffix}");
        platform.store.write(BUCKET, &key, content);
    };
    let manifest = published.manifest.render()?;
    put("", published.archive.clone());
    put(".json.sig", signing_key()?.signature_line(manifest.as_bytes()).into_bytes());
    put(".json", manifest.into_bytes());
    put(".sha256", format!("{}  svc-host-bundle.tar.gz\n", published.manifest.sha256).into_bytes());
    Ok(())
}

fn generation(record: &Value) -> u64 {
    record["upgradeToken"]["generation"].as_u64().unwrap_or_default()
}

fn is_rolled_back(record: &Value) -> bool {
    record["lastUpdate"]["outcome"] == "rolled_back" && record["lastUpdate"]["version"] == NEW_VERSION
}

#[tokio::test(flavor = "multi_thread")]
async fn host_reaches_the_platform_after_rotation_and_rollback() -> Result<()> {
    let fixture = Fixture::setup().await?;
    fixture.request_rotation().await;
    fixture.run_agent_until("the token rotates", |record| generation(record) == 2).await?;
    fixture.wait_until_first_token_is_refused().await;
    assert_eq!(
        fixture.read_host_env_token()?,
        fixture.host_settings.upgrade_token,
        "the agent must not have changed host.env"
    );
    // The manifest and the archive are downloaded with the second token; the first is already refused.
    fixture.host.apply(NEW_VERSION).await?.expect(65);
    fixture.host.assert_running(OLD_VERSION)?;
    assert_eq!(fixture.host.last_update()?["outcome"], "rolled_back");
    // A previous release may know only the token in host.env, so the updater has written the new token there.
    assert_ne!(fixture.read_host_env_token()?, fixture.host_settings.upgrade_token);
    fs::remove_file(fixture.host.machine.path(TOKEN_FILE))?;
    fixture.run_agent_until("the rollback is reported", is_rolled_back).await
}

#[tokio::test(flavor = "multi_thread")]
async fn rotation_requested_during_an_update_follows_its_rollback() -> Result<()> {
    let fixture = Fixture::setup().await?;
    let kill = "update.restarted=return(kill)";
    fixture.host.run(&["apply", "--version", NEW_VERSION], Some(kill)).await?.expect_killed();
    fixture.request_rotation().await;
    fixture.send_heartbeat().await?;
    assert!(!fixture.host.machine.path(TOKEN_FILE).exists(), "a token was adopted during an update");
    assert_eq!(generation(&fixture.fetch_record().await), 1);
    fixture.host.run(&["resume"], None).await?;
    fixture.host.assert_running(OLD_VERSION)?;
    fixture.run_agent_until("the rollback is reported", is_rolled_back).await?;
    fixture.run_agent_until("the token rotates", |record| generation(record) == 2).await?;
    fixture.wait_until_first_token_is_refused().await;
    fixture.send_heartbeat().await
}
