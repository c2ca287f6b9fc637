//! Runs the demo and searches for every secret: none may appear in a log, a response, an argument list or a table. To
//! prove that the detector works, the test then leaks a secret through each channel, and must detect every leak.

mod channels;
mod detector;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kit::scenario::{self, Checkpoint, ScenarioOptions, Stack};
use kit::stores::StoreKind;
use reqwest::Method;
use serde_json::{Value, json};

use channels::ProcessWatch;
use detector::{Detector, Leak};

const ADMIN_TOKEN: &str = "canary-admin-token-0123456789-0123456789";
/// A value in one of the owner's rows, which is also sent in invalid requests.
const ROW_VALUE: &str = "canary-of-a-row-value";
const REQUEST_ID: &str = "canary-request-from-the-router-1";
const PLATFORM_DATABASE_LOG: &str = "log of the platform's database";
/// The watch lists the processes every 15 ms, but less often on a busy machine.
const PROCESS_LIST_TIMEOUT: Duration = Duration::from_secs(30);

#[tokio::test(flavor = "multi_thread")]
async fn demo_leaks_no_secret() {
    let svc = Path::new(env!("CARGO_BIN_EXE_svc")).to_owned();
    let options = ScenarioOptions { svc, defect: None, store: StoreKind::Kit, keep: false, report: None };
    let variables = [
        ("RUST_LOG", "debug,tokio_postgres::query=debug,tokio_postgres::simple_query=debug"),
        ("ADMIN_TOKEN", ADMIN_TOKEN),
    ];
    let watch = ProcessWatch::start();
    let report = scenario::run_inspected(options, &variables, async |stack, checkpoint| match checkpoint {
        Checkpoint::Started => Ok(()),
        Checkpoint::Recovered => check_for_leaks(stack, &watch).await,
    });
    let report = report.await.unwrap();
    assert!(report.ok, "{:#?}", report.failed_step());
}

async fn check_for_leaks(stack: &Stack, watch: &ProcessWatch) -> Result<()> {
    let mut detector = Detector::default();
    let mut responses = trigger_error_responses(stack, &mut detector).await?;
    let databases = register_stack_secrets(stack, &mut detector)?;
    check_request_id(stack).await?;

    let leaks = scan_all(stack, &detector, watch, &responses, &databases)?;
    ensure!(leaks.is_empty(), "secrets leaked: {leaks:#?}");

    let leaked = leak_through_each_channel(stack, watch, &mut responses, &databases).await?;
    let detected = scan_all(stack, &detector, watch, &responses, &databases)?;
    for location in leaked {
        ensure!(
            detected.iter().any(|leak| leak.location.starts_with(&location)),
            "a leak through {location} was not detected: {detected:#?}"
        );
    }
    Ok(())
}

fn scan_all(
    stack: &Stack,
    detector: &Detector,
    watch: &ProcessWatch,
    responses: &[String],
    databases: &BTreeMap<String, String>,
) -> Result<BTreeSet<Leak>> {
    let mut leaks = BTreeSet::new();
    let logs = channels::read_logs(&stack.dir)?;
    ensure!(logs.len() >= 10, "too few logs: {:?}", logs.keys());
    for (path, text) in &logs {
        leaks.extend(detector.scan(&format!("log {path}"), text));
    }
    leaks.extend(detector.scan(PLATFORM_DATABASE_LOG, &stack.database_log()));
    for response in responses {
        leaks.extend(detector.scan("response", response));
    }
    let lines = watch.command_lines();
    ensure!(lines.iter().any(|line| line.contains("pg_dump")), "no pg_dump process was captured");
    for line in &lines {
        leaks.extend(detector.scan("process list", line));
    }
    for (name, url) in databases {
        leaks.extend(detector.scan(&format!("table of {name}"), &channels::dump_tables(&stack.pg, url)?));
    }
    Ok(leaks)
}

/// Uses every kind of credential, correctly and incorrectly, and returns all error responses.
async fn trigger_error_responses(stack: &Stack, detector: &mut Detector) -> Result<Vec<String>> {
    let mut error_responses = Vec::new();
    let client = reqwest::Client::builder().timeout(Duration::from_secs(20)).no_proxy().build()?;
    let owner = stack.owner_token();
    detector.register("session JWT", &owner);

    // Acts as a browser: requests an app's page with the identity provider's cookie, which opens a session.
    let page = stack.web.request(Method::GET, "/apps/notes/").header("accept", "text/html");
    let page = page.header("cookie", format!("__session={owner}")).send().await?;
    let cookies = page.headers().get_all("set-cookie").iter().filter_map(|value| value.to_str().ok());
    let mut pairs = cookies.filter_map(|cookie| cookie.split(';').next()?.split_once('='));
    let session =
        pairs.find(|(name, _)| name.ends_with("svc_session")).context("no session cookie")?.1.to_owned();
    detector.register("session cookie", &session);
    let request = stack.web.request(Method::POST, "/_svc/app-token").bearer_auth(&owner);
    let response: Value = request.json(&json!({"app": "notes"})).send().await?.json().await?;
    let token = response["token"].as_str().context("no app token")?.to_owned();
    detector.register("app token", &token);
    for path in [format!("/apps/notes/~{token}/"), format!("/apps/none/~{token}/x"), "/_svc/slots".to_owned()]
    {
        let request =
            stack.web.request(Method::GET, &path).header("cookie", format!("svc_session={session}"));
        error_responses.extend(fetch_error_response(request).await?);
    }
    let other_app = json!({"action": "find", "app": "other", "table": "notes"});
    let invalid_data = json!({"title": 7, "rank": ROW_VALUE});
    let invalid_row = json!({"action": "insert", "app": "notes", "table": "notes", "data": invalid_data});
    detector.register("value of a row", ROW_VALUE);
    // The value is stored and then found by a filter, so it passes through every layer as data.
    stack.web.insert_note(&owner, ROW_VALUE).await?;
    let find = json!({"action": "find", "app": "notes", "table": "notes", "filter": {"title": ROW_VALUE}});
    stack.web.call_bridge(&owner, &find).await?;
    for (bearer, body) in [(&token, &other_app), (&owner, &invalid_row), (&token, &invalid_row)] {
        let request = stack.web.request(Method::POST, "/api/bridge/query").bearer_auth(bearer).json(body);
        error_responses.extend(fetch_error_response(request).await?);
    }
    for bearer in [format!("{owner}x"), format!("{token}x"), session.clone(), stack.secret.clone()] {
        for path in ["/api/apps", "/_svc/app-token", "/"] {
            let request = stack.web.request(Method::GET, path).bearer_auth(&bearer);
            error_responses.extend(fetch_error_response(request).await?);
        }
    }

    // Sends requests with likely mistakes to the control API.
    let api = |method: Method, path: &str| client.request(method, format!("{}{path}", stack.api));
    for bearer in [owner.clone(), token.clone(), ADMIN_TOKEN.to_owned(), format!("{}x", stack.secret)] {
        for path in ["/vps", "/vps/fleet", "/metrics", "/vps/none/heartbeat"] {
            let request = api(Method::GET, path).bearer_auth(&bearer);
            error_responses.extend(fetch_error_response(request).await?);
        }
        let body = json!({"idpUserId": "user_demo", "registrationToken": owner, "secret": stack.secret});
        let request = api(Method::POST, "/vps/provision").bearer_auth(&stack.secret).json(&body);
        // The error response quotes the name of an unknown field, but not its value.
        error_responses.extend(fetch_error_response(request).await?);
        let request = api(Method::POST, "/vps/register").bearer_auth(&bearer).json(&json!({}));
        error_responses.extend(fetch_error_response(request).await?);
    }
    stack.store.take_down();
    let readiness = api(Method::GET, "/readyz/control").bearer_auth(&stack.secret);
    let readiness = fetch_error_response(readiness).await?;
    error_responses.push(readiness.context("/readyz/control reports no error while the store is down")?);
    stack.store.bring_up()?;
    ensure!(error_responses.len() >= 20, "too few error responses: {}", error_responses.len());
    Ok(error_responses)
}

/// Sends a request; returns the response's status, headers and body if it is an error response.
async fn fetch_error_response(request: reqwest::RequestBuilder) -> Result<Option<String>> {
    let response = request.send().await?;
    let (status, head) = (response.status(), format!("{:?}", response.headers()));
    let body = response.text().await?;
    Ok((status.is_client_error() || status.is_server_error()).then(|| format!("{status} {head} {body}")))
}

/// Registers every secret in the stack and on its hosts' disks, and returns the URLs of the running databases by name.
fn register_stack_secrets(stack: &Stack, detector: &mut Detector) -> Result<BTreeMap<String, String>> {
    detector.register("ADMIN_TOKEN", ADMIN_TOKEN);
    detector.register("PLATFORM_SECRET", &stack.secret);
    detector.register("PLATFORM_KEY", &stack.key);
    detector.register("PROVIDER_API_TOKEN", stack.provider.token());
    detector.register("the platform's secret key for the store", stack.store.secret_key());
    detector.register("the platform's database password", stack.database_password());
    for (secret, token) in stack.store.session_secrets() {
        detector.register("secret key of a store session", &secret);
        detector.register("token of a store session", &token);
    }
    let mut databases = BTreeMap::from([("the platform".to_owned(), stack.platform_database_url())]);
    for host in std::fs::read_dir(stack.dir.join("hosts"))? {
        let host = host?;
        let name = host.file_name().to_string_lossy().into_owned();
        let env = |file: &str| {
            std::fs::read_to_string(host.path().join("opt/svc/env").join(file)).unwrap_or_default()
        };
        for line in ["host.env", "boot.env", "r2.env"].map(env).concat().lines() {
            let Some((variable, value)) = line.split_once('=') else { continue };
            let value = value.trim_matches(['"', '\'']);
            match variable {
                "UPGRADE_TOKEN" | "REGISTRATION_TOKEN" | "AWS_SECRET_ACCESS_KEY" | "AWS_SESSION_TOKEN" => {
                    detector.register(variable, value);
                }
                "DATABASE_URL" => {
                    let url = url::Url::parse(value)?;
                    detector.register("a host's database password", url.password().context("no password")?);
                    databases.insert(name.clone(), value.to_owned());
                }
                _ => {}
            }
        }
        // A machine whose restore failed has no key.
        let key = std::fs::read_to_string(host.path().join("var/lib/svc/tls/key.pem")).unwrap_or_default();
        for line in key.lines().filter(|line| !line.starts_with('-') && line.len() > 40) {
            detector.register("a host's TLS key", line);
        }
    }
    ensure!(databases.len() == 4, "expected 4 databases, found {}", databases.len());
    let registered: BTreeSet<&str> = detector.names().collect();
    for name in ["UPGRADE_TOKEN", "REGISTRATION_TOKEN", "AWS_SESSION_TOKEN", "a host's TLS key"] {
        ensure!(registered.contains(name), "no secret named {name} was registered");
    }
    // The first host's database stopped together with the machine's services.
    databases.retain(|_, url| accepts_connections(url));
    ensure!(databases.len() >= 2, "no host's database is running");
    Ok(databases)
}

fn accepts_connections(url: &str) -> bool {
    let Ok(url) = url::Url::parse(url) else { return false };
    let (host, port) = (url.host_str().unwrap_or_default(), url.port().unwrap_or(5432));
    std::net::TcpStream::connect((host, port)).is_ok()
}

/// Checks that a request keeps its id from the router through the host and back.
async fn check_request_id(stack: &Stack) -> Result<()> {
    let request = stack.web.request(Method::GET, "/api/apps").bearer_auth(stack.owner_token());
    let response = request.header("x-request-id", REQUEST_ID).send().await?;
    ensure!(response.status().is_success(), "{}", response.status());
    ensure!(response.headers()["x-request-id"] == REQUEST_ID, "the response has a different id");
    let logs = channels::read_logs(&stack.dir)?;
    let has_request = |name: &str| {
        let has_line = |text: &String| {
            text.lines().any(|line| line.contains(REQUEST_ID) && line.contains("request completed"))
        };
        logs.iter().any(|(path, text)| path.ends_with(name) && has_line(text))
    };
    ensure!(has_request("platform.log"), "the router's log has no line with {REQUEST_ID}");
    ensure!(has_request("svc-gateway.log"), "no gateway's log has a line with {REQUEST_ID}");
    Ok(())
}

/// Leaks a secret through every channel, and returns the locations in which it must be detected.
async fn leak_through_each_channel(
    stack: &Stack,
    watch: &ProcessWatch,
    responses: &mut Vec<String>,
    databases: &BTreeMap<String, String>,
) -> Result<Vec<String>> {
    let mut locations = vec!["response".to_owned(), "process list".to_owned()];
    let log = channels::read_logs(&stack.dir)?
        .into_keys()
        .find(|path| path.contains("/hosts/"))
        .context("no host has a log")?;
    let text = std::fs::read_to_string(&log)?;
    std::fs::write(&log, format!("{text}\nsigned with {}\n", stack.store.secret_key()))?;
    locations.push(format!("log {log}"));
    responses.push(format!("{{\"detail\": \"{}\"}}", stack.secret));

    let mut process = Command::new("/bin/sh");
    process.args(["-c", "read -r line", "sh", stack.provider.token()]).stdin(Stdio::piped());
    let mut process = process.spawn()?;
    let leaks_token = |line: &String| line.contains(stack.provider.token());
    let deadline = Instant::now() + PROCESS_LIST_TIMEOUT;
    while !watch.command_lines().iter().any(leaks_token) {
        ensure!(Instant::now() < deadline, "the process was not captured within {PROCESS_LIST_TIMEOUT:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    drop(process.stdin.take());
    process.wait()?;

    let (client, connection) =
        tokio_postgres::connect(&stack.platform_database_url(), tokio_postgres::NoTls).await?;
    tokio::spawn(connection);
    // PostgreSQL logs the text of a failed statement.
    let failing = format!("SELECT '{}'::int", stack.provider.token());
    ensure!(client.batch_execute(&failing).await.is_err(), "the failing statement succeeded");
    locations.push(PLATFORM_DATABASE_LOG.to_owned());

    for (name, url) in databases {
        let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await?;
        tokio::spawn(connection);
        client.batch_execute("CREATE TABLE canary (value bytea)").await?;
        client.execute("INSERT INTO canary VALUES ($1)", &[&ADMIN_TOKEN.as_bytes()]).await?;
        locations.push(format!("table of {name}"));
    }
    Ok(locations)
}
