import json, os, signal
import os; A = os.environ["AGENTS"]
BIN = A + "/opencode/node_modules/.bin/opencode"
VERSION = "opencode 1.18.33"
PLUGIN = '''import { appendFileSync } from "node:fs";
const put = (kind, o) => appendFileSync("%s.hooks.jsonl", JSON.stringify({ kind, ...o }) + "\\n");
export const Rec = async ({ directory, worktree }) => { put("init", { directory, worktree, env: Object.fromEntries(Object.entries(process.env).filter(([k]) => /^(OPENCODE|AGENT|HOME|PWD)/.test(k))) }); return {
  event: async ({ event }) => { if (!/delta|^tui|^server|^lsp|^plugin|^catalog|^reference|^integration/.test(event.type)) put("event", { event }); },
  "tool.execute.before": async (input, output) => { put("tool.execute.before", { input, output }); %s },
  "tool.execute.after": async (input, output) => { put("tool.execute.after", { input, output }); },
  "shell.env": async (input, output) => { output.env.FROM_PLUGIN = "1"; put("shell.env", { input }); },
}; };
'''
def prepare(c):
    sc = c["sc"]; files = ""
    cfg = {"$schema": "https://opencode.ai/config.json", "model": sc.get("model", "anthropic/claude-sonnet-4-5"), "autoupdate": False, "share": "disabled",
           "provider": {"anthropic": {"options": {"baseURL": c["url"] + "/v1", "apiKey": "dummy"}},
                        "stub": {"npm": "@ai-sdk/openai-compatible", "name": "Stub", "options": {"baseURL": c["url"] + "/v1", "apiKey": "dummy"},
                                 "models": {"acme": {"name": "Acme", "limit": {"context": 100000, "output": 8000}, "cost": {"input": 1, "output": 5, "cache_read": 0.1, "cache_write": 1.25}}}}}}
    cfg.update(sc.get("cfg", {}))
    p = c["home"] + "/.config/opencode"; os.makedirs(p + "/plugins", exist_ok=True)
    json.dump(cfg, open(p + "/opencode.json", "w"), indent=1)
    files += "### ~/.config/opencode/opencode.json\n" + json.dumps(cfg, indent=1) + "\n"
    pl = PLUGIN % (c["base"], sc.get("before", ""))
    open(p + "/plugins/rec.js", "w").write(pl); files += "### ~/.config/opencode/plugins/rec.js\n" + pl
    c["files"] = files
    argv = [BIN, "run"] + sc.get("args", [sc.get("prompt", "[[main]] do it")]) + sc.get("out", ["--format", "json"]) + sc.get("more", [])
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": c["home"], "LANG": "C.UTF-8", "OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1", "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1"}
    env.update(sc.get("env", {}))
    return argv, env
def proj(n): return "%s/w/opencode/%s/proj" % (A, n)
def T(name, **i): return {"name": name, "input": i}
def bash(cmd, **k): return T("bash", command=cmd, description="run it", **k)
DONE = {"text": "All done."}
def basic(n):
    p = proj(n)
    return {"main": [
        {"thinking": "I will write a file.", "text": "Writing.", "tools": [T("write", filePath=p + "/x", content="one\ntwo\n")]},
        {"tools": [T("edit", filePath=p + "/x", oldString="two", newString="TWO")]},
        {"tools": [bash("mkdir -p a/b && cp x z && mv x y && rm z")]},
        {"tools": [bash("echo out; echo err >&2; exit 3")]},
        {"tools": [T("read", filePath=p + "/y")]},
        {"tools": [T("edit", filePath=p + "/y", oldString="not there", newString="q")]},
        {"tools": [T("write", filePath=p + "/y", content="over\n"), bash("echo par")]},
        {"text": "All done.", "usage": {"output_tokens": 77}}]}
def err(st, ty, msg, **h): return {"status": st, "body": {"type": "error", "error": {"type": ty, "message": msg}}, "headers": h}
W1 = lambda n: {"main": [{"tools": [T("write", filePath=proj(n) + "/x", content="one\n")]}, DONE]}
SLEEP = {"main": [{"text": "Sleeping.", "tools": [bash("python3 -c 'import time; time.sleep(61.77)'; echo never")]}, DONE]}
S = SCENARIOS = {}
def add(n, tracks, **k): S[n] = dict(tracks=tracks(n) if callable(tracks) else tracks, **k)
add("basic", basic, what="anthropic provider with baseURL: write, edit, bash, failing bash, read, failing edit, two in parallel", more=["--thinking"])
add("compat", W1, model="stub/acme", what="@ai-sdk/openai-compatible provider")
add("plain", W1, out=[], what="default format")
add("agent", lambda n: {"main": [{"tools": [T("task", description="sub work", prompt="[[sub]] write", subagent_type="general")]}, DONE], "sub": [{"tools": [T("write", filePath=proj(n) + "/sub.txt", content="s\n")]}, {"text": "Sub finished."}]}, what="subagent through task")
add("err401", {"main": [err(401, "authentication_error", "invalid x-api-key")]}, what="401", timeout=60)
add("err400", {"main": [err(400, "invalid_request_error", "bad thing")]}, what="400", timeout=60)
add("err500", {"main": [err(500, "api_error", "Internal")]}, what="500 always", timeout=45)
add("model_unknown", W1, more=["-m", "anthropic/acme-9"], what="unknown model")
add("outside", {"main": [{"tools": [T("write", filePath=A + "/w/opencode/outside-file", content="o\n")]}, DONE]}, what="write outside the project without --auto")
add("outside_auto", {"main": [{"tools": [T("write", filePath=A + "/w/opencode/outside-file", content="o\n")]}, DONE]}, more=["--auto"], what="the same with --auto")
add("ask_bash", {"main": [{"tools": [bash("echo hi > f")]}, DONE]}, cfg={"permission": {"bash": "ask"}}, what="permission bash: ask", timeout=40)
add("sigterm", SLEEP, signal=(signal.SIGTERM, 16, "pid"), what="SIGTERM while bash runs")
add("sigint", SLEEP, signal=(signal.SIGINT, 16, "pid"), what="SIGINT while bash runs")
add("resume", {"main": [DONE], "again": [{"text": "Resumed."}]}, share="basic", prompt="[[again]] go on", more=["--continue"], what="--continue after basic")
add("stdin_prompt", W1, args=[], stdin="[[main]] from stdin\n", what="prompt by stdin")
add("plugin_throw", W1, before='throw new Error("blocked by plugin");', what="tool.execute.before throws")
