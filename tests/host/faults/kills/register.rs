//! When registrations are killed at any point, the platform accepts one body per machine, and never receives a
//! different one.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use http::StatusCode;
use kit::long_tests::Figures;
use serde_json::{Value, json};
use svc::machine::id::MachineId;

use super::super::super::bundle;
use super::super::super::machine::{Machine, RunningApplet};
use super::super::super::platform::start_gateway;
use super::{Killer, MIN_KILLS_LONG_RUN, MIN_KILLS_SHORT_RUN};

/// The state of a fake platform, which accepts one body per machine, and repeats its response if that body is resent.
#[derive(Default)]
struct Registrations {
    /// By machine id.
    accepted: BTreeMap<String, Registration>,
    refused: u64,
}

struct Registration {
    body: String,
    responses: u64,
}

type SharedRegistrations = Arc<Mutex<Registrations>>;

async fn respond(State(registrations): State<SharedRegistrations>, body: String) -> Response {
    let mut state = registrations.lock().unwrap_or_else(PoisonError::into_inner);
    let parsed = serde_json::from_str::<Value>(&body).ok();
    let machine_id =
        parsed.and_then(|body| Some(body.get("machineId")?.as_str()?.to_owned())).unwrap_or_default();
    let entry =
        state.accepted.entry(machine_id).or_insert_with(|| Registration { body: body.clone(), responses: 0 });
    if entry.body != body {
        state.refused += 1;
        let problem = json!({"code": "registration_rejected", "detail": "The token has already been used."});
        return (StatusCode::UNAUTHORIZED, Json(problem)).into_response();
    }
    entry.responses += 1;
    Json(json!({"status": "running", "epoch": 1})).into_response()
}

struct Campaign {
    machine: Machine,
    registrations: SharedRegistrations,
    listen: String,
    killer: Killer,
}

impl Campaign {
    async fn new(seed: u64) -> Result<Self> {
        let machine = Machine::bare(1)?;
        machine.set_current_release("1.0.0", &bundle::digest(b"a release"))?;
        let registrations = SharedRegistrations::default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let base = format!("http://{}", listener.local_addr()?);
        let app = Router::new().route("/vps/register", post(respond)).with_state(Arc::clone(&registrations));
        tokio::spawn(async move { axum::serve(listener, app).await });
        machine.set_env_vars("host.env", &[("PLATFORM_INTERNAL_URL", &base)])?;
        let listen: SocketAddr = start_gateway(&machine).await?;
        Ok(Self {
            machine,
            registrations,
            listen: listen.to_string(),
            killer: Killer::new("registrations", seed),
        })
    }

    fn spawn(&self) -> Result<RunningApplet> {
        self.machine.spawn(&["svc-register"], &[("GATEWAY_LISTEN", &self.listen)])
    }

    async fn complete_run(&mut self) -> Result<()> {
        let (machine, listen) = (&self.machine, self.listen.as_str());
        self.killer
            .complete_run(|| machine.spawn(&["svc-register"], &[("GATEWAY_LISTEN", listen)]))
            .await
            .map(|_| ())
    }

    fn responses(&self, id: &str) -> u64 {
        let registrations = self.registrations.lock().unwrap_or_else(PoisonError::into_inner);
        registrations.accepted.get(id).map_or(0, |entry| entry.responses)
    }

    /// Checks that the record is complete and claims no registration that did not happen, and that the machine sent no
    /// second, different body.
    fn check_state(&self, id: &str) -> Result<()> {
        let path = self.machine.path("var/lib/svc/register.json");
        let Some(text) = svc::fsx::read_if_exists(&path)? else { return Ok(()) };
        let record: Value = serde_json::from_slice(&text).context("the record is incomplete")?;
        let registrations = self.registrations.lock().unwrap_or_else(PoisonError::into_inner);
        ensure!(registrations.refused == 0, "a machine sent a second, different body");
        if record["machineId"] == id && !record["registeredAt"].is_null() {
            let entry = registrations
                .accepted
                .get(id)
                .with_context(|| format!("the platform never accepted a registration of {id}"))?;
            ensure!(record["sent"] == *entry.body, "{record} differs from the accepted body");
        }
        Ok(())
    }

    /// Registers a new machine, with kills, on the disk of the previous machine.
    async fn run_round(&mut self) -> Result<()> {
        let id = MachineId::new().to_string();
        self.machine.set_env_vars("host.env", &[("SVC_MACHINE_ID", &id)])?;
        for _ in 0..self.killer.next_kill_count() {
            self.killer.kill_run(self.spawn()?).await?;
            self.check_state(&id)?;
        }
        self.complete_registration(&id).await
    }

    async fn complete_registration(&mut self, id: &str) -> Result<()> {
        let running = self.spawn()?;
        let result = tokio::task::spawn_blocking(move || running.wait()).await??.expect(0);
        self.check_state(id)?;
        let responses = self.responses(id);
        ensure!(responses > 0, "not registered:\n{}", result.stderr);
        let second_run = self.spawn()?;
        tokio::task::spawn_blocking(move || second_run.wait()).await??.expect(0);
        ensure!(self.responses(id) == responses, "a registered machine registered again");
        Ok(())
    }
}

async fn run_campaign(kills: u64, seed: u64) -> Result<()> {
    let mut campaign = Campaign::new(seed).await?;
    let result = async {
        let first = campaign.machine.id.to_string();
        campaign.complete_run().await?;
        campaign.complete_registration(&first).await?;
        while campaign.killer.kills < kills {
            campaign.run_round().await.with_context(|| format!("after {} kills", campaign.killer.kills))?;
        }
        anyhow::Ok(())
    };
    let result = result.await;
    Figures { kills_survived: campaign.killer.kills, ..Figures::new("killed registrations") }.record()?;
    result
}

#[tokio::test(flavor = "multi_thread")]
async fn registrations_survive_random_kills() -> Result<()> {
    run_campaign(MIN_KILLS_SHORT_RUN, 1).await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "long: 200 kills"]
async fn registrations_survive_200_kills() -> Result<()> {
    run_campaign(MIN_KILLS_LONG_RUN, Killer::new_seed()).await
}

/// Tests [`Campaign::check_state`] itself.
#[tokio::test(flavor = "multi_thread")]
async fn false_registration_state_is_detected() -> Result<()> {
    let campaign = Campaign::new(1).await?;
    let id = campaign.machine.id.to_string();
    campaign.check_state(&id)?;
    let path = campaign.machine.path("var/lib/svc/register.json");
    let write = |text: &str| svc::fsx::write_atomic(&path, text.as_bytes(), 0o600);
    write("{\"version\":1,")?;
    assert!(campaign.check_state(&id).is_err(), "an incomplete record was not detected");
    write(&json!({"machineId": id, "sent": "{}", "registeredAt": null}).to_string())?;
    campaign.check_state(&id)?;
    write(&json!({"machineId": id, "sent": "{}", "registeredAt": "now"}).to_string())?;
    assert!(
        campaign.check_state(&id).is_err(),
        "a record of a registration that was never accepted was not detected"
    );
    let with_accepted_body = || Registrations {
        accepted: BTreeMap::from([(id.clone(), Registration { body: "{}".to_owned(), responses: 1 })]),
        refused: 0,
    };
    *campaign.registrations.lock().unwrap() = with_accepted_body();
    campaign.check_state(&id)?;
    write(&json!({"machineId": id, "sent": "{\"other\":1}", "registeredAt": "now"}).to_string())?;
    assert!(
        campaign.check_state(&id).is_err(),
        "a record that differs from the accepted body was not detected"
    );
    *campaign.registrations.lock().unwrap() = Registrations { refused: 1, ..with_accepted_body() };
    write(&json!({"machineId": id, "sent": "{}", "registeredAt": "now"}).to_string())?;
    assert!(campaign.check_state(&id).is_err(), "a refused second body was not detected");
    Ok(())
}
