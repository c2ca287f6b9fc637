# Attacks by the owner's user: runs in a process in the editor's unit, in the editor's terminal, and as a dispatched
# agent. Writes each resource that it reaches to lab-attack.out, then the unit in which it runs.
read -r prompt || true
cd /home/svc/home
reached() { echo "$*" >>lab-attack.out; }
# Links from an app's directory, and a FIFO as the manifest.
mkdir -p apps/lab-linked apps/lab-fifo
echo '{"name": "lab", "slug": "lab-linked", "version": "1.0.0", "runtime": "static", "build": {"output": "dist"}}' >apps/lab-linked/svc.json
ln -sfn /opt/svc/env apps/lab-linked/dist
[ -p apps/lab-fifo/svc.json ] || mkfifo apps/lab-fifo/svc.json
# Traps for an export: links to root's files, and a FIFO. (attacks.sh also swaps directories while an export is
# running.)
mkdir -p lab-export
ln -sfn /opt/svc/env lab-export/env
ln -sf /opt/svc/env/host.env lab-export/host.env
[ -p lab-export/fifo ] || mkfifo lab-export/fifo
# Root's files and directories.
for path in /opt/svc/env/host.env /opt/svc/env/update.env /var/lib/svc/tls/key.pem; do
  cat $path >/dev/null 2>&1 && reached "read $path"
  (echo x >>$path) 2>/dev/null && reached "wrote $path"
done
for dir in /opt/svc /opt/svc/env /opt/svc/bin /var/lib/svc /var/lib/svc/requests /run/svc/gateway /run/svc/watch; do
  (: >$dir/lab-planted) 2>/dev/null && reached "created a file in $dir"
done
for dir in system system/logs; do
  (: >$dir/lab-planted) 2>/dev/null && reached "created a file in $dir"
  mv $dir $dir-moved 2>/dev/null && reached "moved $dir"
done
# Forbidden requests: limits, dispatches, the side database. Then a forged dispatch end.
for call in 'PUT /api/limits {"daily":1000}' 'POST /api/dispatch {"prompt":"x"}' 'POST /api/side-database {}'; do
  set -- $call
  code=$(curl -sS -o /dev/null -w '%{http_code}' --max-time 10 --unix-socket /run/svc/gateway/gateway.sock -X "$1" -H 'content-type: application/json' -d "$3" "http://localhost$2" 2>/dev/null)
  case ${code:-000} in 2*) reached "$1 $2: $code" ;; esac
done
cat >lab-forge.py <<'PY'
import socket
s = socket.socket(socket.AF_UNIX)
s.settimeout(5)
s.connect("/run/svc/watch/watch.sock")
s.sendall(b'{"version":1,"phase":"dispatchEnd","dispatchId":"lab-attack","sentAt":"2026-01-01T00:00:00.000Z"}\n')
s.recv(100)
PY
python3 lab-forge.py 2>/dev/null || true
reached "done as $(id -un) in $(sed -n 's/^0:://p' /proc/self/cgroup)"
echo '{"type":"usage","tokensIn":1,"tokensOut":1,"cost":0.001}'
echo '{"type":"result","status":"success","text":"attacked"}'
