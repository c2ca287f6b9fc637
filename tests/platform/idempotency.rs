//! An idempotency key can be reused only for the same request, every change has an audit entry, and machine lists are
//! paginated.

use futures_util::future::join_all;
use reqwest::Method;
use serde_json::{Value, json};

use super::stack::{Process, SECRET, Stack, provision_body};

fn provision_request(stack: &Stack, process: &Process, body: &Value, key: &str) -> reqwest::RequestBuilder {
    let request = stack.request(process, Method::POST, "/vps/provision").bearer_auth(SECRET);
    request.header("idempotency-key", key).json(body)
}

#[tokio::test(flavor = "multi_thread")]
async fn idempotency_key_is_refused_for_different_request() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    stack.subscribe(&process, "user_1").await;
    let body = provision_body("user_1");
    let requests = (0..8).map(|_| stack.send(provision_request(&stack, &process, &body, "key-1")));
    let responses = join_all(requests).await;
    for response in &responses {
        assert_eq!((response.status, &response.body), (202, &responses[0].body));
    }
    let mut changed_body = body.clone();
    changed_body["location"] = json!("fsn1");
    stack
        .send(provision_request(&stack, &process, &changed_body, "key-1"))
        .await
        .assert_problem(422, "idempotency_mismatch");
    assert_eq!(stack.send(provision_request(&stack, &process, &body, "key-2")).await.status, 200);
    stack
        .send(provision_request(&stack, &process, &body, &"k".repeat(300)))
        .await
        .assert_problem(400, "invalid_request");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_change_has_an_audit_entry_with_request_id() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    stack.post(&process, "/vps/provision", &provision_body("user_1")).await;
    stack.delete(&process, &format!("/vps/{}", host_settings.machine)).await;
    let client = stack.database.connect().await.unwrap();
    let sql =
        "SELECT actor, action, target, before, after, request_id FROM operator_audit ORDER BY at, audit_id";
    let rows = client.query(sql, &[]).await.unwrap();
    let audited: Vec<(String, String, String)> =
        rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect();
    let actor = format!("machine:{}", host_settings.machine);
    let expected = [
        ("operator", "slot.set", "user_1/primary"),
        ("operator", "provision", "user_1/primary"),
        (actor.as_str(), "register", host_settings.machine.as_str()),
        ("operator", "delete", host_settings.machine.as_str()),
    ];
    let expected: Vec<_> = expected.map(|(a, b, c)| (a.to_owned(), b.to_owned(), c.to_owned())).into();
    assert_eq!(audited, expected, "a request that changed nothing must have no audit entry");
    let deletion = &rows[3];
    assert_eq!(deletion.get::<_, Value>(3)["status"], "running");
    assert!(deletion.get::<_, Value>(4)["deletedAt"].is_string());
    assert!(rows.iter().all(|row| !row.get::<_, &str>(5).is_empty()));
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_are_listed_in_pages_and_filtered() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    for user in ["user_1", "user_2", "user_3"] {
        stack.provision(&process, user).await;
    }
    let first = stack.get(&process, "/vps?limit=2").await.body;
    let users = |page: &Value| -> Vec<String> {
        page["machines"]
            .as_array()
            .unwrap()
            .iter()
            .map(|machine| machine["idpUserId"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(users(&first), ["user_3", "user_2"]);
    let next = stack
        .get(&process, &format!("/vps?limit=2&cursor={}", first["nextCursor"].as_str().unwrap()))
        .await
        .body;
    assert_eq!((users(&next), &next["nextCursor"]), (vec!["user_1".to_owned()], &Value::Null));
    let filtered =
        stack.get(&process, "/vps?status=provisioning&handle=h-user-2&slot=primary&deleted=false").await.body;
    assert_eq!(users(&filtered), ["user_2"]);
    for query in ["status=running", "handle=h-user-9", "slot=second", "deleted=true", "idpUserId=user_9"] {
        let filtered = stack.get(&process, &format!("/vps?{query}")).await.body;
        assert!(users(&filtered).is_empty(), "{query}: {filtered}");
    }
    for query in ["status=off", "limit=0", "limit=x", "cursor=1", "color=red", "deleted=maybe"] {
        let response = stack.get(&process, &format!("/vps?{query}")).await;
        response.assert_problem(400, "invalid_request");
        let name = query.split('=').next().unwrap();
        assert_eq!(response.body["errors"][0]["pointer"], format!("?{name}"), "{response:?}");
    }
}
