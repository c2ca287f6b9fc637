import json, os, signal
import os; A = os.environ["AGENTS"]
BIN = A + "/claude/node_modules/.bin/claude"
VERSION = "claude-code 2.1.330"
HOOK = "python3 " + A + "/stub/hook.py"
ALLOW = "Write,Edit,MultiEdit,NotebookEdit,Bash,Read,Task,Agent"
MATCH = "Write|Edit|MultiEdit|NotebookEdit|Bash|Task|Agent"
def hooks(label, base, events=("PreToolUse", "PostToolUse"), extra="", matcher=MATCH, **kw):
    h = dict({"type": "command", "command": "%s %s %s %s" % (HOOK, label, base, extra)}, **kw)
    nomatch = ("Stop", "SubagentStop", "UserPromptSubmit", "SessionStart", "SessionEnd", "Notification", "StopFailure", "SubagentStart", "PostToolBatch")
    return {e: [dict({"hooks": [h]}, **({} if e in nomatch else {"matcher": matcher}))] for e in events}
ALL = ("PreToolUse", "PostToolUse", "PostToolUseFailure", "PostToolBatch", "PermissionRequest", "PermissionDenied", "Stop", "StopFailure", "SubagentStart", "SubagentStop", "UserPromptSubmit", "SessionStart", "SessionEnd", "Notification")
TRY = ("PreToolUse", "PostToolUse", "PostToolUseFailure")
def prepare(c):
    sc = c["sc"]; files = ""
    def put(path, obj):
        nonlocal files
        os.makedirs(os.path.dirname(path), exist_ok=True); json.dump(obj, open(path, "w"), indent=1)
        files += "### %s\n%s\n" % (path, json.dumps(obj, indent=1))
    def sett(kind):
        v = sc.get(kind)
        return v(c["base"]) if callable(v) else v
    user = sett("user_settings") if "user_settings" in sc else {"hooks": hooks("user", c["base"], TRY)}
    if user is not None: put(c["home"] + "/.claude/settings.json", user)
    if sett("project_settings"): put(c["proj"] + "/.claude/settings.json", sett("project_settings"))
    if sett("local_settings"): put(c["proj"] + "/.claude/settings.local.json", sett("local_settings"))
    argv = [BIN] + sc.get("args", ["-p", sc.get("prompt", "[[main]] do it")])
    argv += sc.get("out", ["--output-format", "stream-json", "--verbose"])
    if sc.get("allow", True): argv += ["--allowedTools", ALLOW]
    if sett("flag_settings"):
        put(c["W"] + "/flag.json", sett("flag_settings")); argv += ["--settings", c["W"] + "/flag.json"]
    argv += sc.get("more", [])
    c["files"] = files
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": c["home"], "LANG": "C.UTF-8", "ANTHROPIC_BASE_URL": c["url"], "ANTHROPIC_API_KEY": "sk-ant-dummy",
           "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
    env.update(sc.get("env", {}))
    for k in sc.get("unset", []): env.pop(k, None)
    return argv, env
P = None
def proj(name): return "%s/w/claude/%s/proj" % (A, name)
def T(name, **i): return {"name": name, "input": i}
def bash(cmd, d="run it", **k): return T("Bash", command=cmd, description=d, **k)
def err(st, ty, msg): return {"status": st, "body": {"type": "error", "error": {"type": ty, "message": msg}, "request_id": "req_e"}}
DONE = {"text": "All done."}
def basic(n):
    p = proj(n)
    return {"main": [
        {"thinking": "I will write a file.", "text": "Writing.", "tools": [T("Write", file_path=p + "/x", content="one\ntwo\nthree\n")]},
        {"tools": [T("Edit", file_path=p + "/x", old_string="two", new_string="TWO", replace_all=False)]},
        {"tools": [bash("mkdir -p a/b && cp x z && mv x y && rm z", "Move things")]},
        {"tools": [bash("echo out; echo err >&2; exit 3", "Fail")]},
        {"tools": [T("Read", file_path=p + "/y")]},
        {"tools": [T("Edit", file_path=p + "/y", old_string="not there", new_string="q")]},
        {"tools": [T("Write", file_path=p + "/y", content="over\n")]},
        {"text": "All done.", "usage": {"output_tokens": 77}}]}
def agent(n, **k):
    p = proj(n)
    return {"main": [{"text": "Spawning.", "tools": [T("Agent", description="sub work", prompt="[[sub]] write a file", subagent_type="general-purpose", **k)]}, DONE],
            "sub": [{"text": "Sub writes.", "tools": [T("Write", file_path=p + "/sub.txt", content="s\n")]}, {"tools": [bash("echo sub-bash; false")]}, {"text": "Sub finished."}]}
W1 = lambda n: {"main": [{"tools": [T("Write", file_path=proj(n) + "/x", content="one\n")]}, DONE]}
SLEEP = {"main": [{"text": "Sleeping.", "tools": [bash("python3 -c 'import time; time.sleep(61.77)'; echo never", "Sleep")]}, DONE]}
H = lambda label, ev=TRY, extra="", **k: (lambda base: {"hooks": hooks(label, base, ev, extra, **k)})
S = SCENARIOS = {}
def add(n, tracks, **k): S[n] = dict(tracks=tracks(n) if callable(tracks) else tracks, **k)
add("basic", basic, what="write, edit, bash, failing bash, read, failing edit, overwrite; hooks on Pre/Post/PostFailure")
add("allhooks", basic, what="every hook event that may fire", user_settings=H("user", ALL))
add("partial", W1, more=["--include-partial-messages"], what="--include-partial-messages")
add("hookevents", W1, more=["--include-hook-events"], what="--include-hook-events")
add("json_out", W1, out=["--output-format", "json"], what="--output-format json")
add("text_out", W1, out=[], what="text output")
add("no_verbose", W1, out=["--output-format", "stream-json"], what="stream-json without --verbose")
add("parallel", lambda n: {"main": [{"tools": [T("Write", file_path=proj(n) + "/p1", content="1\n"), T("Write", file_path=proj(n) + "/p2", content="2\n"), bash("echo par1"), bash("echo par2")]}, DONE]}, what="four tool calls in one assistant message")
add("agent", agent, what="subagent that calls Write and Bash", user_settings=H("user", ALL))
add("agent_text", agent, what="subagent, --forward-subagent-text", more=["--forward-subagent-text"])
add("agent_old_name", lambda n: {"main": [{"tools": [T("Task", description="sub work", prompt="[[sub]] write", subagent_type="general-purpose")]}, DONE], "sub": agent(n)["sub"]}, what="old tool name Task")
add("agent_bg", lambda n: agent(n, run_in_background=True), what="background subagent", user_settings=H("user", ALL))
add("notebook", lambda n: {"main": [{"tools": [T("Write", file_path=proj(n) + "/n.ipynb", content=json.dumps({"cells": [{"cell_type": "code", "id": "c1", "metadata": {}, "source": ["1"], "outputs": [], "execution_count": None}], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))]},
    {"tools": [T("Read", file_path=proj(n) + "/n.ipynb")]}, {"tools": [T("NotebookEdit", notebook_path=proj(n) + "/n.ipynb", cell_id="c1", new_source="2", edit_mode="replace")]}, {"tools": [T("MultiEdit", file_path=proj(n) + "/n.ipynb", edits=[])]}, DONE]}, what="NotebookEdit; MultiEdit (unknown tool)")
add("err500", {"main": [err(500, "api_error", "Internal server error")]}, what="API answers 500 always", timeout=300, env={"CLAUDE_CODE_MAX_RETRIES": "3"})
add("err500_once", lambda n: {"main": [dict(err(500, "api_error", "Internal server error"), times=2, then=W1(n)["main"][0]), DONE]}, what="500 twice, then good")
add("err401", {"main": [err(401, "authentication_error", "invalid x-api-key")]}, what="401", env={"CLAUDE_CODE_MAX_RETRIES": "2"}, user_settings=H("user", ALL))
add("err401_noretry", {"main": [dict(err(401, "authentication_error", "invalid x-api-key"), headers={"x-should-retry": "false"})]}, what="401 with x-should-retry: false")
add("err403", {"main": [err(403, "permission_error", "Your account does not have access")]}, what="403", env={"CLAUDE_CODE_MAX_RETRIES": "2"})
add("err_credit", {"main": [err(400, "invalid_request_error", "Your credit balance is too low to access the Anthropic API. Please go to Plans & Billing to upgrade or purchase credits.")]}, what="400 no credit")
add("err400", {"main": [err(400, "invalid_request_error", "prompt is too long: 250000 tokens > 200000 maximum")]}, what="400 prompt too long")
add("err529", {"main": [err(529, "overloaded_error", "Overloaded")]}, what="529 overloaded always", timeout=300, env={"CLAUDE_CODE_MAX_RETRIES": "2"})
add("err429", {"main": [dict(err(429, "rate_limit_error", "This request would exceed your rate limit"), headers={"retry-after": "2"})]}, what="429 with retry-after 2", timeout=300, env={"CLAUDE_CODE_MAX_RETRIES": "2"})
add("err500_mid", lambda n: {"main": [W1(n)["main"][0], err(500, "api_error", "Internal server error")]}, what="good first turn, then 500 always", timeout=300, env={"CLAUDE_CODE_MAX_RETRIES": "1"})
add("cut", {"main": [{"text": "half a message that is cut", "cut": True}]}, what="connection dropped mid-stream", timeout=200, env={"CLAUDE_CODE_MAX_RETRIES": "1"})
add("refused", {"main": [DONE]}, what="nothing listens", timeout=200, env={"ANTHROPIC_BASE_URL": "http://127.0.0.1:9", "CLAUDE_CODE_MAX_RETRIES": "1"})
add("nokey", {"main": [DONE]}, what="no API key, not logged in", unset=["ANTHROPIC_API_KEY"])
add("max_tokens_stop", {"main": [{"text": "cut off", "stop": "max_tokens"}, DONE]}, what="stop_reason max_tokens")
add("refusal_stop", {"main": [{"text": "I cannot", "stop": "refusal"}]}, what="stop_reason refusal")
add("max_turns", W1, more=["--max-turns", "1"], what="--max-turns 1", user_settings=H("user", ALL))
add("max_budget", basic, more=["--max-budget-usd", "0.01"], what="--max-budget-usd 0.01")
add("model_known", W1, more=["--model", "claude-sonnet-4-5-20250929"], what="known full name")
add("model_alias", W1, more=["--model", "haiku"], what="alias")
add("model_unknown", W1, more=["--model", "acme-coder-9"], what="unknown model")
add("model_404", {"main": [err(404, "not_found_error", "model: acme-coder-9")]}, more=["--model", "acme-coder-9"], what="API says 404 for the model")
SID = "11111111-2222-4333-8444-555555555555"
add("session_id", W1, more=["--session-id", SID], what="--session-id")
add("resume", {"main": [DONE], "again": [{"tools": [bash("echo again")]}, {"text": "Resumed."}]}, share="session_id", prompt="[[again]] go on", more=["--resume", SID], what="--resume of session_id", user_settings=H("user", ALL))
add("resume_fork", {"main": [DONE], "again2": [{"text": "Forked."}]}, share="session_id", prompt="[[again2]] go on", more=["--resume", SID, "--fork-session"], what="--resume --fork-session")
add("session_id_used", {"main": [DONE]}, share="session_id", more=["--session-id", SID], what="--session-id already used")
add("resume_missing", {"main": [DONE]}, more=["--resume", "99999999-2222-4333-8444-555555555555"], what="--resume of an unknown session")
for nm, sg, tg in (("sigterm", signal.SIGTERM, "pid"), ("sigint", signal.SIGINT, "pid"), ("sigterm_group", signal.SIGTERM, "group"), ("sighup", signal.SIGHUP, "pid"), ("sigkill", signal.SIGKILL, "pid")):
    add(nm, SLEEP, signal=(sg, r'"tool_use"', tg), what="%s while Bash runs, to the %s" % (nm, tg), user_settings=H("user", ALL))
add("sigterm_api", {"main": [{"text": "slow answer here", "hang": 30}]}, signal=(signal.SIGTERM, 4, "pid"), what="SIGTERM while the model streams")
add("sigint_api", {"main": [{"text": "slow answer here", "hang": 30}]}, signal=(signal.SIGINT, 4, "pid"), what="SIGINT while the model streams")
add("resume_after_kill", {"main": [DONE], "again": [{"text": "Resumed after kill."}]}, share="sigkill", args=["-p", "[[again]] go on", "--continue"], what="--continue after SIGKILL mid Bash")
add("stdin_prompt", W1, args=["-p"], stdin="[[main]] from stdin\n", what="prompt by stdin")
add("stdin_and_arg", W1, stdin="extra text from stdin\n", what="prompt by argument and stdin")
add("stdin_open", {"main": [DONE]}, stdin="", keep_stdin=True, what="stdin an open, silent pipe; prompt by argument")
add("stdin_json", lambda n: dict(W1(n), two=[{"text": "Second answer."}]), args=["-p", "--input-format", "stream-json"], stdin=json.dumps({"type": "user", "message": {"role": "user", "content": "[[main]] first"}}) + "\n" + json.dumps({"type": "user", "message": {"role": "user", "content": [{"type": "text", "text": "[[two]] second"}]}}) + "\n", what="--input-format stream-json, two user messages")
add("stdin_json_replay", lambda n: W1(n), args=["-p", "--input-format", "stream-json", "--replay-user-messages"], stdin=json.dumps({"type": "user", "message": {"role": "user", "content": "[[main]] first"}}) + "\n", what="--replay-user-messages")
add("stdin_empty", {"main": [DONE]}, args=["-p"], stdin="", what="no prompt at all")
add("root_skip", W1, allow=False, more=["--dangerously-skip-permissions"], what="as root with --dangerously-skip-permissions")
add("root_skip_sandbox", W1, allow=False, more=["--dangerously-skip-permissions"], env={"IS_SANDBOX": "1"}, what="same with IS_SANDBOX=1")
add("nonroot_skip", basic, allow=False, user=True, more=["--dangerously-skip-permissions"], what="as uid 65534 with --dangerously-skip-permissions")
add("no_allow", basic, allow=False, what="nothing allowed: what happens to Write/Bash with -p", user_settings=H("user", ALL))
add("accept_edits", basic, allow=False, more=["--permission-mode", "acceptEdits"], what="--permission-mode acceptEdits")
add("outside", {"main": [{"tools": [T("Write", file_path=A + "/w/claude/outside-file", content="o\n")]}, {"tools": [bash("touch ../outside2; ls ..")]}, DONE]}, what="Write and Bash outside the project, with --allowedTools")
# hooks: behavior
for ev in ("PreToolUse", "PostToolUse"):
    k = "pre" if ev == "PreToolUse" else "post"
    for code in (1, 2):
        add("hook_%s_exit%d" % (k, code), W1, user_settings=H("user", TRY, "--event %s --exit %d --stderr 'words on stderr' --stdout 'words on stdout'" % (ev, code)), what="%s hook exits %d" % (ev, code), more=["--include-hook-events"])
add("hook_missing", W1, user_settings=lambda b: {"hooks": {"PreToolUse": [{"matcher": "*", "hooks": [{"type": "command", "command": "/nonexistent/hook arg"}]}]}}, what="hook program does not exist", more=["--include-hook-events"])
add("hook_slow", W1, user_settings=H("user", TRY, "--sleep 4"), what="hooks take 4 s each: blocking?", more=["--include-hook-events"])
add("hook_timeout", W1, user_settings=H("user", TRY, "--sleep 20", timeout=2), what="hook with timeout 2 sleeps 20", more=["--include-hook-events"])
add("hook_async", W1, user_settings=lambda b: {"hooks": hooks("user", b, TRY, "--sleep 3", **{"async": True})}, what="async: true hook sleeps 3", more=["--include-hook-events"])
add("hook_deny", W1, user_settings=lambda b: {"hooks": hooks("user", b, TRY, "--event PreToolUse --stdout '" + json.dumps({"hookSpecificOutput": {"hookEventName": "PreToolUse", "permissionDecision": "deny", "permissionDecisionReason": "not here"}}) + "'")}, what="PreToolUse JSON deny")
add("hook_allow", W1, allow=False, user_settings=lambda b: {"hooks": hooks("user", b, TRY, "--event PreToolUse --stdout '" + json.dumps({"hookSpecificOutput": {"hookEventName": "PreToolUse", "permissionDecision": "allow", "permissionDecisionReason": "ok", "updatedInput": {"file_path": proj("hook_allow") + "/changed", "content": "changed\n"}}}) + "'")}, what="PreToolUse JSON allow with updatedInput, nothing else allowed")
add("hook_context", W1, user_settings=lambda b: {"hooks": hooks("user", b, TRY, "--event PostToolUse --stdout '" + json.dumps({"hookSpecificOutput": {"hookEventName": "PostToolUse", "additionalContext": "CONTEXT WORDS"}}) + "'")}, what="PostToolUse additionalContext")
add("hook_continue_false", W1, user_settings=lambda b: {"hooks": hooks("user", b, TRY, "--event PostToolUse --stdout '" + json.dumps({"continue": False, "stopReason": "stop words"}) + "'")}, what="PostToolUse continue:false")
add("hook_stop_block", W1, user_settings=lambda b: {"hooks": dict(hooks("user", b, TRY), **hooks("stop", b, ("SessionStart",), "--exit 2 --stderr nope"))}, what="SessionStart hook exits 2")
add("merge", W1, user_settings=H("user"), project_settings=H("project"), local_settings=H("local"), flag_settings=H("flag"), what="hooks in user, project, local and --settings")
add("merge_same", W1, user_settings=H("same"), project_settings=H("same"), flag_settings=H("same"), what="the same command in three files: is it run once?")
add("sources", W1, user_settings=H("user"), project_settings=H("project"), flag_settings=H("flag"), more=["--setting-sources", "project"], what="--setting-sources project")
add("sources_none", W1, user_settings=H("user"), project_settings=H("project"), flag_settings=H("flag"), more=["--setting-sources", ""], what="--setting-sources empty")
add("flag_disable", W1, user_settings=H("user"), flag_settings=lambda b: {"disableAllHooks": True}, what="--settings with disableAllHooks")
add("bare", W1, user_settings=H("user"), flag_settings=H("flag"), more=["--bare"], what="--bare: are --settings hooks run?")
add("flag_inline", W1, user_settings=None, what="--settings with inline JSON", flag_settings=None)
S["flag_inline"]["more"] = ["--settings", json.dumps({"hooks": hooks("inline", A + "/w/claude/flag_inline/rec-flag_inline", TRY)})]
add("flag_bad", W1, user_settings=H("user"), more=["--settings", "/nonexistent.json"], what="--settings with a missing file")
add("flag_invalid", W1, user_settings=H("user"), flag_settings=lambda b: {"hooks": {"PreToolUse": "wrong"}}, what="--settings with a wrong shape")
add("matcher_empty", basic, user_settings=lambda b: {"hooks": hooks("user", b, TRY, matcher="")}, what="matcher ''")
add("matcher_star", lambda n: {"main": [{"tools": [T("Read", file_path="/etc/hostname")]}, DONE]}, user_settings=lambda b: {"hooks": hooks("user", b, TRY, matcher="*")}, what="matcher '*', a Read")
add("bash_cd", {"main": [{"tools": [bash("mkdir -p d/e && cd d/e && pwd && touch f")]}, {"tools": [bash("pwd; cd /; pwd")]}, {"tools": [bash("pwd")]}, DONE]}, what="does cd persist; what cwd do hooks see")
add("bash_bg", {"main": [{"tools": [bash("sleep 5; echo bg-done", run_in_background=True)]}, {"text": "Started it."}]}, what="Bash run_in_background")
add("bash_timeout", {"main": [{"tools": [bash("python3 -c 'import time; time.sleep(61.77)'; echo no", timeout=2000)]}, DONE]}, what="Bash tool timeout 2 s")
add("bash_kinds", {"main": [{"tools": [bash("printf 'a\\n' > r1; echo b >> r1; tee r2 < r1 >/dev/null")]}, {"tools": [bash("cat > heredoc <<'E'\nline 1\nline 2\nE\npython3 -c \"open('py','w').write('x')\"")]}, {"tools": [bash("git init -q . && git status --short")]}, DONE]}, what="other ways of changing files")

add("agent_fg", lambda n: agent(n, run_in_background=False), what="foreground subagent (run_in_background false)", user_settings=H("user", ALL))
add("agent_nobg_env", agent, what="CLAUDE_CODE_DISABLE_BACKGROUND_TASKS=1", env={"CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1"})
add("agent_two", lambda n: {"main": [{"tools": [T("Agent", description="A", prompt="[[sub]] a", subagent_type="general-purpose", run_in_background=False), T("Agent", description="B", prompt="[[sub2]] b", subagent_type="general-purpose", run_in_background=False)]}, DONE],
    "sub": [{"tools": [T("Write", file_path=proj(n) + "/s1", content="1\n")]}, {"text": "A."}], "sub2": [{"tools": [T("Write", file_path=proj(n) + "/s2", content="2\n")]}, {"text": "B."}]}, what="two foreground subagents in parallel")
add("variadic", {"main": [DONE]}, args=["-p", "--allowedTools", "Bash", "[[main]] prompt after a variadic flag"], allow=False, what="gotcha: prompt after --allowedTools is swallowed")
add("dashdash", {"main": [DONE]}, args=["-p"], more=["--", "--[[main]] prompt with dashes"], what="prompt after --")
add("dont_ask", basic, allow=False, more=["--permission-mode", "dontAsk"], what="--permission-mode dontAsk", user_settings=H("user", ALL))
add("stdin_json_wait", lambda n: dict(W1(n)), args=["-p", "--input-format", "stream-json"], stdin=json.dumps({"type": "user", "message": {"role": "user", "content": "[[main]] first"}}) + "\n", keep_stdin=True, timeout=12, what="--input-format stream-json, stdin left open: exits?")
add("partial_agent", lambda n: agent(n, run_in_background=False), more=["--include-partial-messages"], what="--include-partial-messages with a subagent")
add("print_timeoutless_bg", {"main": [{"tools": [bash("python3 -c 'import time; time.sleep(61.77)'", run_in_background=True)]}, {"text": "Left it running."}]}, timeout=100, what="background Bash still running when the turn ends")

add("bg_ceiling", {"main": [{"tools": [bash("python3 -c 'import time; time.sleep(61.77)'", run_in_background=True)]}, {"text": "Left it running."}]}, timeout=100, what="CLAUDE_CODE_PRINT_BG_WAIT_CEILING_MS=2000 with a background Bash", env={"CLAUDE_CODE_PRINT_BG_WAIT_CEILING_MS": "2000"})
add("bg_disabled", {"main": [{"tools": [bash("echo fg", run_in_background=True)]}, DONE]}, what="CLAUDE_CODE_DISABLE_BACKGROUND_TASKS=1 with a background Bash", env={"CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1"})
add("resume_other_dir", {"main": [DONE], "again": [{"text": "Resumed."}]}, share="session_id", cwd="other", prompt="[[again]] go on", more=["--resume", SID], what="--resume from another directory")
add("no_persist", W1, more=["--no-session-persistence"], what="--no-session-persistence")
add("full_traffic", W1, unset=["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER"], what="without the two traffic variables, no internet: does it hang?")
add("sigterm_bgagent", lambda n: {"main": [{"tools": [T("Agent", description="sub", prompt="[[sub]] x", subagent_type="general-purpose")]}, DONE], "sub": [{"tools": [bash("python3 -c 'import time; time.sleep(61.77)'")]}, DONE]}, signal=(signal.SIGTERM, r'"type":"result"', "pid"), signal_delay=2.0, what="SIGTERM while a background agent runs, after the first result")
add("budget_resume", {"main": [DONE], "again": [{"tools": [bash("echo a")]}, {"text": "Resumed."}]}, share="session_id", prompt="[[again]] go on", more=["--resume", SID, "--max-budget-usd", "0.03"], what="--max-budget-usd 0.03 on a resumed session that has cost more (one call costs 0.024)")
add("matcher_task", lambda n: agent(n, run_in_background=False), what="matcher Task only, and matcher Agent only: which one sees the Agent tool", user_settings=lambda b: {"hooks": {"PreToolUse": hooks("m_task", b, ("PreToolUse",), matcher="Task")["PreToolUse"] + hooks("m_agent", b, ("PreToolUse",), matcher="Agent")["PreToolUse"]}})
add("agent_fg_text", lambda n: agent(n, run_in_background=False), more=["--forward-subagent-text"], what="foreground subagent, --forward-subagent-text")
