//! Tests the provider adapter against the simulator: the effect of each call and, in `failures`, the classification of
//! each failure. In `clients`, the provider's own clients check the simulator.

#![allow(clippy::unwrap_used)]

mod clients;
mod failures;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kit::provider::{Power, Simulator, SimulatorOptions};
use secrecy::SecretString;
use svc::http::client::{self, Timeouts};
use svc::machine::name::ServerType;
use svc::provider::hetzner::{CallLimits, Hetzner};
use svc::provider::{
    Action, ActionId, ActionStatus, DeleteOutcome, ErrorKind, Provider, Server, ServerId, ServerOrder,
    ServerStatus,
};

/// The production limits, but with a shorter timeout and shorter delays.
const FAST_LIMITS: CallLimits = CallLimits {
    timeout: Duration::from_secs(2),
    initial_backoff: Duration::from_millis(5),
    max_backoff: Duration::from_millis(50),
    max_rate_wait: Duration::from_millis(1500),
    max_retries: 4,
    retry_window: Duration::from_secs(5),
};

async fn start_simulator() -> Simulator {
    Simulator::start(SimulatorOptions::record()).await.unwrap()
}

fn adapter_with(simulator: &Simulator, token: &str, limits: CallLimits) -> Hetzner {
    // Only the first call in a process can install the crypto provider; later calls fail.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = client::build(Timeouts::CALL).unwrap();
    Hetzner::with_limits(client, simulator.base_url().parse().unwrap(), &SecretString::from(token), limits)
        .unwrap()
}

fn adapter(simulator: &Simulator) -> Hetzner {
    adapter_with(simulator, simulator.token(), FAST_LIMITS)
}

fn server_type(name: &str) -> ServerType {
    name.parse().unwrap()
}

fn order(name: &str) -> ServerOrder {
    ServerOrder {
        name: name.to_owned(),
        server_type: server_type("cpx22"),
        image: "debian-12".to_owned(),
        location: "nbg1".parse().unwrap(),
        labels: BTreeMap::from([
            ("machine".to_owned(), name.to_owned()),
            ("epoch".to_owned(), "1".to_owned()),
        ]),
        user_data: SecretString::from("#cloud-config\n{}"),
    }
}

async fn wait_for_action_status(provider: &Hetzner, action: Action) -> ActionStatus {
    let ended = wait_for_action(provider, action.id).await;
    assert_eq!(ended.command, action.command);
    ended.status
}

async fn wait_for_action(provider: &Hetzner, id: ActionId) -> Action {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let action = provider.get_action(id).await.unwrap();
        if action.status != ActionStatus::Running {
            return action;
        }
        assert!(Instant::now() < deadline, "the action did not end: {action:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Creates a server, and waits until it is running and not locked. A server is powered on shortly before its last
/// action ends; a call in between would be refused, and would use up a fault meant for an accepted call.
async fn create_running_server(simulator: &Simulator, provider: &Hetzner, name: &str) -> Server {
    let created = provider.create(&order(name)).await.unwrap();
    for id in created.actions {
        assert_eq!(wait_for_action(provider, id).await.status, ActionStatus::Success);
    }
    simulator.wait_for_power(name, Power::Running).await.unwrap();
    created.server
}

async fn power_off(provider: &Hetzner, id: ServerId) {
    assert_eq!(
        wait_for_action_status(provider, provider.power_off(id).await.unwrap()).await,
        ActionStatus::Success
    );
}

#[tokio::test]
async fn has_location_finds_locations_by_name() {
    let simulator = start_simulator().await;
    let provider = adapter(&simulator);
    assert!(provider.has_location(&"hel1".parse().unwrap()).await.unwrap());
    assert!(!provider.has_location(&"moon1".parse().unwrap()).await.unwrap());
    assert_eq!(simulator.call_count("GET", "/locations?name=moon1"), 1);
}

#[tokio::test]
async fn server_is_created_found_and_deleted() {
    let simulator = start_simulator().await;
    let provider = adapter(&simulator);

    let created = provider.create(&order("svc-1")).await.unwrap().server;
    assert_eq!((created.status, created.disk_gb), (ServerStatus::Initializing, 80));
    assert!(created.public_ipv4.is_some_and(|ip| ip.is_loopback()));
    assert_eq!(created.labels["epoch"], "1");
    let simulated = simulator.wait_for_power("svc-1", Power::Running).await.unwrap();
    assert_eq!(simulated.user_data, "#cloud-config\n{}");
    assert_eq!((simulated.image.as_str(), simulated.location.as_str()), ("debian-12", "nbg1"));

    let by_name = provider.find("svc-1").await.unwrap().unwrap();
    assert_eq!((by_name.id, by_name.status), (created.id, ServerStatus::Running));
    let mut by_id = provider.get(created.id).await.unwrap().unwrap();
    // The creation may end between the two calls, which unlocks the server.
    by_id.is_locked = by_name.is_locked;
    assert_eq!(by_id, by_name);
    assert_eq!(provider.find("svc-2").await.unwrap(), None);

    assert_eq!(provider.delete(created.id).await.unwrap(), DeleteOutcome::Done);
    assert_eq!(provider.delete(created.id).await.unwrap(), DeleteOutcome::WasAbsent);
    assert_eq!(provider.get(created.id).await.unwrap(), None);
    assert!(simulator.servers().is_empty());
}

#[tokio::test]
async fn list_by_label_reads_all_pages() {
    let simulator = start_simulator().await;
    let provider = adapter(&simulator);
    for nth in 0..103 {
        let mut order = order(&format!("svc-{nth}"));
        order.labels.insert("slot".to_owned(), if nth == 0 { "b" } else { "a" }.to_owned());
        provider.create(&order).await.unwrap();
    }
    let servers = provider.list_by_label("slot=a,epoch").await.unwrap();
    assert_eq!(servers.len(), 102);
    assert_eq!(simulator.call_count("GET", "label_selector"), 3);
    assert_eq!(provider.list_by_label("slot=c").await.unwrap(), []);
}

#[tokio::test]
async fn taken_name_is_a_conflict_and_invalid_order_is_refused() {
    let simulator = start_simulator().await;
    let provider = adapter(&simulator);
    provider.create(&order("svc-1")).await.unwrap();
    let error_kind = async |order: ServerOrder| provider.create(&order).await.unwrap_err().kind();

    assert_eq!(error_kind(order("svc-1")).await, ErrorKind::Conflict);
    assert_eq!(
        error_kind(ServerOrder { server_type: server_type("cpx999"), ..order("b") }).await,
        ErrorKind::Refused
    );
    let large = SecretString::from("x".repeat(32 * 1024 + 1));
    assert_eq!(error_kind(ServerOrder { user_data: large, ..order("c") }).await, ErrorKind::Refused);
    let labels = BTreeMap::from([("slot".to_owned(), "not a label".to_owned())]);
    assert_eq!(error_kind(ServerOrder { labels, ..order("d") }).await, ErrorKind::Refused);
    assert_eq!(simulator.creations().len(), 1);
}

#[tokio::test]
async fn change_type_requires_power_off_and_keeps_the_disk() {
    let simulator = start_simulator().await;
    let provider = adapter(&simulator);
    let id = create_running_server(&simulator, &provider, "svc-1").await.id;
    let to = server_type("cpx32");

    assert_eq!(provider.change_type(id, &to).await.unwrap_err().kind(), ErrorKind::Refused);
    let shutdown = provider.shutdown(id).await.unwrap();
    assert_eq!(wait_for_action_status(&provider, shutdown).await, ActionStatus::Success);
    simulator.wait_for_power("svc-1", Power::Off).await.unwrap();
    power_off(&provider, id).await;

    assert_eq!(
        wait_for_action_status(&provider, provider.change_type(id, &to).await.unwrap()).await,
        ActionStatus::Success
    );
    let changed = provider.get(id).await.unwrap().unwrap();
    assert_eq!((changed.server_type, changed.disk_gb, changed.status), (to, 80, ServerStatus::Off));

    let smaller = provider.change_type(id, &server_type("cpx12")).await.unwrap_err();
    assert_eq!(smaller.kind(), ErrorKind::Refused);
    let back = provider.change_type(id, &server_type("cpx22")).await.unwrap();
    assert_eq!(
        wait_for_action_status(&provider, back).await,
        ActionStatus::Success,
        "the disk must be unchanged"
    );

    assert_eq!(
        wait_for_action_status(&provider, provider.power_on(id).await.unwrap()).await,
        ActionStatus::Success
    );
    assert_eq!(provider.get(id).await.unwrap().unwrap().status, ServerStatus::Running);
}

#[tokio::test]
async fn calls_on_a_vanished_server_return_not_found() {
    let simulator = start_simulator().await;
    let provider = adapter(&simulator);
    let id = create_running_server(&simulator, &provider, "svc-1").await.id;
    simulator.lose_server("svc-1").await.unwrap();
    assert_eq!(provider.get(id).await.unwrap(), None);
    assert_eq!(provider.power_on(id).await.unwrap_err().kind(), ErrorKind::NotFound);
    let error = provider.get_action(svc::provider::ActionId(1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let creation = &simulator.creations()[0];
    assert!(creation.ended.is_some());
}

#[tokio::test]
async fn get_server_type_finds_types_by_name() {
    let simulator = start_simulator().await;
    let provider = adapter(&simulator);
    let cpx52 = provider.get_server_type(&server_type("cpx52")).await.unwrap().unwrap();
    assert_eq!((cpx52.cores, cpx52.memory_gb, cpx52.disk_gb), (12, 24.0, 480));
    assert_eq!(provider.get_server_type(&server_type("cpx999")).await.unwrap(), None);
}
