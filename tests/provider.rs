//! The provider adapter against the simulator: what each call does, and what each failure is taken for.

use std::collections::BTreeMap;
use std::error::Error;
use std::time::{Duration, Instant};

use kit::provider::{Fault, FaultRule, Power, RateLimit, Simulator, SimulatorOptions};
use secrecy::SecretString;
use svc::http::client::{self, Deadlines};
use svc::machine::name::ServerType;
use svc::provider::hetzner::{Hetzner, Limits};
use svc::provider::{
    Action, ActionStatus, Deleted, ErrorKind, Provider, Server, ServerId, ServerOrder, ServerStatus,
};

/// The contract's order of things, but a hundred times faster.
const FAST: Limits = Limits {
    deadline: Duration::from_secs(2),
    first_backoff: Duration::from_millis(5),
    longest_backoff: Duration::from_millis(50),
    longest_rate_wait: Duration::from_millis(1500),
    retries: 4,
};

async fn simulator() -> Simulator {
    Simulator::start(SimulatorOptions::record()).await.unwrap()
}

fn adapter_with(simulator: &Simulator, token: &str, limits: Limits) -> Hetzner {
    // Installed once per process; every further test finds it there.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = client::build(Deadlines::CALL).unwrap();
    Hetzner::with_limits(client, simulator.base_url().parse().unwrap(), &SecretString::from(token), limits)
        .unwrap()
}

fn adapter(simulator: &Simulator) -> Hetzner {
    adapter_with(simulator, simulator.token(), FAST)
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

async fn settled(provider: &Hetzner, action: Action) -> ActionStatus {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        let now = provider.action(action.id).await.unwrap();
        assert_eq!(now.command, action.command);
        if now.status != ActionStatus::Running {
            return now.status;
        }
        assert!(Instant::now() < end, "{action:?} does not end");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn running(simulator: &Simulator, provider: &Hetzner, name: &str) -> Server {
    let server = provider.create(&order(name)).await.unwrap();
    simulator.wait_for_power(name, Power::Running).await.unwrap();
    server
}

async fn power_off(provider: &Hetzner, id: ServerId) {
    assert_eq!(settled(provider, provider.power_off(id).await.unwrap()).await, ActionStatus::Success);
}

#[tokio::test]
async fn a_server_is_made_found_and_deleted() {
    let simulator = simulator().await;
    let provider = adapter(&simulator);

    let made = provider.create(&order("svc-1")).await.unwrap();
    assert_eq!((made.status, made.disk_gb), (ServerStatus::Initializing, 80));
    assert!(made.public_ipv4.is_some_and(|ip| ip.is_loopback()));
    assert_eq!(made.labels["epoch"], "1");
    let there = simulator.wait_for_power("svc-1", Power::Running).await.unwrap();
    assert_eq!(there.user_data, "#cloud-config\n{}");
    assert_eq!((there.image.as_str(), there.location.as_str()), ("debian-12", "nbg1"));

    let found = provider.find("svc-1").await.unwrap().unwrap();
    assert_eq!((found.id, found.status), (made.id, ServerStatus::Running));
    assert_eq!(provider.get(made.id).await.unwrap(), Some(found));
    assert_eq!(provider.find("svc-2").await.unwrap(), None);

    assert_eq!(provider.delete(made.id).await.unwrap(), Deleted::Done);
    assert_eq!(provider.delete(made.id).await.unwrap(), Deleted::WasAbsent);
    assert_eq!(provider.get(made.id).await.unwrap(), None);
    assert!(simulator.servers().is_empty());
}

#[tokio::test]
async fn all_pages_of_a_selection_are_read() {
    let simulator = simulator().await;
    let provider = adapter(&simulator);
    for nth in 0..103 {
        let mut order = order(&format!("svc-{nth}"));
        order.labels.insert("slot".to_owned(), if nth % 103 == 0 { "b" } else { "a" }.to_owned());
        provider.create(&order).await.unwrap();
    }
    let found = provider.find_by_label("slot=a,epoch").await.unwrap();
    assert_eq!(found.len(), 102);
    assert_eq!(simulator.call_count("GET", "label_selector"), 3);
    assert_eq!(provider.find_by_label("slot=c").await.unwrap(), []);
}

#[tokio::test]
async fn a_name_that_is_taken_is_a_conflict_and_a_bad_order_is_refused() {
    let simulator = simulator().await;
    let provider = adapter(&simulator);
    provider.create(&order("svc-1")).await.unwrap();
    let kind = async |order: ServerOrder| provider.create(&order).await.unwrap_err().kind();

    assert_eq!(kind(order("svc-1")).await, ErrorKind::Conflict);
    assert_eq!(
        kind(ServerOrder { server_type: server_type("cpx999"), ..order("b") }).await,
        ErrorKind::Refused
    );
    let large = SecretString::from("x".repeat(32 * 1024 + 1));
    assert_eq!(kind(ServerOrder { user_data: large, ..order("c") }).await, ErrorKind::Refused);
    let labels = BTreeMap::from([("slot".to_owned(), "not a label".to_owned())]);
    assert_eq!(kind(ServerOrder { labels, ..order("d") }).await, ErrorKind::Refused);
    assert_eq!(simulator.creations().len(), 1);
}

#[tokio::test]
async fn a_quota_is_a_refusal() {
    let simulator =
        Simulator::start(SimulatorOptions { server_limit: 0, ..SimulatorOptions::record() }).await.unwrap();
    let error = adapter(&simulator).create(&order("svc-1")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert_eq!(simulator.call_count("POST", "/servers"), 1);
}

/// Everything after which a server may exist must say so, and must not have been asked for twice.
#[tokio::test]
async fn a_create_without_a_clear_answer_is_ambiguous_and_never_repeated() {
    let unclear = [
        (Fault::LostReplyAfterCommit, 1),
        (Fault::LostRequest, 0),
        (Fault::SlowReply { ms: 5000 }, 1),
        (Fault::Timeout, 0),
        (Fault::Status { status: 500, code: "server_error".into(), reset_in_seconds: None }, 0),
        (Fault::Status { status: 502, code: "bad_gateway".into(), reset_in_seconds: None }, 0),
        (Fault::Status { status: 503, code: "unavailable".into(), reset_in_seconds: None }, 0),
        (Fault::Status { status: 504, code: "timeout".into(), reset_in_seconds: None }, 0),
    ];
    for (fault, made) in unclear {
        let simulator = simulator().await;
        let limits = Limits { deadline: Duration::from_millis(400), ..FAST };
        let provider = adapter_with(&simulator, simulator.token(), limits);
        simulator.fault(FaultRule::once("POST", "/servers", fault.clone()));
        let error = provider.create(&order("svc-1")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Ambiguous, "{fault:?}");
        assert_eq!(simulator.call_count("POST", "/servers"), 1, "{fault:?}");
        assert_eq!(simulator.creations().len(), made, "{fault:?}");
        assert_eq!(provider.find("svc-1").await.unwrap().is_some(), made == 1, "{fault:?}");
    }
}

#[tokio::test]
async fn an_answer_that_nothing_was_done_is_worth_another_try() {
    for (status, code) in [(429, "rate_limit_exceeded"), (409, "conflict"), (423, "locked")] {
        let simulator = simulator().await;
        let fault = Fault::Status { status, code: code.to_owned(), reset_in_seconds: None };
        simulator.fault(FaultRule::times(2, "POST", "/servers", fault));
        adapter(&simulator).create(&order("svc-1")).await.unwrap();
        assert_eq!(simulator.call_count("POST", "/servers"), 3, "{code}");
    }
}

#[tokio::test]
async fn reads_are_repeated_within_bounds() {
    let simulator = simulator().await;
    let provider = adapter(&simulator);
    let gateway = |times| {
        let fault = Fault::Status { status: 502, code: "bad_gateway".to_owned(), reset_in_seconds: None };
        FaultRule::times(times, "GET", "/servers", fault)
    };
    simulator.fault(gateway(3));
    assert_eq!(provider.find("svc-1").await.unwrap(), None);
    assert_eq!(simulator.call_count("GET", "/servers"), 4);

    simulator.fault(gateway(100));
    assert_eq!(provider.find("svc-1").await.unwrap_err().kind(), ErrorKind::Transient);
    assert_eq!(simulator.call_count("GET", "/servers"), 4 + 1 + FAST.retries);
}

#[tokio::test]
async fn a_refused_rate_waits_for_the_reset_and_all_clones_wait_with_it() {
    let simulator = simulator().await;
    let provider = adapter(&simulator);
    let fault =
        Fault::Status { status: 429, code: "rate_limit_exceeded".to_owned(), reset_in_seconds: Some(3600) };
    simulator.fault(FaultRule::once("GET", "/servers", fault));
    let start = Instant::now();
    let clone = provider.clone();
    let other = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        clone.server_type(&server_type("cpx22")).await.unwrap();
        start.elapsed()
    };
    let (found, other) = tokio::join!(provider.find("svc-1"), other);
    found.unwrap();
    let bound = FAST.longest_rate_wait;
    assert!(start.elapsed() >= bound && start.elapsed() < bound * 4, "{:?}", start.elapsed());
    assert!(other >= bound, "the clone called while nothing was left: {other:?}");
}

#[tokio::test]
async fn a_spent_budget_is_not_overdrawn() {
    let rate_limit = RateLimit { limit: 4, per_second: 8.0 };
    let simulator =
        Simulator::start(SimulatorOptions { rate_limit, ..SimulatorOptions::record() }).await.unwrap();
    let provider = adapter(&simulator);
    for _ in 0..10 {
        provider.find("svc-1").await.unwrap();
    }
    assert_eq!(simulator.calls().len(), 10, "a call was refused and repeated: {:?}", simulator.calls());
}

#[tokio::test]
async fn a_silent_provider_costs_one_deadline() {
    let simulator = simulator().await;
    let limits = Limits { deadline: Duration::from_millis(300), ..FAST };
    let provider = adapter_with(&simulator, simulator.token(), limits);
    simulator.fault(FaultRule::once("GET", "/servers", Fault::Timeout));
    let start = Instant::now();
    let error = provider.get(ServerId(1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Transient);
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}

#[tokio::test]
async fn a_provider_that_is_not_there_is_transient_even_for_a_create() {
    let simulator = simulator().await;
    let provider = adapter(&simulator);
    drop(simulator);
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(provider.create(&order("svc-1")).await.unwrap_err().kind(), ErrorKind::Transient);
}

#[tokio::test]
async fn the_log_gets_the_providers_words_the_caller_and_the_token_do_not() {
    let simulator = simulator().await;
    let provider = adapter_with(&simulator, "a-token-that-is-wrong", FAST);
    let error = provider.find("svc-1").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert!(!error.to_string().contains("authenticate"), "{error}");
    assert!(error.source().unwrap().to_string().contains("unable to authenticate"));
    let all = format!("{error:?} {:?}", error.source());
    assert!(!all.contains("a-token-that-is-wrong"), "{all}");
}

#[tokio::test]
async fn a_resize_keeps_the_disk_and_needs_a_server_that_is_off() {
    let simulator = simulator().await;
    let provider = adapter(&simulator);
    let id = running(&simulator, &provider, "svc-1").await.id;
    let to = server_type("cpx32");

    assert_eq!(provider.change_type(id, &to).await.unwrap_err().kind(), ErrorKind::Refused);
    let shutdown = provider.shutdown(id).await.unwrap();
    assert_eq!(settled(&provider, shutdown).await, ActionStatus::Success);
    simulator.wait_for_power("svc-1", Power::Off).await.unwrap();
    power_off(&provider, id).await;

    assert_eq!(settled(&provider, provider.change_type(id, &to).await.unwrap()).await, ActionStatus::Success);
    let changed = provider.get(id).await.unwrap().unwrap();
    assert_eq!((changed.server_type, changed.disk_gb, changed.status), (to, 80, ServerStatus::Off));

    let smaller = provider.change_type(id, &server_type("cpx12")).await.unwrap_err();
    assert_eq!(smaller.kind(), ErrorKind::Refused);
    let back = provider.change_type(id, &server_type("cpx22")).await.unwrap();
    assert_eq!(settled(&provider, back).await, ActionStatus::Success, "the disk has not grown");

    assert_eq!(settled(&provider, provider.power_on(id).await.unwrap()).await, ActionStatus::Success);
    assert_eq!(provider.get(id).await.unwrap().unwrap().status, ServerStatus::Running);
}

#[tokio::test]
async fn a_change_of_type_without_a_clear_answer_is_ambiguous() {
    let simulator = simulator().await;
    let provider = adapter(&simulator);
    let id = running(&simulator, &provider, "svc-1").await.id;
    power_off(&provider, id).await;
    simulator.fault(FaultRule::once("POST", "change_type", Fault::LostReplyAfterCommit));
    let error = provider.change_type(id, &server_type("cpx32")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Ambiguous);
    assert_eq!(simulator.call_count("POST", "change_type"), 1);
}

#[tokio::test]
async fn an_action_that_fails_says_so_and_has_no_effect() {
    let simulator = simulator().await;
    let provider = adapter(&simulator);
    let id = running(&simulator, &provider, "svc-1").await.id;
    simulator.fault(FaultRule::once("POST", "poweroff", Fault::ActionError));
    let action = provider.power_off(id).await.unwrap();
    assert!(matches!(settled(&provider, action).await, ActionStatus::Error { .. }));
    assert_eq!(provider.get(id).await.unwrap().unwrap().status, ServerStatus::Running);
}

#[tokio::test]
async fn what_is_gone_is_not_found() {
    let simulator = simulator().await;
    let provider = adapter(&simulator);
    let id = running(&simulator, &provider, "svc-1").await.id;
    simulator.vanish_server("svc-1").await.unwrap();
    assert_eq!(provider.get(id).await.unwrap(), None);
    assert_eq!(provider.power_on(id).await.unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(provider.action(svc::provider::ActionId(1)).await.unwrap_err().kind(), ErrorKind::NotFound);
    let creation = &simulator.creations()[0];
    assert!(creation.ended.is_some());
}

#[tokio::test]
async fn server_types_are_known_by_name() {
    let simulator = simulator().await;
    let provider = adapter(&simulator);
    let found = provider.server_type(&server_type("cpx52")).await.unwrap().unwrap();
    assert_eq!((found.cores, found.memory_gb, found.disk_gb), (12, 24.0, 480));
    assert_eq!(provider.server_type(&server_type("cpx999")).await.unwrap(), None);
}
