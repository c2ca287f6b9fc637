import json, os, signal
import os; A = os.environ["AGENTS"]
BIN = A + "/codex/node_modules/.bin/codex"
VERSION = "codex-cli 0.169.0"
EVENTS = ("PreToolUse", "PostToolUse", "PermissionRequest", "SessionStart", "SessionEnd", "UserPromptSubmit", "Stop", "SubagentStart", "SubagentStop", "Interrupt")
def hooks(base, events=EVENTS, extra="", **k):
    return {"hooks": {e: [{"hooks": [dict({"type": "command", "command": "python3 %s/stub/hook.py user %s %s" % (A, base, extra)}, **k)]}] for e in events}}
def prepare(c):
    sc = c["sc"]; ch = c["home"] + "/.codex"; os.makedirs(ch, exist_ok=True); files = ""
    toml = '''model = "%s"
model_provider = "stub"
approval_policy = "never"
notify = ["python3", "%s/stub/notify.py", "%s"]
[model_providers.stub]
name = "stub"
base_url = "%s/v1"
env_key = "STUB_API_KEY"
wire_api = "responses"
request_max_retries = %d
stream_max_retries = %d
%s''' % (sc.get("model", "gpt-5.5"), A, c["base"], c["url"], sc.get("retries", 1), sc.get("retries", 1), sc.get("toml", ""))
    open(ch + "/config.toml", "w").write(toml); files += "### ~/.codex/config.toml\n" + toml
    if sc.get("hooks", True):
        h = sc["hookcfg"](c["base"]) if sc.get("hookcfg") else hooks(c["base"])
        open(ch + "/hooks.json", "w").write(json.dumps(h, indent=1)); files += "### ~/.codex/hooks.json\n" + json.dumps(h, indent=1) + "\n"
    c["files"] = files
    argv = [BIN, "exec"] + sc.get("args", [sc.get("prompt", "[[main]] do it")]) + sc.get("out", ["--json"]) + ["--skip-git-repo-check"] + sc.get("flags", ["--dangerously-bypass-approvals-and-sandbox", "--dangerously-bypass-hook-trust"]) + sc.get("more", [])
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": c["home"], "LANG": "C.UTF-8", "STUB_API_KEY": "dummy"}
    env.update(sc.get("env", {}))
    return argv, env
def proj(n): return "%s/w/codex/%s/proj" % (A, n)
def sh(cmd, **k): return {"name": "exec_command", "input": dict({"cmd": cmd}, **k)}
def patch(p): return {"name": "apply_patch", "input": p, "custom": True}
DONE = {"text": "All done."}
def basic(n):
    return {"main": [
        {"thinking": "**Plan**\n\nwrite a file", "text": "Writing.", "tools": [patch("*** Begin Patch\n*** Add File: x\n+one\n+two\n*** End Patch\n")]},
        {"tools": [patch("*** Begin Patch\n*** Update File: x\n@@\n-two\n+TWO\n*** End Patch\n")]},
        {"tools": [sh("mkdir -p a/b && cp x z && mv x y && rm z")]},
        {"tools": [sh("echo out; echo err >&2; exit 3")]},
        {"tools": [patch("*** Begin Patch\n*** Update File: y\n@@\n-nothere\n+q\n*** End Patch\n")]},
        {"tools": [patch("*** Begin Patch\n*** Update File: y\n*** Move to: w\n@@\n-TWO\n+three\n*** Add File: v\n+v\n*** End Patch\n"), sh("ls; cat w")]},
        {"tools": [patch("*** Begin Patch\n*** Delete File: w\n*** End Patch\n")]},
        {"text": "All done."}]}
def err(st, ty, msg, code=None): return {"status": st, "body": {"error": {"type": ty, "message": msg, "code": code}}}
W1 = {"main": [{"tools": [sh("echo hi > f")]}, DONE]}
SLEEP = {"main": [{"text": "Sleeping.", "tools": [sh("python3 -c 'import time; time.sleep(61.77)'; echo never", yield_time_ms=60000)]}, DONE]}
S = SCENARIOS = {}
def add(n, tracks, **k): S[n] = dict(tracks=tracks(n) if callable(tracks) else tracks, **k)
add("basic", basic, what="apply_patch add/update/move/delete, exec_command ok and failing; hooks")
add("plain", W1, out=[], what="without --json")
add("shell_patch", {"main": [{"tools": [sh("apply_patch <<'E'\n*** Begin Patch\n*** Add File: s\n+one\n*** End Patch\nE")]}, DONE]}, what="apply_patch through the shell tool")
add("parallel", {"main": [{"tools": [sh("echo 1; sleep 1"), sh("echo 2; sleep 1")]}, DONE]}, what="two calls in one response")
add("sandbox", W1, flags=["--sandbox", "workspace-write", "--dangerously-bypass-hook-trust"], what="--sandbox workspace-write")
add("readonly", W1, flags=["--dangerously-bypass-hook-trust"], what="default sandbox (read-only)")
add("untrusted_hooks", W1, flags=["--dangerously-bypass-approvals-and-sandbox"], what="hooks not trusted")
add("model_unknown", W1, more=["-m", "acme-coder-9"], what="unknown model")
add("err500", {"main": [err(500, "server_error", "Internal")]}, what="500", timeout=120)
add("err401", {"main": [err(401, "invalid_request_error", "Incorrect API key provided", "invalid_api_key")]}, what="401", timeout=120)
add("err429", {"main": [err(429, "rate_limit_exceeded", "Rate limit")]}, what="429", timeout=120)
add("failed", {"main": [{"text": "half", "failed": {"code": "context_length_exceeded", "message": "too long"}}]}, what="response.failed context_length_exceeded")
add("cut", {"main": [{"text": "half", "cut": True}]}, what="stream cut", timeout=120)
add("sigterm", SLEEP, signal=(signal.SIGTERM, "command_execution", "pid"), what="SIGTERM while a command runs")
add("sigint", SLEEP, signal=(signal.SIGINT, "command_execution", "pid"), what="SIGINT while a command runs")
add("resume", {"main": [DONE], "again": [{"text": "Resumed."}]}, share="basic", args=["resume", "--last", "[[again]] go on"], what="exec resume --last of basic")
add("stdin_prompt", W1, args=["-"], stdin="[[main]] from stdin\n", what="prompt by stdin")
add("hook_exit2", W1, hookcfg=lambda b: hooks(b, extra="--event PreToolUse --exit 2 --stderr 'words on stderr'"), what="PreToolUse exits 2")
add("hook_exit1", W1, hookcfg=lambda b: hooks(b, extra="--event PreToolUse --exit 1 --stderr 'words on stderr'"), what="PreToolUse exits 1")
add("hook_timeout", W1, hookcfg=lambda b: hooks(b, extra="--event PreToolUse --sleep 20", timeout=2), what="PreToolUse with timeout 2 sleeps 20")
add("agent", {"main": [{"tools": [{"name": "spawn_agent", "namespace": "multi_agent_v1", "input": {"message": "[[sub]] write a file"}}]}, {"tools": [sh("sleep 4")]}, DONE],
    "sub": [{"tools": [patch("*** Begin Patch\n*** Add File: sub.txt\n+s\n*** End Patch\n")]}, {"text": "Sub finished."}]}, what="spawn_agent (multi_agent_v1)")

add("model_old", W1, more=["-m", "gpt-5.1-codex"], what="a model not in the bundled catalog")
add("code_mode", {"main": [{"tools": [{"name": "exec", "custom": True, "input": "const r = await tools.exec_command({cmd: 'echo hi > f; cat f'}); text(r.output); const p = await tools.apply_patch('*** Begin Patch\\n*** Add File: x\\n+one\\n*** End Patch\\n'); text(JSON.stringify(p));"}]}, DONE]}, model="gpt-5.6-luna", what="code mode model (tool exec with JS)")
