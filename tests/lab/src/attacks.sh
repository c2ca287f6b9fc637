# Runs the attacks that a security review found, as the owner's user on a machine: attack.sh runs as a process in the
# editor's unit and as a dispatched agent. Then the gateway and root's commands process the planted files. Prints a
# summary; exits at the first violation.
set -eu
PATH=/opt/svc/bin:$PATH
home=/home/svc/home
swapper=
trap '[ -z "$swapper" ] || kill -- -$swapper 2>/dev/null' EXIT
fail() { echo "BROKEN $*"; exit 1; }
secret=$(sed -n 's/^UPGRADE_TOKEN=//p' /opt/svc/env/host.env | tr -d '"')
[ -n "$secret" ] || fail "the machine has no UPGRADE_TOKEN"
[ -s $home/lab-attack.sh ] || fail "there is no lab-attack.sh"
call_gateway() { curl -sS --max-time 90 --unix-socket /run/svc/gateway/gateway.sock -H 'content-type: application/json' "$@"; }

# Runs attack.sh as a process in this unit: with its view of the file system, its control group and its user.
attack_in() {
  pid=$(systemctl show -P MainPID "$1")
  group=/sys/fs/cgroup$(systemctl show -P ControlGroup "$1")
  rm -f $home/lab-attack.out
  (
    echo 0 >"$group/cgroup.procs" 2>/dev/null || true
    exec nsenter -t "$pid" -m setpriv --reuid=svc --regid=svc --init-groups --no-new-privs --bounding-set=-all \
      sh $home/lab-attack.sh </dev/null >/dev/null 2>&1
  ) || true
}
check_outcome() {
  grep -q '^done as svc in ' $home/lab-attack.out || fail "$1: the attack did not run: $(cat $home/lab-attack.out 2>&1)"
  grep -v '^done as svc in ' $home/lab-attack.out && fail "$1 reached forbidden resources"
  return 0
}
unit=svc-code.service
[ "$(systemctl is-active $unit)" = active ] || unit=svc-shell.service
[ "$(systemctl is-active $unit)" = active ] || fail "neither the editor nor the shell is running"
attack_in $unit
check_outcome "a process of $unit"

# The attack as a dispatched agent.
cp $home/system/config.json /var/tmp/lab-config.json 2>/dev/null || true
echo '{"agents": {"lab": {"adapter": "json-lines", "command": ["sh", "lab-attack.sh"]}}}' >$home/system/config.json
chown svc-gateway:svc $home/system/config.json
rm -f $home/lab-attack.out
response=$(call_gateway -d '{"id": "lab-attack", "prompt": "attack"}' http://localhost/api/dispatch)
echo "$response" | grep -q '"text":"attacked"' || fail "unexpected dispatch result: $response"
check_outcome "a dispatched agent"
grep -q '/svcagents.slice/svc-agent@' $home/lab-attack.out || fail "the agent ran in $(cat $home/lab-attack.out)"
for _ in 1 2 3 4 5 6 7 8 9 10; do
  forged=$(grep -c '"why":"forged"' $home/system/logs/audit.jsonl 2>/dev/null || true)
  [ "${forged:-0}" -ge 1 ] && break
  sleep 1
done
[ "${forged:-0}" -ge 1 ] || fail "a forged dispatch end left no gap in the audit log"

# The gateway serves requests for the planted files.
for path in /apps/lab-linked/ /apps/lab-linked/host.env /apps/lab-linked/update.env /icons/lab-linked /apps/lab-fifo/; do
  call_gateway "http://localhost$path" | grep -qF "$secret" && fail "$path serves an env file"
done
[ "$(curl -sS -o /dev/null -w '%{http_code}' --max-time 20 --unix-socket /run/svc/gateway/gateway.sock http://localhost/readyz)" = 200 ] ||
  fail "the gateway is no longer ready"

# Root exports while directories are constantly swapped for links.
setsid setpriv --reuid=svc --regid=svc --init-groups sh -c "cd $home && mkdir -p lab-swap && echo mine >lab-swap/file && while :; do mv lab-swap lab-swapped && ln -s /opt/svc/env lab-swap && rm lab-swap && mv lab-swapped lab-swap; done" >/dev/null 2>&1 &
swapper=$!
mkdir -p -m 0700 /var/backups/lab
timeout 400 svc-db-backup export --output /var/backups/lab/ada.tar >/var/tmp/lab-export.log 2>&1 || fail "the export failed: $(tail -n 3 /var/tmp/lab-export.log)"
[ -d /proc/$swapper ] || fail "the directories were not swapped while the export was running"
kill -- -$swapper
swapper=
grep -qF "$secret" /var/backups/lab/ada.tar && fail "the export contains a machine secret"
tar -tf /var/backups/lab/ada.tar | grep -q 'lab-export/fifo' && fail "the export contains a FIFO"

# Root must not run programs named in svc-gateway's settings.
mkdir -p $home/lab-bin && printf '#!/bin/sh\nid -un >>/var/tmp/lab-ran-as\nexit 1\n' >$home/lab-bin/pg_dump
for tool in pg_restore psql pg_dumpall; do cp $home/lab-bin/pg_dump $home/lab-bin/$tool; done
chmod -R a+rx $home/lab-bin && chown -R svc:svc $home/lab-bin
rm -f /var/tmp/lab-ran-as && install -m 0666 /dev/null /var/tmp/lab-ran-as
# Checks that the planted programs work, and that commands run them if root's own environment names them: otherwise, the
# next check could not fail.
$home/lab-bin/pg_dump || true
grep -qx root /var/tmp/lab-ran-as || fail "the planted programs do not work"
: >/var/tmp/lab-ran-as
SVC_PG_BIN_DIR=$home/lab-bin timeout 300 svc-db-backup export --output /var/backups/lab/own.tar >/dev/null 2>&1 || true
[ -s /var/tmp/lab-ran-as ] || fail "the export ran no program from SVC_PG_BIN_DIR"
: >/var/tmp/lab-ran-as
cp -p /opt/svc/env/host.env /var/tmp/lab-host.env
printf 'SVC_PG_BIN_DIR=%s\n' $home/lab-bin >>/opt/svc/env/host.env
timeout 300 svc-update status >/dev/null 2>&1 || true
timeout 300 svc-restore import --check /var/backups/lab/ada.tar >/dev/null 2>&1 || true
timeout 300 svc-db-backup export --output /var/backups/lab/again.tar >/dev/null 2>&1 || true
cp -p /var/tmp/lab-host.env /opt/svc/env/host.env
grep -qx root /var/tmp/lab-ran-as && fail "root ran one of the owner's programs"

rm -rf /var/backups/lab $home/lab-* $home/apps/lab-* /var/tmp/lab-host.env
[ -f /var/tmp/lab-config.json ] && cat /var/tmp/lab-config.json >$home/system/config.json
failed=$(systemctl --failed --plain --no-legend | grep svc- || true)
[ -z "$failed" ] || fail "failed units: $failed"
echo "links, FIFOs, swapped directories, root's settings, permissions and a forged end, from $unit and from an agent: nothing reached"
