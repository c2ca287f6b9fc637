//! Confirmations in `svcctl provision`: its output, prompts and requests.

use super::terminal::{run_on_terminal, stdout};
use super::*;

fn quote() -> Value {
    let exercise =
        |at: Value, is_current: bool| json!({"lastAt": at, "machineId": null, "isCurrent": is_current});
    json!({
        "environment": "production", "platformUrl": "https://platform.example/", "provider": "api.hetzner.cloud",
        "providerProject": "svc-prod", "idpUserId": "user_1", "slot": "primary", "handle": "ada", "kind": "customer",
        "serverType": "cpx22", "location": "nbg1", "imageVersion": "v1", "billingEnforced": true, "existing": null,
        "subscription": {"idpUserId": "user_1", "slot": "primary", "plan": "builder", "status": "active"},
        "addsCustomer": true, "monthlyCost": "10.1031 EUR", "servers": 12, "serverLimit": 25,
        "costs": [{"location": "nbg1", "server": "9.5081 EUR", "publicIpv4": "0.595 EUR", "total": "10.1031 EUR",
                   "totalNet": "8.49 EUR"}],
        "exercises": {"recovery": exercise(json!("2026-01-01T00:00:00.000Z"), true), "rollback": exercise(Value::Null, false)},
    })
}

fn quote_reply() -> Reply {
    Reply::Json(200, quote())
}

/// Returns the bodies of the provision requests that the platform received.
fn provision_bodies(platform: &FakePlatform) -> Vec<Value> {
    let requests = platform.requests();
    let provisions = requests.iter().filter(|request| request.line == "POST /vps/provision HTTP/1.1");
    provisions.map(|request| serde_json::from_str(&request.body).unwrap()).collect()
}

#[tokio::test]
async fn cost_and_consent_are_confirmed_separately() {
    let platform = FakePlatform::start([quote_reply(), accepted()]).await;
    let output =
        run_on_terminal(&platform, &["provision", "user_1", "--handle", "ada"], "yes\nyes\n", &[]).await;
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    for part in [
        "production, https://platform.example/",
        "api.hetzner.cloud, project svc-prod",
        "builder, active",
        "nbg1: 10.1031 EUR a month with VAT, 8.49 EUR without: server 9.5081 EUR, public IPv4 0.595 EUR",
        "12 of 25 servers in use; one more fits",
        "rollback never",
        "a rollback has not been exercised on a test slot",
        "You accept the monthly cost: 10.1031 EUR a month (cpx22 in nbg1).",
        "You confirm that the customer user_1 has explicitly opted in.",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("a recovery has not been exercised"), "{text}");
    let body = json!({"idpUserId": "user_1", "slot": "primary", "handle": "ada",
                      "confirmedMonthlyCost": "10.1031 EUR", "confirmedOptIn": true});
    assert_eq!(provision_bodies(&platform), [body]);

    for typed in ["no\nyes\n", "yes\nno\n", "\n\n", "yes\nYES\n"] {
        let platform = FakePlatform::start([quote_reply()]).await;
        let output =
            run_on_terminal(&platform, &["provision", "user_1", "--handle", "ada"], typed, &[]).await;
        assert_eq!(output.status.code(), Some(65), "{typed:?}: {}", stdout(&output));
        assert!(provision_bodies(&platform).is_empty(), "{typed:?}");
    }
    // An option replaces only its own prompt.
    let platform = FakePlatform::start([quote_reply(), accepted()]).await;
    let args = ["provision", "user_1", "--handle", "ada", "--confirm-opt-in"];
    let output = run_on_terminal(&platform, &args, "yes\n", &[]).await;
    assert!(
        output.status.success() && !stdout(&output).contains("has explicitly opted in"),
        "{}",
        stdout(&output)
    );
}

#[tokio::test]
async fn provision_without_terminal_requires_each_option() {
    let provision = ["provision", "user_1", "--handle", "ada"];
    for (options, advice) in [
        (&[][..], "add --confirm-cost and --confirm-opt-in to confirm"),
        (&["--yes"], "add --confirm-cost and --confirm-opt-in to confirm"),
        (&["--confirm-cost"], "add --confirm-opt-in to confirm"),
        (&["--confirm-opt-in"], "add --confirm-cost to confirm"),
    ] {
        let platform = FakePlatform::start([quote_reply()]).await;
        let output = platform.svcctl(&[&provision[..], options].concat()).await;
        assert_eq!(output.status.code(), Some(64), "{options:?}: {}", stderr(&output));
        for part in ["10.1031 EUR a month", advice] {
            assert!(stderr(&output).contains(part), "{options:?}: {}", stderr(&output));
        }
        assert!(provision_bodies(&platform).is_empty(), "{options:?}");
    }
    let platform = FakePlatform::start([quote_reply(), accepted()]).await;
    let output = platform.svcctl(&PROVISION).await;
    assert!(output.status.success(), "{}", stderr(&output));
    for part in ["at 10.1031 EUR a month (cpx22 in nbg1)", "warning: a rollback has not been exercised"] {
        assert!(stderr(&output).contains(part), "{part}: {}", stderr(&output));
    }
    assert_eq!(provision_bodies(&platform)[0]["confirmedMonthlyCost"], "10.1031 EUR");
}

#[tokio::test]
async fn cost_is_accepted_up_to_the_confirmed_limit() {
    let mut two_locations = quote();
    let mut ash = two_locations["costs"][0].clone();
    ash["location"] = json!("ash");
    two_locations["costs"].as_array_mut().unwrap().push(ash);
    for (limit, exit_code) in [
        ("10.1031 EUR", 0),
        ("12.00EUR", 0),
        ("10.10 EUR", 65),
        ("12.00 USD", 65),
        ("12", 64),
        ("12.00", 64),
        ("cheap", 64),
    ] {
        let platform = FakePlatform::start([Reply::Json(200, two_locations.clone()), accepted()]).await;
        let limit_option = format!("--confirm-cost={limit}");
        let args = ["provision", "user_1", "--handle", "ada", &limit_option, "--confirm-opt-in"];
        let output = platform.svcctl(&args).await;
        assert_eq!(output.status.code(), Some(exit_code), "{limit}: {}", stderr(&output));
        assert_eq!(provision_bodies(&platform).len(), usize::from(exit_code == 0), "{limit}");
        if exit_code != 64 {
            let cost = "up to 10.1031 EUR a month (cpx22 in nbg1 or ash)";
            assert!(stderr(&output).contains(cost), "{limit}: {}", stderr(&output));
        }
    }
}

#[tokio::test]
async fn machine_for_known_customer_needs_no_confirmation() {
    let mut known_customer = quote();
    known_customer["addsCustomer"] = json!(false);
    known_customer["existing"] = json!({"machineId": MACHINE, "status": "running"});
    (known_customer["monthlyCost"], known_customer["costs"]) = (Value::Null, json!([]));
    let platform = FakePlatform::start([Reply::Json(200, known_customer), accepted()]).await;
    let output = platform.svcctl(&["provision", "user_1", "--handle", "ada"]).await;
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(
        provision_bodies(&platform),
        [json!({"idpUserId": "user_1", "slot": "primary", "handle": "ada"})]
    );
}

#[tokio::test]
async fn replacement_with_different_type_confirms_only_the_cost() {
    let mut replacement = quote();
    (replacement["addsCustomer"], replacement["needsCostConfirmation"]) = (json!(false), json!(true));
    replacement["existing"] = json!({"machineId": MACHINE, "status": "failed"});
    replacement["servers"] = json!(25);
    let replies = || [Reply::Json(200, replacement.clone()), accepted()];
    let provision = ["provision", "user_1", "--handle", "ada"];
    let platform = FakePlatform::start(replies()).await;
    let output = platform.svcctl(&provision).await;
    assert_eq!(output.status.code(), Some(64), "{}", stderr(&output));
    for part in ["one of a different server type, at 10.1031 EUR a month", "add --confirm-cost to confirm"] {
        assert!(stderr(&output).contains(part), "{part}: {}", stderr(&output));
    }
    assert!(provision_bodies(&platform).is_empty());

    let platform = FakePlatform::start(replies()).await;
    let output = run_on_terminal(&platform, &provision, "yes\n", &[]).await;
    assert!(output.status.success(), "{}", stdout(&output));
    assert!(stdout(&output).contains("25 of 25 servers; the replacement"), "{}", stdout(&output));
    let body = json!({"idpUserId": "user_1", "slot": "primary", "handle": "ada",
                      "confirmedMonthlyCost": "10.1031 EUR"});
    assert_eq!(provision_bodies(&platform), [body]);
}

#[tokio::test]
async fn refused_quote_ends_provision_before_any_prompt() {
    for (status, code, exit_code) in [
        (402, "subscription_required", 65),
        (409, "server_limit_reached", 65),
        (403, "server_type_not_allowed", 77),
    ] {
        let platform =
            FakePlatform::start([Reply::Json(status, problem(status, code, "That is the reason."))]).await;
        let output =
            run_on_terminal(&platform, &["provision", "user_1", "--handle", "ada"], "yes\nyes\n", &[]).await;
        assert_eq!(output.status.code(), Some(exit_code), "{code}: {}", stdout(&output));
        assert!(stdout(&output).contains("That is the reason.") && !stdout(&output).contains("Type yes"));
        assert_eq!(platform.requests().len(), 1);
    }
}

#[tokio::test]
async fn price_change_after_quote_is_reported_with_next_step() {
    let changed = Reply::Json(409, problem(409, "price_changed", "The server costs 12.00 EUR a month."));
    let platform = FakePlatform::start([quote_reply(), changed]).await;
    let output = platform.svcctl(&PROVISION).await;
    assert_eq!(output.status.code(), Some(65), "{}", stderr(&output));
    for part in ["12.00 EUR", "next: run `svcctl provision` again"] {
        assert!(stderr(&output).contains(part), "{}", stderr(&output));
    }
}

#[tokio::test]
async fn dry_run_shows_the_quote_and_creates_nothing() {
    let platform = FakePlatform::start([quote_reply()]).await;
    let dry_run = ["provision", "user_1", "--handle", "ada", "--dry-run", "--json"];
    let output = platform.svcctl(&dry_run).await;
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(serde_json::from_slice::<Value>(&output.stdout).unwrap(), quote());
    assert_eq!(platform.requests().len(), 1);

    let platform = FakePlatform::start([unsupported_quote()]).await;
    let output = platform.svcctl(&dry_run).await;
    assert_eq!(output.status.code(), Some(69), "{}", stderr(&output));
    assert!(stderr(&output).contains("too old for --dry-run"), "{}", stderr(&output));
}
