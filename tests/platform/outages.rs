//! During a database or store outage, readiness reports the outage, and requests that need the database get 503. The
//! platform recovers afterwards.

use kit::pg::{PgBinaries, PgOptions, PgServer};
use reqwest::Method;

use super::stack::{SECRET, Stack, provision_body};

/// Starts a database server that a test can kill.
pub async fn start_database_server() -> PgServer {
    let binaries = tokio::task::spawn_blocking(|| PgBinaries::locate_or_fetch(&kit::fetch::target_dir()));
    let server = PgServer::start(&binaries.await.unwrap().unwrap(), PgOptions::default()).await.unwrap();
    server.create_database("svc").await.unwrap();
    server
}

#[tokio::test(flavor = "multi_thread")]
async fn committed_change_is_accepted_despite_an_outage() {
    let stack = Stack::start().await;
    let server = start_database_server().await;
    let process = stack.start_platform_with(&[("PLATFORM_DATABASE_URL", &server.url("svc"))]);
    stack.subscribe(&process, "user_1").await;
    // The operation keeps running until a host registers.
    let request = stack.request(&process, Method::POST, "/vps/provision").bearer_auth(SECRET);
    let request = request.header("prefer", "wait=30").json(&provision_body("user_1"));
    let outage = async {
        let is_committed = || async {
            let machines = stack.get(&process, "/vps").await.body["machines"].clone();
            machines.as_array().is_some_and(|machines| !machines.is_empty()).then_some(())
        };
        stack.eventually("the change is committed", is_committed).await;
        server.kill9().await.unwrap();
    };
    let (response, ()) = tokio::join!(stack.send(request), outage);
    assert_eq!(response.status, 202, "{response:?}");
    assert!(!response.headers.contains_key("preference-applied"), "{response:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn platform_reports_and_survives_database_outage() {
    let stack = Stack::start().await;
    let server = start_database_server().await;
    let process = stack.start_platform_with(&[("PLATFORM_DATABASE_URL", &server.url("svc"))]);
    stack.wait_for_routes(&process).await;
    assert_eq!(stack.get(&process, "/readyz/control").await.status, 200);
    server.kill9().await.unwrap();
    stack.get(&process, "/vps").await.assert_problem(503, "database_unavailable");
    // The result of the last probe is reused for a second.
    let is_not_ready = || async {
        Some(stack.get(&process, "/readyz/control").await).filter(|readiness| readiness.status == 503)
    };
    let readiness = stack.eventually("the process is not ready", is_not_ready).await;
    assert_eq!((&readiness.body["database"], &readiness.body["store"]), (&"failing".into(), &"ok".into()));
    assert_eq!(stack.get(&process, "/livez").await.status, 200);
    // Requests are still routed, so a load balancer must not remove the process.
    let is_stale =
        || async { (stack.get(&process, "/readyz").await.body["routes"] == "stale").then_some(()) };
    stack.eventually("the routes are stale", is_stale).await;
    let routing = stack.get(&process, "/readyz").await;
    assert_eq!(routing.status, 200, "{routing:?}");
    assert!(stack.get(&process, "/metrics").await.text.contains("svc_router_routes_age_seconds "));
    assert!(stack.log().contains("serving stale routes"));
    server.restart().await.unwrap();
    let is_ready = || async { (stack.get(&process, "/readyz/control").await.status == 200).then_some(()) };
    stack.eventually("the process is ready again", is_ready).await;
    // Only changes are logged, not every failed probe.
    assert_eq!(stack.log().matches("a component does not respond").count(), 1, "{}", stack.log());
    let provisioned = stack.provision(&process, "user_1").await;
    assert_eq!(
        stack.wait_until_ended(&process, provisioned["operationId"].as_str().unwrap()).await["state"],
        "succeeded"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn store_outage_stops_control_plane_but_not_the_router() {
    let stack = Stack::start().await;
    // The delay gives the test time to take the store down before the fence is written.
    let process =
        stack.start_platform_with(&[("FAILPOINTS", "operations.provision.fence.before=1*sleep(3000)")]);
    stack.subscribe(&process, "user_1").await;
    stack.wait_for_routes(&process).await;
    let provisioned = stack.post(&process, "/vps/provision", &provision_body("user_1")).await.body;
    stack.store.take_down();
    assert_eq!(stack.get(&process, "/readyz").await.status, 200);
    let readiness = stack.get(&process, "/readyz/control").await;
    assert_eq!(
        (readiness.status, &readiness.body["database"], &readiness.body["store"]),
        (503, &"ok".into(), &"failing".into())
    );
    // Depending on when the outage starts, either the step `last_backup` or the step `fence` logs this error.
    let has_failed = || async { stack.log().contains("cannot read the slot's fence").then_some(()) };
    stack.eventually("an attempt to read the fence has failed", has_failed).await;
    assert!(stack.provider.servers().is_empty(), "a server was created before its fence");
    stack.store.bring_up().unwrap();
    let operation = stack.wait_until_ended(&process, provisioned["operationId"].as_str().unwrap()).await;
    assert_eq!(operation["state"], "succeeded", "{operation}");
}

#[tokio::test(flavor = "multi_thread")]
async fn process_is_not_ready_before_its_first_routes() {
    let stack = Stack::start().await;
    // The rows cannot be read while another transaction locks the table.
    let mut client = stack.database.connect().await.unwrap();
    let lock = client.transaction().await.unwrap();
    lock.batch_execute("LOCK TABLE user_machines IN ACCESS EXCLUSIVE MODE").await.unwrap();
    let process = stack.start_platform();
    let readiness = stack.get(&process, "/readyz").await;
    assert_eq!((readiness.status, &readiness.body["routes"]), (503, &"not_loaded".into()), "{readiness:?}");
    lock.rollback().await.unwrap();
    stack.wait_for_routes(&process).await;
}
