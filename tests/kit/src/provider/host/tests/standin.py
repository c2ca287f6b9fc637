"""A stand-in for the product's binary: records each call in calls.jsonl, and behaves as defined in $STANDIN.

STANDIN is JSON: {unit: [behavior of the first call, the second, …, all further calls]}. A number is an exit code;
"serve" sends READY=1 and waits for SIGTERM; "hang" waits without READY=1; "serve:N" sends READY=1 and exits with N;
"skip" exits with 0 without doing anything. `svc-register stage` is not recorded as a call, but in `stages`.
"""
import json, os, signal, socket, subprocess, sys, time

name = os.path.basename(sys.argv[0])
args = sys.argv[1:]
if name == "svc":
    name, args = args[0], args[1:]
if args == ["install-apps"]:
    # `svc-gateway install-apps` is the command of the unit svc-apps.
    name = "svc-apps"
root = os.environ["SVC_ROOT"]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

if name == "svc-register" and args[:1] == ["stage"]:
    with open(f"{root}/stages", "a") as log:
        log.write(args[1] + "\n")
    # The init ignores this failure.
    sys.exit(69)

try:
    with open(f"{root}/calls.jsonl") as log:
        earlier_calls = sum(json.loads(line)["unit"] == name for line in log)
except FileNotFoundError:
    earlier_calls = 0
behaviors = json.loads(os.environ.get("STANDIN", "{}")).get(name, [])
services = ("svc-gateway", "svc-sync-agent")
default = "serve" if name in services else 0
behavior = behaviors[min(earlier_calls, len(behaviors) - 1)] if behaviors else default

child = None
if behavior == "serve":
    # A child that must be killed with the service.
    child = subprocess.Popen(["sleep", "600"]).pid
env = {key: value for key, value in os.environ.items()}
with open(f"{root}/calls.jsonl", "a") as log:
    log.write(json.dumps({"unit": name, "args": args, "env": env, "pid": os.getpid(), "child": child}) + "\n")
print(f"{name} runs", flush=True)


def link_if_missing(path, target):
    if not os.path.lexists(path):
        os.symlink(target, path)


if name == "svc-update" and behavior == 0:
    release = f"{root}/opt/svc/releases/1/bin"
    os.makedirs(release, exist_ok=True)
    link_if_missing(f"{release}/svc", os.path.realpath(sys.argv[0]))
    for unit in ("svc-restore", "svc-gateway", "svc-register", "svc-sync-agent", "svc-db-backup"):
        link_if_missing(f"{release}/{unit}", "svc")
    link_if_missing(f"{root}/opt/svc/current", "releases/1")
    link_if_missing(f"{root}/opt/svc/bin", "current/bin")
if name == "svc-restore" and behavior == 0:
    open(f"{root}/opt/svc/restore-complete", "w").close()
if name == "svc-db-backup":
    request = f"{root}/var/lib/svc/requests/backup"
    if "--request" in args:
        os.remove(request)

if behavior == "skip":
    sys.exit(0)
if isinstance(behavior, int):
    print(f"{name} ends with {behavior}", file=sys.stderr)
    sys.exit(behavior)
if behavior.startswith("serve"):
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notify.sendto(b"STATUS=up\nREADY=1\n", os.environ["NOTIFY_SOCKET"])
if ":" in behavior:
    sys.exit(int(behavior.split(":")[1]))
time.sleep(600)
