//! The processes share a rate budget, so that together they stay within the provider's limit.

use futures_util::future::join_all;
use kit::provider::{Fault, FaultRule, RateLimit, SimulatorOptions};

use super::stack::Stack;

#[tokio::test(flavor = "multi_thread")]
async fn processes_share_provider_rate_limit_without_429() {
    let limit = RateLimit { limit: 16, per_second: 8.0 };
    let stack =
        Stack::start_with_provider(|_| SimulatorOptions { rate_limit: limit, ..SimulatorOptions::record() })
            .await;
    let quiet = [("RECONCILE_SECONDS", "5")];
    let processes = [
        stack.start_platform_with(&quiet),
        stack.start_platform_with(&quiet),
        stack.start_platform_with(&quiet),
    ];
    let users: Vec<String> = (0..24).map(|n| format!("user_{n}")).collect();
    // All requests run concurrently to keep every process busy.
    let provisioned = users.iter().enumerate().map(|(n, user)| stack.provision(&processes[n % 3], user));
    let provisioned = join_all(provisioned).await;
    for accepted in &provisioned {
        let operation =
            stack.wait_until_ended(&processes[0], accepted["operationId"].as_str().unwrap()).await;
        assert_eq!(operation["state"], "succeeded", "{operation}\n{}", stack.log());
    }
    let deletions = provisioned.iter().enumerate().map(|(n, accepted)| {
        let path = format!("/vps/{}?acceptLoss=true", accepted["machineId"].as_str().unwrap());
        let process = &processes[n % 3];
        let stack = &stack;
        async move { stack.delete(process, &path).await }
    });
    for deleted in join_all(deletions).await {
        stack.wait_until_ended(&processes[0], deleted.body["operationId"].as_str().unwrap()).await;
    }
    let calls = stack.provider.calls();
    let refused = calls.iter().filter(|call| call.status == Some(429)).count();
    assert!(calls.len() >= 48, "{} calls are too few to exceed the limit", calls.len());
    assert_eq!(refused, 0, "refusals among {} calls", calls.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn rate_limit_hit_by_one_process_applies_to_all() {
    let stack = Stack::start().await;
    let quiet = [("RECONCILE_SECONDS", "600")];
    let first = stack.start_platform_with(&quiet);
    stack.start_machine(&first, "user_1").await;
    // The time until the reset is much longer than the check below takes, even on a stalled machine. The provider
    // reports whole seconds, so up to one second is lost.
    let exhausted =
        Fault::Status { status: 429, code: "rate_limit_exceeded".to_owned(), reset_in_seconds: Some(20) };
    stack.provider.add_fault(FaultRule::once("POST", "/servers", exhausted));
    stack.provision(&first, "user_2").await;
    let is_refused =
        || async { stack.provider.calls().iter().any(|call| call.status == Some(429)).then_some(()) };
    stack.eventually("a call is refused", is_refused).await;
    // Calls from the first process may still be in flight.
    let (mut before, mut quiet_since) = (stack.provider.calls().len(), std::time::Instant::now());
    while quiet_since.elapsed() < std::time::Duration::from_millis(500) {
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        let calls = stack.provider.calls().len();
        if calls != before {
            (before, quiet_since) = (calls, std::time::Instant::now());
        }
    }
    // A process that starts now has no calls reserved from before the refusal.
    let second = stack.start_platform_with(&quiet);
    stack.provision(&second, "user_3").await;
    let provisioned_at = std::time::Instant::now();
    while provisioned_at.elapsed() < std::time::Duration::from_millis(1500) {
        let calls = stack.provider.calls().split_off(before);
        assert!(calls.is_empty(), "calls while the budget is exhausted: {calls:?}");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    stack
        .eventually("both processes continue", || async {
            (stack.provider.servers().len() == 3).then_some(())
        })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reported_remaining_calls_are_granted_despite_low_rate() {
    let stack = Stack::start().await;
    let client = stack.database.connect().await.unwrap();
    let sql = "INSERT INTO provider_budget (account, tokens, capacity, per_second, learnt, at) \
               VALUES ('a', 0, 3600, 0.0001, true, now())";
    client.batch_execute(sql).await.unwrap();
    let reserve = async |reported_remaining: Option<f64>| {
        let sql = "SELECT granted FROM provider_reserve('a', 16, 0, $1, 3600, NULL, 0)";
        client.query_one(sql, &[&reported_remaining]).await.unwrap().get::<_, i32>(0)
    };
    assert_eq!(reserve(None).await, 0);
    assert_eq!(reserve(Some(100.0)).await, 0, "calls that other processes may use must not be granted");
    assert_eq!(reserve(Some(3599.0)).await, 16);
}

#[tokio::test(flavor = "multi_thread")]
async fn learned_rate_follows_the_providers_reports() {
    let stack = Stack::start().await;
    let client = stack.database.connect().await.unwrap();
    let rate_after = async |reported: Option<f64>, seconds_later: f64| {
        let later = "UPDATE provider_budget SET rate_window_at = rate_window_at - make_interval(secs => $1)";
        client.execute(later, &[&seconds_later]).await.unwrap();
        let sql = "SELECT provider_reserve('a', 1, 0, 100, 1000, $1, 0)";
        client.query(sql, &[&reported]).await.unwrap();
        let sql = "SELECT per_second FROM provider_budget WHERE account = 'a'";
        client.query_one(sql, &[]).await.unwrap().get::<_, f64>(0)
    };
    assert!((rate_after(None, 0.0).await - 1.0).abs() < 1e-9, "without a report");
    assert!((rate_after(Some(2.0), 0.0).await - 2.0).abs() < 1e-9);
    assert!((rate_after(Some(50.0), 1.0).await - 50.0).abs() < 1e-9, "a higher rate must apply immediately");
    assert!((rate_after(Some(3.0), 1.0).await - 50.0).abs() < 1e-9, "a lower rate must wait for the window");
    assert!((rate_after(Some(3.0), 31.0).await - 50.0).abs() < 1e-9, "the previous window must still count");
    assert!((rate_after(Some(3.0), 31.0).await - 3.0).abs() < 1e-9, "then the lower rate must apply");
    assert!((rate_after(None, 300.0).await - 3.0).abs() < 1e-9, "without reports, the last rate must remain");
    assert!((rate_after(Some(1.5), 0.0).await - 1.5).abs() < 1e-9, "an expired window must not count");
}
