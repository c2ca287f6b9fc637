//! The demo's story with every secret known: none of them may be seen in a log, an answer, an argument list or a table.
//! A detector that sees nothing is no proof, so at the end each channel is given a leak, which it has to see.

mod channels;
mod detector;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::story::{self, Checkpoint, Options, Stack};
use reqwest::Method;
use serde_json::{Value, json};

use channels::ProcessWatch;
use detector::{Detector, Leak};

const ADMIN: &str = "canary-admin-token-0123456789-0123456789";
/// What the owner keeps in a row, also where it does not fit.
const ROW: &str = "canary-of-a-row-value";
const ASKED: &str = "canary-request-from-the-router-1";

#[tokio::test(flavor = "multi_thread")]
async fn no_secret_of_the_story_is_seen_anywhere() {
    let svc = Path::new(env!("CARGO_BIN_EXE_svc")).to_owned();
    let options = Options { svc, breakage: None, keep: false, report: None };
    let more = [
        ("RUST_LOG", "debug,tokio_postgres::query=debug,tokio_postgres::simple_query=debug"),
        ("ADMIN_TOKEN", ADMIN),
    ];
    let watch = ProcessWatch::start();
    let report = story::run_inspected(options, &more, async |stack, checkpoint| match checkpoint {
        Checkpoint::Started => Ok(()),
        Checkpoint::Recovered => look(stack, &watch).await,
    });
    let report = report.await.unwrap();
    assert!(report.ok, "{:#?}", report.failed());
}

async fn look(stack: &Stack, watch: &ProcessWatch) -> Result<()> {
    let mut detector = Detector::default();
    let mut answers = provoke(stack, &mut detector).await?;
    let databases = plant_what_there_is(stack, &mut detector)?;
    one_id_everywhere(stack).await?;

    let leaks = everywhere(stack, &detector, watch, &answers, &databases)?;
    ensure!(leaks.is_empty(), "secrets were seen: {leaks:#?}");

    let leaked = leak_through_each(stack, watch, &mut answers, &databases).await?;
    let seen = everywhere(stack, &detector, watch, &answers, &databases)?;
    for place in leaked {
        ensure!(
            seen.iter().any(|leak| leak.place.starts_with(&place)),
            "a leak through {place} was not seen: {seen:#?}"
        );
    }
    Ok(())
}

fn everywhere(
    stack: &Stack,
    detector: &Detector,
    watch: &ProcessWatch,
    answers: &[String],
    databases: &BTreeMap<String, String>,
) -> Result<BTreeSet<Leak>> {
    let mut leaks = BTreeSet::new();
    let logs = channels::logs(&stack.dir)?;
    ensure!(logs.len() >= 10, "too few logs: {:?}", logs.keys());
    for (path, text) in &logs {
        leaks.extend(detector.scan(&format!("log {path}"), text));
    }
    leaks.extend(detector.scan("log of the platform's database", &stack.database_log()));
    for answer in answers {
        leaks.extend(detector.scan("answer", answer));
    }
    let lines = watch.seen();
    ensure!(lines.iter().any(|line| line.contains("pg_dump")), "the process list was not seen");
    for line in &lines {
        leaks.extend(detector.scan("process list", line));
    }
    for (name, url) in databases {
        leaks.extend(detector.scan(&format!("table of {name}"), &channels::tables(&stack.pg, url)?));
    }
    Ok(leaks)
}

/// Uses every kind of credential, well and wrongly; gives the bodies of the answers that refuse.
async fn provoke(stack: &Stack, detector: &mut Detector) -> Result<Vec<String>> {
    let mut refused = Vec::new();
    let client = reqwest::Client::builder().timeout(Duration::from_secs(20)).no_proxy().build()?;
    let owner = stack.owner();
    detector.plant("session JWT", &owner);

    // A browser: the provider's cookie, then a session of ours, then the page of an app.
    let page = stack.web.request(Method::GET, "/apps/notes/").header("accept", "text/html");
    let page = page.header("cookie", format!("__session={owner}")).send().await?;
    let cookies = page.headers().get_all("set-cookie").iter().filter_map(|value| value.to_str().ok());
    let mut pairs = cookies.filter_map(|cookie| cookie.split(';').next()?.split_once('='));
    let session =
        pairs.find(|(name, _)| name.ends_with("svc_session")).context("no session cookie")?.1.to_owned();
    detector.plant("session cookie", &session);
    let minted = stack.web.request(Method::POST, "/_svc/app-token").bearer_auth(&owner);
    let minted: Value = minted.json(&json!({"app": "notes"})).send().await?.json().await?;
    let token = minted["token"].as_str().context("no app token")?.to_owned();
    detector.plant("app token", &token);
    for path in [format!("/apps/notes/~{token}/"), format!("/apps/none/~{token}/x"), "/_svc/slots".to_owned()]
    {
        let request =
            stack.web.request(Method::GET, &path).header("cookie", format!("svc_session={session}"));
        refused.extend(refusal(request).await?);
    }
    let other = json!({"action": "find", "app": "other", "table": "notes"});
    let wrong =
        json!({"action": "insert", "app": "notes", "table": "notes", "data": {"title": 7, "rank": ROW}});
    detector.plant("value of a row", ROW);
    for _ in 0..2 {
        // Stored, and found again by a filter: it passes every layer as data.
        stack.web.insert(&owner, ROW).await?;
        let find = json!({"action": "find", "app": "notes", "table": "notes", "filter": {"title": ROW}});
        stack.web.bridge(&owner, &find).await?;
    }
    for (bearer, body) in [(&token, &other), (&owner, &wrong), (&token, &wrong)] {
        let request = stack.web.request(Method::POST, "/api/bridge/query").bearer_auth(bearer).json(body);
        refused.extend(refusal(request).await?);
    }
    for bearer in [format!("{owner}x"), format!("{token}x"), session.clone(), stack.secret.clone()] {
        for path in ["/api/apps", "/_svc/app-token", "/"] {
            refused.extend(refusal(stack.web.request(Method::GET, path).bearer_auth(&bearer)).await?);
        }
    }

    // The control API, with what its callers might send by mistake.
    let at = |method: Method, path: &str| client.request(method, format!("{}{path}", stack.api));
    for bearer in [owner.clone(), token.clone(), ADMIN.to_owned(), format!("{}x", stack.secret)] {
        for path in ["/vps", "/vps/fleet", "/metrics", "/vps/none/heartbeat"] {
            refused.extend(refusal(at(Method::GET, path).bearer_auth(&bearer)).await?);
        }
        let body = json!({"idpUserId": "user_story", "registrationToken": owner, "secret": stack.secret});
        let request = at(Method::POST, "/vps/provision").bearer_auth(&stack.secret).json(&body);
        // The name of an unknown field is told, its value is not.
        refused.extend(refusal(request).await?);
        refused
            .extend(refusal(at(Method::POST, "/vps/register").bearer_auth(&bearer).json(&json!({}))).await?);
    }
    stack.store.down();
    let backups = at(Method::GET, "/readyz").bearer_auth(&stack.secret);
    refused.extend(refusal(backups).await?);
    stack.store.up()?;
    ensure!(refused.len() >= 20, "too few refusals: {}", refused.len());
    Ok(refused)
}

/// The answer's body with its head, where it refuses.
async fn refusal(request: reqwest::RequestBuilder) -> Result<Option<String>> {
    let answer = request.send().await?;
    let (status, head) = (answer.status(), format!("{:?}", answer.headers()));
    let body = answer.text().await?;
    Ok((status.is_client_error() || status.is_server_error()).then(|| format!("{status} {head} {body}")))
}

/// Every secret that the stack and the disks of its hosts hold; gives the databases, by name.
fn plant_what_there_is(stack: &Stack, detector: &mut Detector) -> Result<BTreeMap<String, String>> {
    detector.plant("ADMIN_TOKEN", ADMIN);
    detector.plant("PLATFORM_SECRET", &stack.secret);
    detector.plant("PLATFORM_KEY", &stack.key);
    detector.plant("PROVIDER_API_TOKEN", stack.provider.token());
    detector.plant("the platform's key of the store", stack.store.secret_key());
    detector.plant("the platform's database password", stack.database_password());
    for (secret, token) in stack.store.session_secrets() {
        detector.plant("secret key of a session of the store", &secret);
        detector.plant("token of a session of the store", &token);
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
                    detector.plant(variable, value);
                }
                "DATABASE_URL" => {
                    let url = url::Url::parse(value)?;
                    detector.plant("a host's database password", url.password().context("no password")?);
                    databases.insert(name.clone(), value.to_owned());
                }
                _ => {}
            }
        }
        // The machine whose restore failed never made one.
        let key = std::fs::read_to_string(host.path().join("var/lib/svc/tls/key.pem")).unwrap_or_default();
        for line in key.lines().filter(|line| !line.starts_with('-') && line.len() > 40) {
            detector.plant("a host's TLS key", line);
        }
    }
    ensure!(databases.len() == 4, "three hosts have lived here, of {}", databases.len());
    let planted: BTreeSet<&str> = detector.names().collect();
    for name in ["UPGRADE_TOKEN", "REGISTRATION_TOKEN", "AWS_SESSION_TOKEN", "a host's TLS key"] {
        ensure!(planted.contains(name), "nothing was planted as {name}");
    }
    // The first host's database has ended with its machine's services.
    databases.retain(|_, url| answers(url));
    ensure!(databases.len() >= 2, "no host's database runs");
    Ok(databases)
}

fn answers(url: &str) -> bool {
    let Ok(url) = url::Url::parse(url) else { return false };
    let (host, port) = (url.host_str().unwrap_or_default(), url.port().unwrap_or(5432));
    std::net::TcpStream::connect((host, port)).is_ok()
}

/// One id, from the router by the host and back.
async fn one_id_everywhere(stack: &Stack) -> Result<()> {
    let request = stack.web.request(Method::GET, "/api/apps").bearer_auth(stack.owner());
    let answer = request.header("x-request-id", ASKED).send().await?;
    ensure!(answer.status().is_success(), "{}", answer.status());
    ensure!(answer.headers()["x-request-id"] == ASKED, "the answer has another id");
    let logs = channels::logs(&stack.dir)?;
    let has = |name: &str| {
        let told = |text: &String| text.lines().any(|line| line.contains(ASKED) && line.contains("answered"));
        logs.iter().any(|(path, text)| path.ends_with(name) && told(text))
    };
    ensure!(has("platform.log"), "the router's log has no line of {ASKED}");
    ensure!(has("svc-gateway.log"), "no gateway's log has a line of {ASKED}");
    Ok(())
}

/// Lets a secret out through every channel; gives the places where it has to be seen.
async fn leak_through_each(
    stack: &Stack,
    watch: &ProcessWatch,
    answers: &mut Vec<String>,
    databases: &BTreeMap<String, String>,
) -> Result<Vec<String>> {
    let mut places = vec!["answer".to_owned(), "process list".to_owned()];
    let log =
        channels::logs(&stack.dir)?.into_keys().find(|path| path.contains("/hosts/")).context("a log")?;
    let text = std::fs::read_to_string(&log)?;
    std::fs::write(&log, format!("{text}\nsigned with {}\n", stack.store.secret_key()))?;
    places.push(format!("log {log}"));
    answers.push(format!("{{\"detail\": \"{}\"}}", stack.secret));

    let mut process = Command::new("/bin/sh");
    process.args(["-c", "read -r line", "sh", stack.provider.token()]).stdin(Stdio::piped());
    let mut process = process.spawn()?;
    let told = |line: &String| line.contains(stack.provider.token());
    while !watch.seen().iter().any(told) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    drop(process.stdin.take());
    process.wait()?;

    for (name, url) in databases {
        let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await?;
        tokio::spawn(connection);
        client.batch_execute("CREATE TABLE canary (value bytea)").await?;
        client.execute("INSERT INTO canary VALUES ($1)", &[&ADMIN.as_bytes()]).await?;
        places.push(format!("table of {name}"));
    }
    Ok(places)
}
