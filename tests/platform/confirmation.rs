//! Tests the confirmation of the quoted cost and of the customer's consent. If `PROVISION_CONFIRMATION` is set, a new
//! customer requires both, and a replacement with another server type requires confirmation of the cost.

use futures_util::future::join_all;
use kit::provider::{Fault, FaultRule};
use reqwest::Method;
use serde_json::{Value, json};

use super::stack::{ApiResponse, Process, SECRET, Stack, provision_body};

const QUOTE: &str = "/vps/provision/quote";
const PROVISION: &str = "/vps/provision";
/// The monthly cost of a cpx22 with a public IPv4 address in one of the simulator's European locations, including tax.
const COST: &str = "10.1031 EUR";

fn confirmed_body(user: &str, cost: &str) -> Value {
    let mut body = provision_body(user);
    body["confirmedMonthlyCost"] = json!(cost);
    body["confirmedOptIn"] = json!(true);
    body
}

/// Lists the confirmations in the provision audit entries, with their actors.
async fn list_audited_confirmations(stack: &Stack) -> Vec<(String, Value)> {
    let client = stack.database.connect().await.unwrap();
    let sql =
        "SELECT actor, (after->'confirmed')::text FROM operator_audit WHERE action = 'provision' ORDER BY at";
    let rows = client.query(sql, &[]).await.unwrap();
    rows.iter().map(|row| (row.get(0), serde_json::from_str(row.get(1)).unwrap())).collect()
}

/// Makes the provider respond to each request for prices with an error.
fn fail_price_requests(stack: &Stack) {
    let down = Fault::Status { status: 503, code: "unavailable".to_owned(), reset_in_seconds: None };
    stack.provider.add_fault(FaultRule::times(1000, "GET", "/pricing", down));
}

async fn count_machines(stack: &Stack, process: &Process) -> usize {
    stack.get(process, "/vps").await.body["machines"].as_array().unwrap().len()
}

#[tokio::test(flavor = "multi_thread")]
async fn quote_shows_cost_quota_and_environment_and_changes_nothing() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[
        ("PLATFORM_ENVIRONMENT", "staging"),
        ("PROVIDER_PROJECT", "svc-staging"),
        ("PROVIDER_SERVER_LIMIT", "5"),
    ]);
    stack.subscribe(&process, "user_1").await;
    let mut body = provision_body("user_1");
    body["fallbackLocations"] = json!(["hel1", "ash"]);
    let quote = stack.post(&process, QUOTE, &body).await;
    assert_eq!(quote.status, 200, "{quote:?}");
    let quote = quote.body;
    assert_eq!(
        (&quote["environment"], &quote["providerProject"]),
        (&json!("staging"), &json!("svc-staging"))
    );
    assert_eq!((&quote["servers"], &quote["serverLimit"]), (&json!(0), &json!(5)));
    assert_eq!(quote["subscription"]["plan"], "max");
    assert_eq!((&quote["addsCustomer"], &quote["existing"]), (&json!(true), &Value::Null));
    let locations = json!([
        {"location": "nbg1", "server": "9.5081 EUR", "publicIpv4": "0.595 EUR", "total": COST, "totalNet": "8.49 EUR"},
        {"location": "hel1", "server": "9.5081 EUR", "publicIpv4": "0.595 EUR", "total": COST, "totalNet": "8.49 EUR"},
        {"location": "ash", "server": "11.4002 EUR", "publicIpv4": "0.714 EUR", "total": "12.1142 EUR", "totalNet": "10.18 EUR"},
    ]);
    assert_eq!(quote["costs"], locations);
    assert_eq!(
        quote["monthlyCost"], "12.1142 EUR",
        "the quote must cover the case where only the most expensive location has capacity"
    );

    assert_eq!(count_machines(&stack, &process).await, 0);
    assert!(stack.provider.creations().is_empty() && list_audited_confirmations(&stack).await.is_empty());
    let calls = stack.provider.calls();
    assert!(calls.iter().all(|call| call.method == "GET"), "{calls:?}");

    // The quote rejects any request that provisioning would reject, before anything is confirmed.
    stack.post(&process, QUOTE, &provision_body("user_2")).await.assert_problem(402, "subscription_required");
    body["serverType"] = json!("cpx42");
    stack.post(&process, QUOTE, &body).await.assert_problem(403, "server_type_not_allowed");
    body["serverType"] = json!("cpx22");
    body["imageVersion"] = json!("v9");
    stack.post(&process, QUOTE, &body).await.assert_problem(404, "bundle_not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn new_customer_needs_both_confirmations_if_they_are_required() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("PROVISION_CONFIRMATION", "true")]);
    stack.subscribe(&process, "user_1").await;
    let post = async |body: &Value| stack.post(&process, PROVISION, body).await;
    let assert_refused = async |response: ApiResponse, missing: Value| {
        response.assert_problem(428, "confirmation_required");
        assert_eq!(response.body["missing"], missing);
        assert_eq!(count_machines(&stack, &process).await, 0);
    };
    let plain = provision_body("user_1");
    assert_refused(post(&plain).await, json!(["confirmedMonthlyCost", "confirmedOptIn"])).await;
    let mut body = confirmed_body("user_1", COST);
    body["confirmedOptIn"] = json!(false);
    assert_refused(post(&body).await, json!(["confirmedOptIn"])).await;
    body = confirmed_body("user_1", COST);
    body.as_object_mut().unwrap().remove("confirmedMonthlyCost");
    assert_refused(post(&body).await, json!(["confirmedMonthlyCost"])).await;
    // A preview does not need confirmations, because it does not add a customer.
    let preview = json!({"idpUserId": "user_2", "handle": "bob", "kind": "preview"});
    assert_eq!(post(&preview).await.status, 202);

    let first = post(&confirmed_body("user_1", COST)).await;
    assert_eq!(first.status, 202, "{first:?}");
    let recorded = json!({"monthlyCost": COST, "optIn": true});
    assert_eq!(list_audited_confirmations(&stack).await.pop(), Some(("operator".to_owned(), recorded)));
    // The customer has been added: a repeated request returns the machine, and a replacement needs no confirmation.
    let again = post(&plain).await;
    assert_eq!((again.status, &again.body["machineId"]), (200, &first.body["machineId"]));
    let path = format!("/vps/{}/fail", first.body["machineId"].as_str().unwrap());
    assert_eq!(stack.post(&process, &path, &json!({"reason": "test"})).await.status, 200);
    assert_eq!(post(&plain).await.status, 202);
}

#[tokio::test(flavor = "multi_thread")]
async fn replacement_with_another_server_type_requires_confirmed_cost() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("PROVISION_CONFIRMATION", "true")]);
    stack.subscribe(&process, "user_1").await;
    let post = async |path: &str, body: &Value| stack.post(&process, path, body).await;
    let first = post(PROVISION, &confirmed_body("user_1", COST)).await;
    let path = format!("/vps/{}/fail", first.body["machineId"].as_str().unwrap());
    assert_eq!(post(&path, &json!({"reason": "test"})).await.status, 200);

    let quote = post(QUOTE, &provision_body("user_1")).await.body;
    assert_eq!((&quote["addsCustomer"], &quote["needsCostConfirmation"]), (&json!(false), &json!(false)));
    let mut larger = provision_body("user_1");
    larger["serverType"] = json!("cpx32");
    let quote = post(QUOTE, &larger).await.body;
    assert_eq!((&quote["addsCustomer"], &quote["needsCostConfirmation"]), (&json!(false), &json!(true)));
    let cost = quote["monthlyCost"].clone();
    assert!(cost.is_string() && cost != COST, "{quote}");
    let refused = post(PROVISION, &larger).await;
    refused.assert_problem(428, "confirmation_required");
    assert_eq!(refused.body["missing"], json!(["confirmedMonthlyCost"]));
    larger["confirmedMonthlyCost"] = json!(COST);
    let refused = post(PROVISION, &larger).await;
    refused.assert_problem(409, "price_changed");
    assert_eq!(refused.body["monthlyCost"], cost);
    assert_eq!(count_machines(&stack, &process).await, 1);
    larger["confirmedMonthlyCost"] = cost.clone();
    assert_eq!(post(PROVISION, &larger).await.status, 202);
    let recorded = json!({"monthlyCost": cost, "optIn": false});
    assert_eq!(list_audited_confirmations(&stack).await.pop(), Some(("operator".to_owned(), recorded)));
}

#[tokio::test(flavor = "multi_thread")]
async fn cost_that_changed_since_the_quote_is_refused() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    stack.subscribe(&process, "user_1").await;
    stack.provider.set_price_percent(110);
    let refused = stack.post(&process, PROVISION, &confirmed_body("user_1", COST)).await;
    refused.assert_problem(409, "price_changed");
    assert_eq!(refused.body["monthlyCost"], "11.0432 EUR");
    assert_eq!(count_machines(&stack, &process).await, 0);
    assert!(stack.provider.creations().is_empty());

    let request = stack.request(&process, Method::POST, PROVISION).bearer_auth(SECRET);
    let request = request.header("idempotency-key", "key-1").json(&confirmed_body("user_1", "11.0432 EUR"));
    let repeat = request.try_clone().unwrap();
    let first = stack.send(request).await;
    assert_eq!(first.status, 202, "{first:?}");
    // A repeated request gets the first response, even if the price has changed.
    stack.provider.set_price_percent(120);
    let again = stack.send(repeat).await;
    assert_eq!((again.status, again.body), (202, first.body));
}

#[tokio::test(flavor = "multi_thread")]
async fn quotes_share_provider_data_but_provision_reads_it_again() {
    let stack = Stack::start().await;
    let process = stack.start_platform_with(&[("PROVIDER_SERVER_LIMIT", "5")]);
    stack.subscribe(&process, "user_1").await;
    let mut body = provision_body("user_1");
    (body["location"], body["fallbackLocations"]) = (json!("nbg1"), json!(["hel1"]));
    let count_calls = || {
        let count = |path: &str| stack.provider.call_count("GET", path);
        (count("/pricing"), count("/servers?page=1&per_page=1"), count("/locations"))
    };
    for _ in 0..2 {
        let quotes = join_all((0..8).map(|_| stack.post(&process, QUOTE, &body))).await;
        for quote in quotes {
            assert_eq!((quote.status, &quote.body["monthlyCost"]), (200, &json!(COST)), "{quote:?}");
        }
    }
    assert_eq!(count_calls(), (1, 1, 2));

    // The confirmed price is compared with the current one, which the next quote shows.
    stack.provider.set_price_percent(110);
    body["confirmedMonthlyCost"] = json!(COST);
    stack.post(&process, PROVISION, &body).await.assert_problem(409, "price_changed");
    assert_eq!(count_calls(), (2, 1, 4));
    assert_eq!(stack.post(&process, QUOTE, &body).await.body["monthlyCost"], "11.0432 EUR");
    body["confirmedMonthlyCost"] = json!("11.0432 EUR");
    assert_eq!(stack.post(&process, PROVISION, &body).await.status, 202);
    assert_eq!(count_calls().0, 3);
    assert_eq!(count_calls().1, 2, "provisioning must count the servers again");
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_confirmations_are_accepted_and_recorded_by_default() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    stack.provision(&process, "user_1").await;
    let no_confirmations = json!({"monthlyCost": null, "optIn": false});
    assert_eq!(list_audited_confirmations(&stack).await, [("operator".to_owned(), no_confirmations)]);
    assert_eq!(stack.provider.call_count("GET", "/pricing"), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn cost_cannot_be_confirmed_while_prices_are_unknown() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    stack.subscribe(&process, "user_1").await;
    fail_price_requests(&stack);
    let refused = stack.post(&process, PROVISION, &confirmed_body("user_1", COST)).await;
    refused.assert_problem(503, "unavailable");
    assert!(refused.headers.contains_key("retry-after"));
    stack.post(&process, QUOTE, &provision_body("user_1")).await.assert_problem(503, "unavailable");
    assert_eq!(count_machines(&stack, &process).await, 0);
    stack.provider.clear_faults();
    assert_eq!(stack.post(&process, PROVISION, &confirmed_body("user_1", COST)).await.status, 202);
}

#[tokio::test(flavor = "multi_thread")]
async fn quote_that_needs_no_confirmation_does_not_need_prices() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    fail_price_requests(&stack);
    let preview = json!({"idpUserId": "user_2", "handle": "bob", "kind": "preview"});
    let quote = stack.post(&process, QUOTE, &preview).await;
    assert_eq!(quote.status, 200, "{quote:?}");
    assert_eq!((&quote.body["addsCustomer"], &quote.body["monthlyCost"]), (&json!(false), &Value::Null));
}
