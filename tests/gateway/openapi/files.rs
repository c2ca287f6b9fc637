//! Tests requests for earlier versions of files, and for the file backup's key.

use reqwest::Method;
use serde_json::json;

use super::{Machine, TestGateway, operations};

/// The store whose address the gateway returns together with the file backup's key.
const STORE_ENV: &str = "OBJECT_STORE_URL=s3://bucket\nOBJECT_STORE_ENDPOINT=https://store.example\n\
                         AWS_ACCESS_KEY_ID=id\nAWS_SECRET_ACCESS_KEY=secret\n";
const FILES_KEY: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8";

/// Writes the file backup's key, and the address of its store, to a machine.
pub fn write_key(machine: &Machine) {
    machine.write("opt/svc/env/r2.env", STORE_ENV).unwrap();
    machine.write("var/lib/svc/files/key", FILES_KEY).unwrap();
}

/// The operations that the history service serves.
pub const HISTORY_OPERATIONS: [&str; 3] = ["listFileVersions", "listFilesAt", "downloadFile"];

/// Checks requests about earlier versions of files: unknown paths, a missing key, repeated restores, a damaged
/// repository, and outages of the store and the history service.
pub async fn check_files(gateway: &TestGateway) {
    let history_operations = || operations().filter(|operation| HISTORY_OPERATIONS.contains(&operation.id));
    let get = |path: &str| gateway.send(gateway.request_as("owner", &Method::GET, path));
    for operation in history_operations().filter(|operation| operation.id != "listFileVersions") {
        get(&format!("{}?path=never", operation.path)).await.assert_problem(404, "not_found");
    }
    let key = get("/api/files/key").await;
    let repository = "s3:https://store.example/bucket/user_owner/primary/files";
    assert_eq!(key.body, json!({ "repository": repository, "password": FILES_KEY }));
    assert_eq!(key.headers["cache-control"], "no-store");
    let machine = &gateway.host.machine;
    std::fs::remove_file(machine.path("var/lib/svc/files/key")).unwrap();
    get("/api/files/key").await.assert_problem(404, "not_found");
    std::fs::remove_file(machine.path("opt/svc/env/r2.env")).unwrap();
    get("/api/files/key").await.assert_problem(503, "unavailable");
    write_key(machine);
    let post = || gateway.host.unsigned_request(Method::POST, "/api/files/restore");
    let proof = || {
        let claims = gateway.claims("owner", &Method::POST, "/api/files/restore");
        gateway.host.machine.signer.sign(&claims)
    };
    let body = json!({ "path": "projects/plan.md" });
    let request = || gateway.send(post().header("x-svc-proof", proof()).json(&body));
    request().await;
    request().await.assert_problem(409, "invalid_state");
    std::fs::remove_file(machine.path("var/lib/svc/requests/files-restore")).unwrap();
    let restore_idempotently = |path: &str| {
        let request = post().header("x-svc-proof", proof()).header("idempotency-key", "a");
        gateway.send(request.json(&json!({ "path": path })))
    };
    let first = restore_idempotently("projects/plan.md").await;
    let again = restore_idempotently("projects/plan.md").await;
    assert_eq!((first.status, again.status, &first.body), (202, 202, &again.body));
    restore_idempotently("projects/other.md").await.assert_problem(422, "idempotency_mismatch");
    let history = gateway.history.as_ref().unwrap();
    for kind in ["data", "index"] {
        history.damage(kind);
    }
    std::fs::remove_dir_all(history.host.machine.path("var/lib/svc/files/cache")).unwrap();
    for operation in history_operations() {
        let problem = get(&format!("{}?path=projects/plan.md", operation.path)).await;
        problem.assert_problem(409, "conflict");
    }
    history.store.take_down();
    for operation in history_operations() {
        let problem = get(&format!("{}?path=projects/plan.md", operation.path)).await;
        problem.assert_problem(503, "store_unavailable");
    }
    std::fs::remove_file(gateway.history_socket()).unwrap();
    for operation in history_operations() {
        get(&format!("{}?path=projects/plan.md", operation.path)).await.assert_problem(503, "unavailable");
    }
}
