# Invariants for a running machine. Each check prints a line; nothing is changed permanently.
set -u
check() {
  name=$1; shift
  if output=$("$@" 2>&1); then echo "ok $name"; else echo "BROKEN $name: $output"; fi
}
run_as() { user=$1; shift; setpriv --reuid="$user" --regid="$(id -g "$user")" --init-groups "$@"; }
read_variable() { sed -n "s/^$1=//p" "$2" | tr -d '"'; }

all_units_settled() { timeout 120 systemctl is-system-running --wait >/dev/null; [ "$(systemctl is-system-running)" = running ]; }
no_unit_failed() {
  failed=$(systemctl --failed --plain --no-legend)
  [ -z "$failed" ] || { echo "$failed"; systemctl --failed --plain --no-legend | while read -r unit _; do journalctl -u "$unit" -n 5 --no-pager; done; return 1; }
}
only_expected_ports() {
  unexpected=$(ss -Hltn | awk '{print $4}' | grep -vE '^(0\.0\.0\.0|\*|\[::\]):(443|22)$' | grep -vE '^127\.|^\[::1\]' || true)
  [ -z "$unexpected" ] || { echo "also listening on $unexpected"; return 1; }
  for port in 443 22; do ss -Hltn | awk '{print $4}' | grep -q ":$port\$" || { echo "nothing is listening on port $port"; return 1; }; done
  udp=$(ss -Hlun | awk '{print $4}' | grep -vE '^127\.|^\[::1\]|:(68|123)$' || true)
  [ -z "$udp" ] || { echo "also listening on UDP $udp"; return 1; }
}
env_files_are_private() {
  unexpected=$(find /opt/svc/env -type f ! -perm 0600)
  [ -z "$unexpected" ] && [ "$(find /opt/svc/env -name '*.env' | wc -l)" -ge 3 ] || { ls -la /opt/svc/env; return 1; }
}
# The provider's metadata service returns the user-data with all its secrets.
only_root_reaches_metadata() {
  ip netns add lab-metadata
  ip link add lab-m0 type veth peer name lab-m1 netns lab-metadata
  ip addr add 169.254.169.253/30 dev lab-m0; ip link set lab-m0 up
  ip -n lab-metadata addr add 169.254.169.254/30 dev lab-m1; ip -n lab-metadata link set lab-m1 up
  ip netns exec lab-metadata python3 -m http.server 80 --bind 169.254.169.254 --directory /proc/sys/net >/dev/null 2>&1 & server=$!
  for _ in 1 2 3 4 5 6 7 8 9 10; do curl -s -o /dev/null --max-time 5 http://169.254.169.254/ && break; sleep 1; done
  curl -sS -o /dev/null --max-time 10 http://169.254.169.254/; root=$?
  run_as svc curl -sS -o /dev/null --max-time 10 http://169.254.169.254/; svc=$?
  run_as svc-gateway curl -sS -o /dev/null --max-time 10 http://169.254.169.254/; gateway=$?
  kill $server; ip link del lab-m0; ip netns del lab-metadata
  [ $root -eq 0 ] && [ $svc -ne 0 ] && [ $gateway -ne 0 ] || { echo "root $root, svc $svc, svc-gateway $gateway"; return 1; }
}
password=$(read_variable DATABASE_URL /opt/svc/env/host.env | sed -n 's|.*://[^:]*:\([^@]*\)@.*|\1|p')
print_secrets() {
  echo "$password"
  read_variable UPGRADE_TOKEN /opt/svc/env/host.env
  read_variable REGISTRATION_TOKEN /opt/svc/env/boot.env 2>/dev/null
  read_variable AWS_SECRET_ACCESS_KEY /opt/svc/env/r2.env
  read_variable AWS_SESSION_TOKEN /opt/svc/env/r2.env
}
list=$(mktemp); print_secrets | grep . >"$list"; chmod 0600 "$list"
# Verifies that the searches below can find secrets.
searches_work() {
  for canary in /opt/svc/lab-canary /run/lab-canary; do
    (umask 022 && head -n 1 "$list" >$canary)
    for user in svc nobody; do
      files_readable_by $user | xargs -0 grep -lF -f "$list" -- 2>/dev/null | grep -q "^$canary\$" || { echo "$user does not find $canary"; rm -f $canary; return 1; }
    done
    rm -f $canary
  done
  [ ${#password} -ge 32 ] && [ "$(wc -l <"$list")" -ge 3 ] && grep -qF -f "$list" /opt/svc/env/host.env || return 1
  files_readable_by svc-gateway | xargs -0 grep -lF -f "$list" -- 2>/dev/null | grep -q '^/opt/svc/env/host.env$' || { echo "host.env was not found by its owner"; return 1; }
}
# Lists the files under 4 MiB that a user may read, except Debian's and the releases' programs.
files_readable_by() {
  run_as "$1" find / /run /dev/shm -xdev \( -path /proc -o -path /sys -o -path /usr -o -path /var/lib/dpkg -o -path '/opt/svc/releases/*/bin' \) -prune -o -type f -readable -size -4096k -print0 2>/dev/null
}
svc_cannot_read_secrets() {
  found=$(files_readable_by svc | xargs -0 grep -lF -f "$list" -- 2>/dev/null)
  [ -z "$found" ] || { echo "$found"; return 1; }
  count=$(run_as svc sh -c 'cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null' | tr '\0' '\n' | grep -cF -f "$list")
  [ "$count" = 0 ] || { echo "$count secrets in /proc"; return 1; }
  psql=/opt/svc/runtime/postgres/bin/psql
  output=$(run_as svc env PGCONNECT_TIMEOUT=10 $psql -w -h 127.0.0.1 -U postgres -d svc -c 'select 1' 2>&1) && { echo "the database accepts svc without a password"; return 1; }
  case $output in *password*) ;; *) echo "$output"; return 1 ;; esac
  for socket in $(find /run /tmp /var/lib -type s -name '.s.PGSQL*' 2>/dev/null); do
    run_as svc test -w "$socket" && { echo "svc may use $socket"; return 1; }
  done
  return 0
}
# `nobody` can read only world-readable files.
no_secret_is_exposed() {
  count=$(cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\0' '\n' | grep -cF -f "$list")
  [ "$count" = 0 ] || { echo "$count secrets in process arguments"; return 1; }
  journalctl --no-pager -o cat --all 2>/dev/null | grep -aqF -f "$list" && { echo "the journal contains a secret"; return 1; }
  # cloud-init's copies of user-data are readable by root only; its logs must not contain secrets.
  grep -lF -f "$list" /var/log/cloud-init*.log 2>/dev/null && return 1
  found=$(files_readable_by nobody | xargs -0 grep -lF -f "$list" -- 2>/dev/null)
  [ -z "$found" ] || { echo "readable by all: $found"; return 1; }
}
gateway_is_not_root() { [ "$(stat -c %U /proc/"$(systemctl show -P MainPID svc-gateway)")" = svc-gateway ]; }
users_cannot_write_releases() { run_as svc test ! -w /opt/svc && run_as svc-gateway test ! -w /opt/svc && run_as svc-gateway test ! -w /opt/svc/current/bin/svc; }
timers_run() { for t in svc-db-backup.timer svc-db-verify.timer svc-db-drill.timer svc-files-verify.timer svc-heartbeat.timer; do [ "$(systemctl is-active $t)" = active ] || { echo "$t is $(systemctl is-active $t)"; return 1; }; done; }
swap_is_on() { [ "$(awk '/SwapTotal/ {print $2}' /proc/meminfo)" -gt 0 ]; }
doctor_finds_no_problem() {
  output=$(/opt/svc/bin/svcctl doctor host) || { echo "exit $?: $output"; return 1; }
}
runtime_is_in_path() { su -l -s /bin/sh svc -c 'echo "$PATH"' | grep -q /opt/svc/runtime/node/bin; }

check "all units settled" all_units_settled
check "no unit failed" no_unit_failed
check "443, ssh and loopback only" only_expected_ports
check "env files 0600" env_files_are_private
check "metadata for root only" only_root_reaches_metadata
check "searches find secrets" searches_work
check "svc cannot read secrets" svc_cannot_read_secrets
check "no secret is exposed" no_secret_is_exposed
check "the gateway is not root" gateway_is_not_root
check "users cannot write releases" users_cannot_write_releases
check "timers run" timers_run
check "swap is on" swap_is_on
check "doctor finds no problem" doctor_finds_no_problem
check "runtime in the PATH" runtime_is_in_path
rm -f "$list"
