//! Requests of one kind do not wait for another kind's database connections.

use std::sync::Arc;
use std::time::Duration;

use kit::s3::{Fault, FaultRule};

use super::stack::{Stack, heartbeat_of};

/// More requests than any one of a process's connection pools has connections.
const MANY_REQUESTS: usize = 24;

#[tokio::test(flavor = "multi_thread")]
async fn slow_reports_do_not_delay_heartbeats() {
    let stack = Arc::new(Stack::start().await);
    let process = Arc::new(stack.start_platform());
    let host_settings = stack.start_machine(&process, "user_1").await;
    let mut client = stack.database.connect().await.unwrap();
    // Each report reads the alarms, and waits for the lock until the statement timeout.
    let lock = client.transaction().await.unwrap();
    lock.batch_execute("LOCK TABLE fleet_alarms IN ACCESS EXCLUSIVE MODE").await.unwrap();
    let report = |_| {
        let (stack, process) = (stack.clone(), process.clone());
        tokio::spawn(async move { stack.get(&process, "/vps/fleet").await.status })
    };
    let reports: Vec<_> = (0..MANY_REQUESTS).map(report).collect();
    let waiting = "SELECT count(*) FROM pg_stat_activity \
                   WHERE wait_event_type = 'Lock' AND query LIKE '%fleet_alarms%'";
    let observer = stack.database.connect().await.unwrap();
    let are_blocked = || async {
        let count: i64 = observer.query_one(waiting, &[]).await.ok()?.get(0);
        (count >= 4).then_some(())
    };
    stack.eventually("reports hold their connections", are_blocked).await;
    for _ in 0..5 {
        assert_eq!(
            stack.send_heartbeat(&process, &host_settings, &heartbeat_of(&host_settings)).await.status,
            200
        );
    }
    // A change is not delayed either.
    let path = format!("/vps/{}/fail", host_settings.machine);
    let failed = stack.post(&process, &path, &serde_json::json!({"reason": "r"})).await;
    assert_eq!(failed.status, 200, "{failed:?}");
    assert!(reports.iter().all(|report| !report.is_finished()), "a report ended too early");
    lock.rollback().await.unwrap();
    for report in reports {
        report.await.unwrap();
    }
}

/// More requests than connections wait for a hanging store, and none of them holds a connection in the meantime.
#[tokio::test(flavor = "multi_thread")]
async fn hanging_store_ties_up_no_database_connections() {
    let stack = Arc::new(Stack::start().await);
    let process = Arc::new(stack.start_platform());
    let host_settings = stack.start_machine(&process, "user_1").await;
    stack.store_snapshot("user_1");
    let provisioned = stack.provision(&process, "user_2").await;
    let machine = provisioned["machineId"].as_str().unwrap().to_owned();
    let booting = Arc::new(stack.wait_for_host_settings(&process, &machine).await);
    let hanging =
        stack.store.add_fault(FaultRule::new(Fault::Delay(Duration::from_secs(60))).key("latest").always());
    let register = |_| {
        let (stack, process, booting) = (stack.clone(), process.clone(), booting.clone());
        tokio::spawn(async move { stack.register(&process, &booting).await.status })
    };
    let recover = |_| {
        let (stack, process) = (stack.clone(), process.clone());
        let body = serde_json::json!({"idpUserId": "user_1"});
        tokio::spawn(async move { stack.post(&process, "/vps/recover", &body).await.status })
    };
    let waiting: Vec<_> = (0..MANY_REQUESTS).map(register).chain((0..MANY_REQUESTS).map(recover)).collect();
    let is_hanging = || async { (hanging.hits() > 0).then_some(()) };
    stack.eventually("a request to the store hangs", is_hanging).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    for _ in 0..5 {
        assert_eq!(
            stack.send_heartbeat(&process, &host_settings, &heartbeat_of(&host_settings)).await.status,
            200
        );
        assert_eq!(
            stack
                .get(&process, &format!("/vps/operations/{}", provisioned["operationId"].as_str().unwrap()))
                .await
                .status,
            200
        );
    }
    assert!(waiting.iter().all(|request| !request.is_finished()), "a request ended too early");
    for request in waiting {
        assert_eq!(request.await.unwrap(), 503);
    }
}
