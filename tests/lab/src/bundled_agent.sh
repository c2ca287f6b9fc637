# Dispatches to the coding agents in a full release, against a stub for their model's API at $MODEL on the lab's host.
# Each agent writes a file with one of its own tools; the records must contain the tool and the cost. Prints a summary;
# exits at the first violation.
set -eu
home=/home/svc/home
fail() {
  echo "BROKEN $*"
  journalctl -b --no-pager -u 'svc-agent@*' | tail -n 30
  exit 1
}
call_gateway() { curl -sS --max-time 900 --unix-socket /run/svc/gateway/gateway.sock -H 'content-type: application/json' "$@"; }

for program in claude codex; do
  found=$(readlink -f /opt/svc/runtime/agents/bin/$program)
  case $found in
    /opt/svc/releases/*/runtime/agents/$program/*) ;;
    *) fail "$program resolves to $found, which is not the release's program" ;;
  esac
done

cat >$home/system/config.json <<CONFIG
{
  "agents": {
    "claude": { "adapter": "claude-code", "command": ["claude", "--allowedTools", "Write,Bash"],
                "environment": { "ANTHROPIC_BASE_URL": "$MODEL", "ANTHROPIC_API_KEY": "sk-ant-of-the-lab",
                                 "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1" } },
    "codex": { "adapter": "codex", "command": ["codex", "exec", "-s", "danger-full-access"], "model": "gpt-5.5",
               "environment": { "STUB_API_KEY": "of-the-lab", "CODEX_HOME": "/home/svc/.codex-lab" } }
  },
  "prices": { "gpt-5.5": { "input": 2, "output": 10 } }
}
CONFIG
chown svc-gateway:svc $home/system/config.json
mkdir -p /home/svc/.codex-lab
cat >/home/svc/.codex-lab/config.toml <<CONFIG
model = "gpt-5.5"
model_provider = "stub"
approval_policy = "never"
[model_providers.stub]
name = "stub"
base_url = "$MODEL/v1"
env_key = "STUB_API_KEY"
wire_api = "responses"
CONFIG
chown -R svc:svc /home/svc/.codex-lab

for agent in claude codex; do
  rm -f $home/lab-from-$agent
  response=$(call_gateway -d "{\"id\": \"bundled-$agent\", \"agentName\": \"$agent\", \"prompt\": \"[[$agent]] do it\"}" http://localhost/api/dispatch)
  echo "$response" | grep -q '"text":"All done."' || fail "unexpected result from $agent: $response"
  [ "$(stat -c %U $home/lab-from-$agent)" = svc ] || fail "$agent did not write its file"
  recorded=
  for _ in 1 2 3 4 5 6 7 8 9 10; do
    recorded=$(grep -h "\"id\":\"bundled-$agent\"" $home/system/logs/interactions-*.jsonl 2>/dev/null || true)
    [ -n "$recorded" ] && break
    sleep 1
  done
  case $recorded in
    *'"status":"success"'*) ;;
    *) fail "$agent's record is $recorded" ;;
  esac
  echo "$recorded" | grep -q '"cost":0\.0*[1-9]' || fail "$agent's record has no cost: $recorded"
  echo "$recorded" | grep -q '"tools":\[{' || fail "$agent's record has no tool: $recorded"
done
versions="Claude Code $(/opt/svc/runtime/agents/bin/claude --version), $(/opt/svc/runtime/agents/bin/codex --version)"
rm -rf $home/lab-from-* /home/svc/.codex-lab $home/system/config.json
echo "$versions: each wrote a file with a tool, which was recorded with its cost"
