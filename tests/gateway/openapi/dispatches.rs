//! Tests the error responses to dispatch requests.

use serde_json::json;

use super::{EXAMPLE_ID, TestGateway, operations};
use crate::contract::ApiUnderTest;

/// Checks rejected requests about dispatches, with a runner that never responds.
pub async fn check_dispatches(gateway: &TestGateway) {
    let _runner = gateway.host.machine.bind_owner_socket("agent.sock").unwrap();
    let another = json!({ "id": EXAMPLE_ID, "prompt": "another" });
    gateway.dispatch(&another).await.assert_problem(422, "idempotency_mismatch");
    for operation in operations().filter(|operation| operation.path.contains("{id}")) {
        for id in ["unknown", "..%2f..", "%00"] {
            let path = operation.path.replace("{id}", id);
            gateway.send(gateway.authorized_request(operation, &path)).await.assert_problem(404, "not_found");
        }
        let path = operation.path.replace("{id}", "%ff");
        gateway
            .send(gateway.authorized_request(operation, &path))
            .await
            .assert_problem(400, "invalid_request");
    }
    let batch =
        |sender: &str| json!({ "senderId": sender, "batch": vec![json!({ "prompt": "do it" }); 100] });
    assert_eq!(gateway.dispatch(&batch("a")).await.status, 202);
    gateway.dispatch(&batch("a")).await;
    gateway.dispatch(&batch("a")).await.assert_problem(429, "rate_limited");
    let limited = json!({ "costLimits": { "daily": 0.4 } }).to_string();
    gateway.host.machine.write("home/svc/home/system/config.json", &limited).unwrap();
    let single = json!({ "senderId": "b", "prompt": "do it" });
    assert_eq!(gateway.dispatch(&single).await.status, 202);
    gateway.dispatch(&single).await.assert_problem(429, "cost_limit_reached");
}
