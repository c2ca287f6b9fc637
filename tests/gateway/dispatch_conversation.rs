//! Tests conversations with an agent whose environment variables move its state to a different directory.

use anyhow::{Context, Result};
use serde_json::json;

use super::dispatch::{machine_with_runner, stream_dispatch};

/// An agent like Claude Code: it keeps a transcript, and prints how the conversation was started.
const AGENT: &str = r#"
cat > /dev/null
while [ $# -gt 0 ]; do
  case $1 in --session-id | --resume) how=$1 id=$2 ;; esac
  shift
done
state=${CLAUDE_CONFIG_DIR:-$HOME/.claude}/projects/home
mkdir -p "$state" && echo '{}' >> "$state/$id.jsonl"
echo '{"type":"system","subtype":"init","session_id":"'"$id"'","model":"m-1"}'
echo '{"type":"result","subtype":"success","is_error":false,"result":"'"$how"'","total_cost_usd":0}'
"#;

#[tokio::test]
async fn conversation_is_resumed_if_environment_moves_its_state() -> Result<()> {
    let agent = |environment: serde_json::Value| json!({ "adapter": "claude-code", "command": ["sh", "claude.sh"], "environment": environment });
    let agents = json!({ "dispatch": { "defaultAgent": "plain" }, "agents": {
        "plain": agent(json!({})),
        "moved": agent(json!({ "CLAUDE_CONFIG_DIR": "state/claude" })),
        "home": agent(json!({ "HOME": "/dev/shm/no-such-home" })),
    } });
    let (machine, _runner) = machine_with_runner(&agents)?;
    machine.write("home/svc/home/claude.sh", AGENT)?;
    let home = machine.path("other-home").display().to_string();
    let config = agents.to_string().replace("/dev/shm/no-such-home", &home);
    machine.write(super::dispatch::CONFIG, &config)?;
    let host = machine.start()?;
    for name in ["plain", "moved", "home"] {
        for expected in ["--session-id", "--resume"] {
            let body = json!({ "agentName": name, "prompt": "go", "conversationId": format!("{name}-1") });
            let streamed = stream_dispatch(&host, body).await?;
            let (_, result) = streamed.last().context("no result event")?;
            assert_eq!((&result["status"], &result["text"]), (&json!("success"), &json!(expected)), "{name}");
        }
    }
    Ok(())
}
