# Runs dispatches on a machine until one is audited: the agent runs as the owner's user in its own unit, a protected
# watcher audits its files, and no process remains. Prints a summary; exits at the first violation.
set -eu
home=/home/svc/home
fail() {
  echo "BROKEN $*"
  ls -la /run/svc/* $home/system/logs
  cat /run/svc/hooks/audit-gaps.jsonl /var/lib/svc/tool-calls.json 2>&1 || true
  journalctl -b --no-pager -u svc-watch -u 'svc-agent@*' | tail -n 30
  exit 1
}
as_svc() { setpriv --reuid=svc --regid=svc --init-groups "$@"; }
call_gateway() { curl -sS --max-time 90 --unix-socket /run/svc/gateway/gateway.sock -H 'content-type: application/json' "$@"; }

cat >$home/lab-agent.sh <<'AGENT'
read -r prompt
hook() { printf '{"hook_event_name":"%s","session_id":"s","tool_use_id":"%s","tool_name":"Bash","tool_input":{"command":"x"},"cwd":"%s"}' "$1" "$SVC_DISPATCH_ID" "$PWD" | /opt/svc/bin/svc-hook claude-code; }
hook PreToolUse
mkdir -p lab/deep && id -un >lab/deep/who && cat /proc/self/cgroup >lab/deep/where
hook PostToolUse
cat /opt/svc/env/host.env >lab/deep/secret 2>/dev/null && echo read >>lab/deep/where
kill -9 "$(cat lab-watch.pid)" 2>/dev/null && echo killed >>lab/deep/where
for socket in gateway/gateway.sock owner/agent.sock owner/code.sock; do
  curl -sS --max-time 5 --unix-socket /run/svc/$socket http://localhost/api/usage >/dev/null 2>&1 && echo "reached $socket" >>lab/deep/where
done
# Tries the socket through another process's view of the file system, which processes of the same user can access.
for root in /proc/[0-9]*/root; do
  code=$(curl -sS -o /dev/null -w '%{http_code}' --max-time 5 --unix-socket $root/run/svc/gateway/gateway.sock http://localhost/api/usage 2>/dev/null)
  [ "${code:-0}" = 200 ] && echo "reached the gateway through $root" >>lab/deep/where
done
setsid sleep 4321 &
echo '{"type":"tool","id":"t","name":"Bash","input":{"command":"x"}}'
echo '{"type":"toolResult","id":"t","status":"success"}'
echo '{"type":"usage","tokensIn":10,"tokensOut":2,"cost":0.125}'
echo '{"type":"result","status":"success","text":"it is done"}'
AGENT
chown svc:svc $home/lab-agent.sh
cat >$home/system/config.json <<'CONFIG'
{"agents": {"lab": {"adapter": "json-lines", "command": ["sh", "lab-agent.sh"]}}}
CONFIG
chown svc-gateway:svc $home/system/config.json

timeout 120 systemctl is-system-running --wait >/dev/null || true
[ "$(systemctl is-active svc-agent.socket)" = active ] || fail "svc-agent.socket is $(systemctl is-active svc-agent.socket)"
[ "$(systemctl is-active svc-watch.service)" = active ] || fail "svc-watch is $(systemctl is-active svc-watch.service)"
systemctl show -P MainPID svc-watch.service >$home/lab-watch.pid
[ "$(stat -c %U /proc/"$(cat $home/lab-watch.pid)")" = svc-gateway ] || fail "svc-watch is not running as svc-gateway"
as_svc grep -q svc-hook /home/svc/.claude/settings.json || fail "no hook in the owner's settings"

# The owner's own processes may read, but not change anything.
code() { as_svc curl -sS -o /dev/null -w '%{http_code}' --max-time 20 --unix-socket /run/svc/gateway/gateway.sock -H 'content-type: application/json' "$@"; }
[ "$(code http://localhost/api/limits)" = 200 ] || fail "a terminal may not read the limits"
[ "$(code -X PUT -d '{"daily": 1000}' http://localhost/api/limits)" = 403 ] || fail "a terminal may change the limits"
[ "$(code -d '{"prompt": "x"}' http://localhost/api/dispatch)" = 403 ] || fail "a terminal may start a dispatch"

# The time that an svc program takes to start on this machine, in milliseconds.
began=$(date +%s%N)
for _ in 1 2 3 4 5 6 7 8 9 10; do /opt/svc/bin/svc-hook --version >/dev/null; done
start_ms=$((($(date +%s%N) - began) / 10000000))

# A hook times out after 500 ms, and takes about 50 ms to start on an emulated processor, so audit entries may be
# missing. In that case, a gap must be recorded. At least one of several dispatches must be audited.
audit=$home/system/logs/audit.jsonl
for try in 1 2 3 4 5 6 7 8; do
  id=lab-$try
  rm -rf $home/lab
  response=$(call_gateway -d "{\"id\": \"$id\", \"prompt\": \"do it\"}" http://localhost/api/dispatch)
  echo "$response" | grep -q '"text":"it is done"' || fail "unexpected dispatch result: $response"
  [ "$(cat $home/lab/deep/who)" = svc ] || fail "the agent ran as $(cat $home/lab/deep/who)"
  grep -q '/svcagents.slice/svc-agent@' $home/lab/deep/where || fail "the agent ran in $(cat $home/lab/deep/where)"
  grep -q '^read$\|^killed$\|^reached' $home/lab/deep/where && fail "the agent reached forbidden resources: $(cat $home/lab/deep/where)"
  for cmdline in /proc/[0-9]*/cmdline; do
    [ "$(tr '\0' ' ' <"$cmdline" 2>/dev/null)" = 'sleep 4321 ' ] && fail "a process outlived its dispatch"
  done
  for _ in 1 2 3 4 5 6 7 8 9 10; do
    audited=$(grep -c "\"path\":\"lab.*\"dispatchId\":\"$id\"" $audit 2>/dev/null || true)
    late=$(grep -c '"why":"late"' $audit 2>/dev/null || true)
    recorded=$(grep -h "\"id\":\"$id\"" $home/system/logs/interactions-*.jsonl 2>/dev/null | grep -c '"cost":0.125' || true)
    [ "$recorded" = 1 ] && { [ "${audited:-0}" -ge 4 ] || [ "${late:-0}" -ge "$try" ]; } && break
    sleep 1
  done
  [ "$recorded" = 1 ] || fail "dispatch $id has ${recorded:-0} records with its cost in interactions-*.jsonl; expected 1"
  [ "${audited:-0}" -ge 4 ] && break
  [ "${late:-0}" -ge "$try" ] || fail "dispatch $id: expected 4 audited paths or $try recorded gaps, found ${audited:-0} and ${late:-0}: $(cat $audit)"
done
[ "$audited" -ge 4 ] || fail "none of $try dispatches has 4 audited paths; svc-hook starts in $start_ms ms: $(cat $audit)"
as_svc sh -c "echo x >>$home/system/logs/audit.jsonl" 2>/dev/null && fail "svc may write the audit log"
failed=$(systemctl --failed --plain --no-legend | grep svc- || true)
[ -z "$failed" ] || fail "failed units: $failed"
echo "one dispatch as svc in its own unit, \$0.125, $audited paths audited in dispatch $try, no process left; svc-hook starts in $start_ms ms"
