#!/usr/bin/env python3
"""hook.py LABEL OUTBASE [--sleep S] [--exit N] [--stderr T] [--stdout T] [--event E] [--tool T]
Appends its stdin as one line to OUTBASE.hooks.jsonl, and its label, environment and working directory to OUTBASE.hookenv.jsonl"""
import json, os, sys, time, argparse, signal
p = argparse.ArgumentParser(); p.add_argument("label"); p.add_argument("out")
p.add_argument("--sleep", type=float, default=0); p.add_argument("--exit", type=int, default=0)
p.add_argument("--stderr"); p.add_argument("--stdout"); p.add_argument("--event"); p.add_argument("--tool")
a = p.parse_args()
raw = sys.stdin.read()
def put(path, line):
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666); os.write(fd, line.encode() + b"\n"); os.close(fd)
try:
    j = json.loads(raw); line = json.dumps(j, ensure_ascii=False)
except ValueError:
    j = {}; line = json.dumps({"unparsed": raw})
put(a.out + ".hooks.jsonl", line)
env = {k: v for k, v in os.environ.items() if k not in ("PATH", "ANTHROPIC_API_KEY", "LS_COLORS", "_", "SHLVL", "OLDPWD")}
if "ANTHROPIC_API_KEY" in os.environ: env["ANTHROPIC_API_KEY"] = "<set>"
def log(what): put(a.out + ".hookenv.jsonl", json.dumps({"t": round(time.time(), 2), "what": what, "label": a.label, "event": j.get("hook_event_name"), "tool": j.get("tool_name"),
    "cwd": os.getcwd(), "sid_is_leader": os.getsid(0) == os.getpid(), "pgid_is_self": os.getpgid(0) == os.getpid(), "env": env if what == "start" else None}))
log("start")
if (a.event and a.event != j.get("hook_event_name")) or (a.tool and a.tool != j.get("tool_name")): sys.exit(0)
def on_signal(s, f): log("signal %d" % s); sys.exit(143)
for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(s, on_signal)
if a.sleep: time.sleep(a.sleep); log("slept")
if a.stderr: sys.stderr.write(a.stderr + "\n")
if a.stdout: sys.stdout.write(a.stdout + "\n")
sys.exit(a.exit)
