//! Tests what each user's processes, and an agent with its token, can do over the machine's Unix sockets.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use kit::pg::test_database;
use serde_json::{Value, json};

use super::dispatch::{CONFIG, request_dispatch, start_runner, wait_until_finished};
use super::host::{Host, Machine, UNREACHABLE_DATABASE, host_with_app, unique_name};

/// The owner's user id and group id, from the machine's sysusers configuration.
const OWNER_UID: u32 = 1940;
const OTHER_UID: u32 = 1941;

/// Starts a gateway whose socket the owner's group can open. Returns `None` unless the test runs as root.
fn host_with_two_users() -> Result<Option<Host>> {
    if !nix::unistd::geteuid().is_root() {
        kit::skip::record("only root can run processes as two users");
        return Ok(None);
    }
    let machine = Machine::new(UNREACHABLE_DATABASE)?;
    fs::set_permissions(machine.path(""), Permissions::from_mode(0o755))?;
    for (dir, uid) in [("run/svc/gateway", 0), ("run/svc/owner", OWNER_UID)] {
        let dir = machine.path(dir);
        fs::create_dir_all(&dir)?;
        chown(&dir, Some(uid), Some(OWNER_UID))?;
        fs::set_permissions(&dir, Permissions::from_mode(0o750))?;
    }
    Ok(Some(machine.start()?))
}

/// Sends a request over the gateway's socket from a process that runs as this user, and returns the response's status.
fn send_as_user(uid: u32, socket: &Path, method: &str, path: &str, body: &str) -> Result<String> {
    let mut command = Command::new("curl");
    command.args(["-sS", "--max-time", "20", "-o", "/dev/null", "-w", "%{http_code}"]);
    command.arg("--unix-socket").arg(socket).args(["-X", method, "-H", "content-type: application/json"]);
    command.args(["-d", body]).arg(format!("http://localhost{path}"));
    let output = command.uid(uid).gid(OWNER_UID).output().context("cannot run curl")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[tokio::test]
async fn owner_process_cannot_raise_limits_or_start_dispatches() -> Result<()> {
    let Some(host) = host_with_two_users()? else { return Ok(()) };
    let socket = host.socket();
    let status_as = |uid, method, path, body| send_as_user(uid, &socket, method, path, body);
    for path in ["/api/usage", "/api/limits", "/api/apps", "/api/interactions", "/api/audit"] {
        assert_eq!(status_as(OWNER_UID, "GET", path, "")?, "200", "{path}");
    }
    // Access is granted; only the database is missing.
    assert_eq!(status_as(OWNER_UID, "POST", "/api/bridge/query", r#"{"action":"schemas"}"#)?, "503");
    for (method, path, body) in [
        ("PUT", "/api/limits", r#"{"daily":1000}"#),
        ("POST", "/api/dispatch", r#"{"prompt":"spend"}"#),
        ("GET", "/api/dispatch", ""),
        ("POST", "/api/side-database", "{}"),
        ("GET", "/api/side-database", ""),
        ("DELETE", "/api/side-database", ""),
        ("POST", "/_svc/internal/backup", ""),
        ("GET", "/", ""),
    ] {
        assert_eq!(status_as(OWNER_UID, method, path, body)?, "403", "{method} {path}");
        assert_eq!(status_as(OTHER_UID, method, path, body)?, "403", "{method} {path}");
    }
    assert_eq!(
        status_as(OTHER_UID, "GET", "/api/usage", "")?,
        "403",
        "group membership must not grant access to another user"
    );
    assert_eq!(
        status_as(0, "PUT", "/api/limits", r#"{"daily":1000}"#)?,
        "200",
        "root must be able to set limits"
    );
    Ok(())
}

const AGENT: &str = r#"
read -r line
call() {
  curl -sS --max-time 20 -o "$1.json" -w '%{http_code}\n' --unix-socket "$SVC_BRIDGE_SOCKET" \
    -H "authorization: Bearer $2" -H 'content-type: application/json' ${3:+-d "$3"} "http://localhost$4" >>codes
}
find='{"action":"find","app":"APP","table":"things"}'
call own "$SVC_BRIDGE_TOKEN" "$(echo "$find" | sed "s/APP/$OWN_APP/")" /api/bridge/query
call other "$SVC_BRIDGE_TOKEN" "$(echo "$find" | sed "s/APP/$OTHER_APP/")" /api/bridge/query
call schemas "$SVC_BRIDGE_TOKEN" '' /api/bridge/schemas
call limits "$SVC_BRIDGE_TOKEN" '{"daily":1000}' /api/limits
call dispatch "$SVC_BRIDGE_TOKEN" '{"prompt":"x"}' /api/dispatch
call forged "svc_agent_0000" "$find" /api/bridge/query
call none "" "$find" /api/bridge/query
printf '%s' "$SVC_BRIDGE_TOKEN" >token
echo "{\"type\":\"text\",\"text\":\"my token is $SVC_BRIDGE_TOKEN\"}"
echo '{"type":"result","status":"success"}'
"#;

#[tokio::test]
async fn agent_can_use_bridge_for_its_apps_only_while_running() -> Result<()> {
    let (database, notes, diary) = (test_database().await?, unique_name("notes"), unique_name("diary"));
    let things = json!({ "things": { "columns": { "title": "text" } } });
    let host = host_with_app(&database, &notes, &things).await?;
    host.machine.add_app(&diary, &things)?;
    host.wait_until_registered(&diary).await?;
    host.machine.write("home/svc/home/agent.sh", AGENT)?;
    let agent = json!({ "adapter": "json-lines", "command": ["sh", "agent.sh"], "apps": [notes],
        "environment": { "OWN_APP": notes, "OTHER_APP": diary } });
    host.machine.write(CONFIG, &json!({ "agents": { "coder": agent } }).to_string())?;
    fs::create_dir_all(host.machine.path("run/svc/owner"))?;
    let _runner = start_runner(&host.machine.path(""))?;
    host.query(
        &json!({ "action": "insert", "app": notes, "table": "things", "data": { "title": "from notes" } }),
    )
    .await?;
    host.wait_until("the dispatch is accepted", async || {
        let (_, accepted) =
            request_dispatch(&host, json!({ "id": "d1", "prompt": "x", "agentName": "coder" })).await?;
        Ok(accepted["id"] == "d1")
    })
    .await?;
    let response = wait_until_finished(&host, "d1").await?;
    let home = host.machine.path("home/svc/home");
    let codes = fs::read_to_string(home.join("codes"))?;
    assert_eq!(
        codes.lines().collect::<Vec<_>>(),
        ["200", "403", "200", "404", "404", "401", "401"],
        "{response}"
    );
    let read = |name: &str| -> Result<Value> { Ok(serde_json::from_slice(&fs::read(home.join(name))?)?) };
    assert_eq!(read("own.json")?["data"][0]["title"], "from notes");
    let schemas = read("schemas.json")?;
    assert_eq!(
        schemas["data"].as_array().map(Vec::len),
        Some(1),
        "the agent must see only its own apps: {schemas}"
    );
    assert!(read("other.json")?["detail"].to_string().contains(&format!("only the tables of {notes}.")));
    // The dispatch's output does not contain its token, which is invalid after the dispatch.
    let token = fs::read_to_string(home.join("token"))?;
    assert!(token.len() > 40 && !response.to_string().contains(&token), "{response}");
    let socket = host.machine.path("run/svc/bridge/bridge.sock");
    let mut request = Command::new("curl");
    request.args(["-sS", "-o", "/dev/null", "-w", "%{http_code}", "--unix-socket"]).arg(socket);
    request.args(["-H", &format!("authorization: Bearer {token}"), "http://localhost/api/bridge/schemas"]);
    assert_eq!(String::from_utf8_lossy(&request.output()?.stdout), "401");
    Ok(())
}
