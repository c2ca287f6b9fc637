#!/usr/bin/env python3
"""run.py claude|codex|opencode [scenario ...]: runs scenarios against the stub and saves recordings"""
import json, os, re, shutil, signal, subprocess, sys, time, importlib
A = os.environ["AGENTS"]; STUB = os.path.dirname(os.path.abspath(__file__))
def main():
    cli = sys.argv[1]
    mod = importlib.import_module("sc_" + cli)
    names = sys.argv[2:] or list(mod.SCENARIOS)
    for n in names: run(cli, mod, n)
def shorten(s, W):
    s = re.sub(r'("CLAUDE_CODE_MESSAGING_TOKEN": ")[0-9a-f]+', r'\1<token>', s)
    return s.replace(W + "/proj", "/PROJ").replace(W + "/home", "/HOME").replace(W, "/W").replace(re.sub("[^A-Za-z0-9]", "-", W), "-W").replace(A, "/A")
def sleepers(W):
    """Returns the long-running test commands of this scenario, selected by their working directory below W"""
    r = []
    for l in subprocess.run(["ps", "-eo", "pid,ppid,pgid,sid,args"], capture_output=True, text=True).stdout.splitlines():
        if "sleep(61.77)" in l:
            try: own = (os.readlink("/proc/%s/cwd" % l.split()[0]) + "/").startswith(W + "/")
            except OSError: own = False
            if own: r.append(l[:160])
    return r
def run(cli, mod, name):
    sc = dict(mod.SCENARIOS[name])
    W = "%s/w/%s/%s" % (A, cli, sc.get("share", name)); R = "%s/recordings/%s" % (A, cli)
    os.makedirs(R, exist_ok=True)
    if not sc.get("share"): shutil.rmtree(W, ignore_errors=True)
    for d in ("home", "proj"): os.makedirs(W + "/" + d, exist_ok=True)
    for f in os.listdir(R):
        if f.startswith(name + "."): os.remove(R + "/" + f)
    base = W + "/rec-" + name
    for f in os.listdir(W):
        if f.startswith("rec-" + name + ".") or f == "port": os.remove(W + "/" + f)
    json.dump({"tracks": sc["tracks"]}, open(W + "/script.json", "w"), indent=1)
    stub = subprocess.Popen([sys.executable, STUB + "/stub.py", W + "/script.json", W + "/port", base + ".requests.jsonl"], stdin=subprocess.DEVNULL)
    try:
        for _ in range(200):
            if os.path.exists(W + "/port"): break
            time.sleep(0.05)
        url = "http://127.0.0.1:" + open(W + "/port").read()
        ctx = {"W": W, "home": W + "/home", "proj": W + "/proj", "url": url, "base": base, "name": name, "sc": sc}
        argv, env = mod.prepare(ctx)
        if sc.get("pre"): subprocess.run(sc["pre"], shell=True, cwd=ctx["proj"], check=True)
        user = []
        if sc.get("user"):
            subprocess.run(["chown", "-R", "65534:65534", W], check=True)
            user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        cwd = W + "/" + sc.get("cwd", "proj"); os.makedirs(cwd, exist_ok=True)
        t0 = time.time()
        out = open(base + ".stdout.raw", "w+"); err = open(base + ".stderr.raw", "w+")
        p = subprocess.Popen(user + argv, cwd=cwd, env=env, stdin=subprocess.PIPE if sc.get("stdin") is not None else subprocess.DEVNULL,
                             stdout=out, stderr=err, start_new_session=True)
        lines = []
        if sc.get("stdin") is not None:
            p.stdin.write(sc["stdin"].encode()); p.stdin.flush()
            if not sc.get("keep_stdin"): p.stdin.close()
        note = ""
        if sc.get("signal"):
            sig, after, target = sc["signal"]        # after: regex on stdout, or seconds
            end = time.time() + 60
            while time.time() < end and p.poll() is None:
                if isinstance(after, str):
                    if re.search(after, open(base + ".stdout.raw").read()): time.sleep(sc.get("signal_delay", 1.0)); break
                elif time.time() - t0 > after: break
                time.sleep(0.1)
            kids = subprocess.run(["ps", "-o", "pid,ppid,pgid,sid,args", "-g", str(p.pid)], capture_output=True, text=True).stdout
            note += "processes before the signal (session of the CLI):\n" + re.sub(r"(?m)^(.{140}).*$", r"\1...", kids)
            note += "its children that sleep:\n" + "\n".join(sleepers(W)) + "\n"
            t1 = time.time()
            if target == "group": os.killpg(p.pid, sig)
            else: p.send_signal(sig)
            if sc.get("signal2"):
                time.sleep(sc["signal2"][1]); 
                if p.poll() is None: p.send_signal(sc["signal2"][0]); note += "second signal sent\n"
        try: rc = p.wait(sc.get("timeout", 90))
        except subprocess.TimeoutExpired:
            note += "TIMEOUT: killed by the runner after %d s\n" % sc.get("timeout", 90); os.killpg(p.pid, 9); rc = p.wait()
        if sc.get("signal"):
            note += "exit %.2f s after the signal\n" % (time.time() - t1); time.sleep(0.5)
            left = sleepers(W)
            note += "left behind:\n" + "\n".join(left) + "\n"
            for l in left:
                try: os.kill(int(l.split()[0]), 9)
                except OSError: pass
        dt = time.time() - t0
        try: p.stdin and p.stdin.close()
        except OSError: pass
        sh = lambda s: shorten(s, W).replace(url, "http://127.0.0.1:PORT")
        for f in sorted(os.listdir(W)):
            if f.startswith("rec-" + name + ".") and not f.endswith(".full"):
                txt = sh(open(W + "/" + f, errors="replace").read())
                dest = f[4:].replace(".stdout.raw", ".stdout.jsonl").replace(".stderr.raw", ".stderr")
                if dest.endswith(".requests.jsonl"): txt = re.sub(r'(?m)("last": .{1200}).*$', r'\1 ...[cut]', txt)
                if txt or dest.endswith((".stdout.jsonl", ".stderr")): open(R + "/" + dest, "w").write(txt)
        open(R + "/%s.exit" % name, "w").write("%d\n%.1f s\n%s" % (rc, dt, sh(note)))
        import shlex
        extra = "" if sc.get("stdin") is None else "\n# stdin:\n" + sc["stdin"]
        open(R + "/%s.cmd" % name, "w").write(sh("# %s; %s\n# cwd %s\n%s\n%s%s\n" % (mod.VERSION, sc.get("what", ""), cwd,
            " ".join("%s=%s" % (k, "dummy" if "KEY" in k else shlex.quote(v)) for k, v in sorted(env.items()) if k != "PATH"), " ".join(map(shlex.quote, user + argv)), extra)))
        if ctx.get("files"): open(R + "/%s.settings" % name, "w").write(sh(ctx["files"]))
        print("%-24s exit %4d  %5.1f s  %d stdout lines" % (name, rc, dt, len(open(base + ".stdout.raw").read().splitlines())), flush=True)
    finally:
        stub.terminate(); stub.wait()
sys.path.insert(0, STUB)
if __name__ == "__main__": main()
