//! The classification of each provider failure, and the calls that are retried.

use std::error::Error;

use kit::provider::{Fault, FaultRule, RateLimit};

use super::*;

#[tokio::test]
async fn quota_error_is_attributed_to_the_account() {
    let simulator =
        Simulator::start(SimulatorOptions { server_limit: 0, ..SimulatorOptions::record() }).await.unwrap();
    let error = adapter(&simulator).create(&order("svc-1")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Account);
    assert_eq!(simulator.call_count("POST", "/servers"), 1);
}

#[tokio::test]
async fn create_without_clear_response_is_ambiguous_and_not_retried() {
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
    for (fault, created) in unclear {
        let simulator = start_simulator().await;
        let limits = CallLimits { timeout: Duration::from_millis(400), ..FAST_LIMITS };
        let provider = adapter_with(&simulator, simulator.token(), limits);
        simulator.add_fault(FaultRule::once("POST", "/servers", fault.clone()));
        let error = provider.create(&order("svc-1")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Ambiguous, "{fault:?}");
        assert_eq!(simulator.call_count("POST", "/servers"), 1, "{fault:?}");
        assert_eq!(simulator.creations().len(), created, "{fault:?}");
        assert_eq!(provider.find("svc-1").await.unwrap().is_some(), created == 1, "{fault:?}");
    }
}

#[tokio::test]
async fn create_is_retried_if_rejected_without_effect() {
    for (status, code) in [(429, "rate_limit_exceeded"), (409, "conflict"), (423, "locked")] {
        let simulator = start_simulator().await;
        let fault = Fault::Status { status, code: code.to_owned(), reset_in_seconds: None };
        simulator.add_fault(FaultRule::times(2, "POST", "/servers", fault));
        adapter(&simulator).create(&order("svc-1")).await.unwrap();
        assert_eq!(simulator.call_count("POST", "/servers"), 3, "{code}");
    }
}

#[tokio::test]
async fn create_is_not_retried_beyond_its_retry_window() {
    let simulator = start_simulator().await;
    let limits = CallLimits { retry_window: FAST_LIMITS.max_rate_wait / 2, ..FAST_LIMITS };
    let provider = adapter_with(&simulator, simulator.token(), limits);
    let fault =
        Fault::Status { status: 429, code: "rate_limit_exceeded".to_owned(), reset_in_seconds: Some(3600) };
    simulator.add_fault(FaultRule::once("POST", "/servers", fault));
    let error = provider.create(&order("svc-1")).await.unwrap_err();
    assert_eq!((error.kind(), error.code()), (ErrorKind::Transient, "rate_limit_exceeded"));
    assert_eq!(simulator.call_count("POST", "/servers"), 1);
}

#[tokio::test]
async fn reads_are_retried_a_bounded_number_of_times() {
    let simulator = start_simulator().await;
    let provider = adapter(&simulator);
    let bad_gateway = |times| {
        let fault = Fault::Status { status: 502, code: "bad_gateway".to_owned(), reset_in_seconds: None };
        FaultRule::times(times, "GET", "/servers", fault)
    };
    simulator.add_fault(bad_gateway(3));
    assert_eq!(provider.find("svc-1").await.unwrap(), None);
    assert_eq!(simulator.call_count("GET", "/servers"), 4);

    simulator.add_fault(bad_gateway(100));
    assert_eq!(provider.find("svc-1").await.unwrap_err().kind(), ErrorKind::Transient);
    assert_eq!(simulator.call_count("GET", "/servers"), 4 + 1 + FAST_LIMITS.max_retries);
}

#[tokio::test]
async fn rate_limited_client_and_its_clones_pause_for_max_wait() {
    let simulator = start_simulator().await;
    let provider = adapter(&simulator);
    let fault =
        Fault::Status { status: 429, code: "rate_limit_exceeded".to_owned(), reset_in_seconds: Some(3600) };
    simulator.add_fault(FaultRule::once("GET", "/servers", fault));
    let start = Instant::now();
    let clone = provider.clone();
    let clone_wait = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        clone.get_server_type(&server_type("cpx22")).await.unwrap();
        start.elapsed()
    };
    let (find_result, clone_wait) = tokio::join!(provider.find("svc-1"), clone_wait);
    find_result.unwrap();
    let max_wait = FAST_LIMITS.max_rate_wait;
    assert!(start.elapsed() >= max_wait && start.elapsed() < max_wait * 4, "{:?}", start.elapsed());
    assert!(clone_wait >= max_wait, "the clone made a call while the budget was exhausted: {clone_wait:?}");
}

#[tokio::test]
async fn client_pauses_while_the_rate_budget_is_exhausted() {
    let rate_limit = RateLimit { limit: 4, per_second: 8.0 };
    let simulator =
        Simulator::start(SimulatorOptions { rate_limit, ..SimulatorOptions::record() }).await.unwrap();
    let provider = adapter(&simulator);
    for _ in 0..10 {
        provider.find("svc-1").await.unwrap();
    }
    assert_eq!(simulator.calls().len(), 10, "a refused call was retried: {:?}", simulator.calls());
}

#[tokio::test]
async fn silent_provider_costs_one_timeout() {
    let simulator = start_simulator().await;
    let limits = CallLimits { timeout: Duration::from_millis(300), ..FAST_LIMITS };
    let provider = adapter_with(&simulator, simulator.token(), limits);
    simulator.add_fault(FaultRule::once("GET", "/servers", Fault::Timeout));
    let start = Instant::now();
    let error = provider.get(ServerId(1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Transient);
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}

#[tokio::test]
async fn unreachable_provider_is_transient_even_for_create() {
    let simulator = start_simulator().await;
    let provider = adapter(&simulator);
    drop(simulator);
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(provider.create(&order("svc-1")).await.unwrap_err().kind(), ErrorKind::Transient);
}

#[tokio::test]
async fn provider_message_is_only_in_the_source_of_the_error() {
    let simulator = start_simulator().await;
    let provider = adapter_with(&simulator, "a-token-that-is-wrong", FAST_LIMITS);
    let error = provider.find("svc-1").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Account);
    assert!(!error.to_string().contains("authenticate"), "{error}");
    assert!(error.source().unwrap().to_string().contains("unable to authenticate"));
    let all = format!("{error:?} {:?}", error.source());
    assert!(!all.contains("a-token-that-is-wrong"), "{all}");
}

#[tokio::test]
async fn change_type_without_clear_response_is_ambiguous() {
    let simulator = start_simulator().await;
    let provider = adapter(&simulator);
    let id = create_running_server(&simulator, &provider, "svc-1").await.id;
    power_off(&provider, id).await;
    simulator.add_fault(FaultRule::once("POST", "change_type", Fault::LostReplyAfterCommit));
    let error = provider.change_type(id, &server_type("cpx32")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Ambiguous);
    assert_eq!(simulator.call_count("POST", "change_type"), 1);
}

#[tokio::test]
async fn failed_action_is_reported_and_has_no_effect() {
    let simulator = start_simulator().await;
    let provider = adapter(&simulator);
    let id = create_running_server(&simulator, &provider, "svc-1").await.id;
    simulator.add_fault(FaultRule::once("POST", "poweroff", Fault::ActionError));
    let action = provider.power_off(id).await.unwrap();
    assert!(matches!(wait_for_action_status(&provider, action).await, ActionStatus::Error { .. }));
    assert_eq!(provider.get(id).await.unwrap().unwrap().status, ServerStatus::Running);
}
