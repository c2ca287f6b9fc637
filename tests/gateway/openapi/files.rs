//! Questions about earlier files.

use reqwest::Method;
use serde_json::json;

use super::{TestGateway, operations};

/// The operations that the history service serves.
pub const READS: [&str; 3] = ["listFileVersions", "listFilesAt", "downloadFile"];

/// Checks questions about earlier files: what never existed, and outages of the store and of the history service.
pub async fn check_files(gateway: &TestGateway) {
    let reads = || operations().filter(|operation| READS.contains(&operation.id));
    let get = |path: &str| gateway.send(gateway.request_as("owner", &Method::GET, path));
    for operation in reads().filter(|operation| operation.id != "listFileVersions") {
        get(&format!("{}?path=never", operation.path)).await.assert_problem(404, "not_found");
    }
    let post = || gateway.host.unsigned_request(Method::POST, "/api/files/restore");
    let proof = || {
        let claims = gateway.claims("owner", &Method::POST, "/api/files/restore");
        gateway.host.machine.signer.sign(&claims)
    };
    let body = json!({ "path": "projects/plan.md" });
    let request = || gateway.send(post().header("x-svc-proof", proof()).json(&body));
    request().await;
    request().await.assert_problem(409, "invalid_state");
    gateway.history.as_ref().unwrap().store.take_down();
    for operation in reads() {
        let problem = get(&format!("{}?path=projects/plan.md", operation.path)).await;
        problem.assert_problem(503, "store_unavailable");
    }
    std::fs::remove_file(gateway.history_socket()).unwrap();
    for operation in reads() {
        get(&format!("{}?path=projects/plan.md", operation.path)).await.assert_problem(503, "unavailable");
    }
}
