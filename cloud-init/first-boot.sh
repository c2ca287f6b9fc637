#!/bin/sh
# First boot of a machine: turns a server with user-data into a registered host. svc-first-boot.service runs this script
# until it succeeds. Every step is idempotent, so a power cut at any point is harmless. A failed stage is reported
# with the last log line of the failed unit, and ends the boot (exit code 99). After any other failure, such as a report
# that could not be delivered (75), the boot is retried. Credentials are never process arguments: a shell builtin writes
# them to curl's standard input, as configuration.
set -eu
export DEBIAN_FRONTEND=noninteractive
root=${SVC_ROOT:-}
svc=$root/opt/svc
# All user-data files exist now, because this one is written last. Each boot rewrites them until this marker exists.
[ -e "$svc/user-data-written" ] || { sync; : >"$svc/user-data-written"; sync; }
say() { printf '%s\n' "$*" >&2; }

# Prints a variable's value from an env file, in which values are quoted as systemd quotes them.
read_env() { sed -n "s/^$2=\"\(.*\)\"\$/\1/p" "$svc/env/$1.env" | sed 's/\\\(.\)/\1/g' | tail -n 1; }
# Root reads its settings from its own file, because svc-gateway owns the others after the bundle stage.
machine=$(read_env update SVC_MACHINE_ID)
platform=$(read_env update PLATFORM_INTERNAL_URL)
registration=$(read_env boot REGISTRATION_TOKEN | tr -cd 'A-Za-z0-9_-')
image=$(read_env update SVC_POSTGRES_IMAGE)
image=${image:-docker.io/library/postgres:16}

# Sends a report without svc-register, which sends more detailed reports once it is installed. Fails if sending it again
# may succeed.
report() {
  code=$(printf 'header = "Authorization: Bearer %s"\n' "$registration" |
    curl --config - --silent --show-error --max-time 10 --output /dev/null --write-out '%{http_code}' \
      --header 'content-type: application/json' --data "$2" "${platform%/}/vps/$machine/$1")
  case $code in 408 | 429) false ;; [24]*) ;; *) false ;; esac
}
register() {
  for program in "$svc/bin/svc" "$svc/bootstrap/bin/svc"; do
    [ ! -x "$program" ] || { "$program" svc-register "$@"; return; }
  done
  return 127
}
stage() { stage=$1; say "stage $stage"; register stage "$stage" || report boot-stage "{\"stage\":\"$stage\"}" || true; }
fail() {
  say "stage $stage: $1"
  status=0
  register failure --stage "$stage" --message "$1" || status=$?
  case $status in
    # 77: the platform rejected the registration token: the machine has been replaced or deleted, or its registration
    # period has ended.
    0 | 77) exit 99 ;;
    75) exit 75 ;;
  esac
  message=$(printf %s "$1" | tr -d '\\"' | tr '\n\t' '  ')
  report boot-failure "{\"stage\":\"$stage\",\"message\":\"$message\"}" && exit 99
  exit 75
}
# Runs a command up to eight times, with increasing delays.
retry() {
  for delay in 2 5 10 20 40 60 60 0; do
    if "$@"; then return 0; fi
    sleep "$delay"
  done
  return 1
}

missing_packages() {
  command -v podman >/dev/null || echo podman crun netavark
  command -v curl >/dev/null || echo curl
  command -v nft >/dev/null || echo nftables
  [ -e /etc/ssl/certs/ca-certificates.crt ] || echo ca-certificates
}
install_packages() {
  apt-get -q -o DPkg::Lock::Timeout=300 update || return
  # shellcheck disable=SC2086
  apt-get -q -y -o DPkg::Lock::Timeout=300 -o Dpkg::Options::=--force-confold install --no-install-recommends $packages
}

# With swap, a brief memory shortage slows processes down instead of killing one. Small disks get no swap.
enable_swap() {
  [ -z "$(swapon --show --noheadings)" ] || return 0
  ram=$(awk '/^MemTotal:/ { print int($2 / 1024) }' /proc/meminfo)
  free=$(df --output=avail --block-size=1M "$root/" | tail -n 1)
  size=$((ram < 4096 ? ram : 4096))
  [ "$((size * 5))" -le "$free" ] || return 0
  rm -f "$root/swapfile"
  (umask 077 && fallocate -l "${size}M" "$root/swapfile") && mkswap "$root/swapfile" && swapon "$root/swapfile" || return
  grep -q '^/swapfile ' "$root/etc/fstab" || echo '/swapfile none swap sw 0 0' >>"$root/etc/fstab"
}

# Prints the last log line of a unit's own processes, without systemd's messages about the unit.
last_log_line() {
  journalctl --sync || true
  line=$(journalctl --boot --quiet --no-pager --output=cat --lines=1 "_SYSTEMD_UNIT=$1") || true
  printf '%s\n' "${line:-no log output; the result of the unit is $(systemctl show --property=Result --value "$1")}"
}
# Starts a unit and waits until it is active; a unit that restarts automatically gets a minute.
start() {
  systemctl start "$1" || true
  for _ in $(seq 30); do
    case $(systemctl show --property=ActiveState --value "$1") in
      active) return 0 ;;
      activating) sleep 2 ;;
      *) break ;;
    esac
  done
  fail "$1: $(last_log_line "$1")"
}

stage bundle
packages=$(missing_packages)
[ -z "$packages" ] || retry install_packages || fail 'the missing packages could not be installed'
{ systemctl enable nftables.service && systemctl restart nftables.service && nft list table inet svc >/dev/null; } ||
  fail 'the network rules could not be loaded'
enable_swap || say 'swap could not be created; the boot continues'
sysctl --quiet --system || say 'some sysctls could not be set; the boot continues'
# These units may not read host.env, so they get the machine's id for their log lines here.
for unit in svc-postgres svc-apps svc-shell svc-code svc-agent@; do
  mkdir -p "$root/etc/systemd/system/$unit.service.d"
  printf '[Service]\nLogExtraFields=SVC_MACHINE_ID=%s\n' "$machine" >"$root/etc/systemd/system/$unit.service.d/10-machine.conf"
done
printf 'Environment=SVC_POSTGRES_IMAGE=%s\n' "$image" >>"$root/etc/systemd/system/svc-postgres.service.d/10-machine.conf"

# The image is pulled while the bundle is downloaded.
pull() { podman image exists "$image" || podman pull --quiet "$image"; }
retry pull &
pulling=$!

program=$svc/current/bin/svc
url=$(read_env update SVC_HOST_BUNDLE_URL)
sha256=$(read_env update SVC_BUNDLE_SHA256)
mkdir -p "$svc/bootstrap"
cd "$svc/bootstrap"
if [ ! -x "$program" ]; then
  token=
  [ -z "$(read_env update SVC_HOST_BUNDLE_WITH_TOKEN)" ] || token=$(read_env host UPGRADE_TOKEN | tr -cd 'A-Za-z0-9_-')
  # The URL may contain a signature, so it is not an argument either.
  download() {
    status=0
    { [ -z "$token" ] || printf 'header = "Authorization: Bearer %s"\n' "$token"; printf 'url = "%s"\n' "$url"; } |
      curl --config - --silent --show-error --connect-timeout 10 --fail --location --speed-limit 1000 --speed-time 60 \
        --continue-at - --output bundle.tar.gz 2>download.err || status=$?
    [ "$status" != 0 ] || return 0
    cat download.err >&2
    # The partial file is not a prefix of the remote one, or the server does not support ranges.
    case "$status $(cat download.err)" in 33\ * | 22\ *416*) rm -f bundle.tar.gz ;; esac
    return 1
  }
  fetch() { retry download || fail "the bundle could not be downloaded: $(tail -n 1 download.err)"; }
  is_complete() { echo "$sha256  bundle.tar.gz" | sha256sum --check --status 2>/dev/null; }
  is_complete || fetch
  # The partial file may be from an earlier version, so download once more from the beginning.
  is_complete || { rm -f bundle.tar.gz; fetch; }
  is_complete || { rm -f bundle.tar.gz; fail 'the bundle does not have the expected SHA-256'; }
  tar --extract --gzip --no-same-owner --file bundle.tar.gz bin/svc || fail 'the bundle could not be unpacked'
  program=./bin/svc
  url=file://$svc/bootstrap/bundle.tar.gz
fi
# If the release is already installed, only the steps that a power cut prevented are run: links, units, the database
# password.
status=0
SVC_HOST_BUNDLE_URL=$url SVC_BUNDLE_SHA256=$sha256 "$program" svc-update boot 2>boot.err || status=$?
cat boot.err >&2
[ "$status" = 0 ] || fail "$(tail -n 1 boot.err)"
cd /
rm -rf "$svc/bootstrap"
# The env files were written before their owners existed.
{ systemd-sysusers "$root/etc/sysusers.d/svc.conf" && systemd-tmpfiles --create "$root/etc/tmpfiles.d/svc.conf"; } ||
  fail 'users and directories could not be created'
systemctl daemon-reload

stage database
wait "$pulling" || fail "the image $image could not be pulled"
# A database whose creation was interrupted may never start. It holds no data before the gate is open.
if [ ! -e "$svc/database-created" ] && [ ! -e "$root/var/lib/svc/restore-complete" ] && podman volume exists svc-postgres; then
  systemctl stop svc-postgres.service
  podman volume rm --force svc-postgres >/dev/null || fail 'the incomplete database could not be removed'
fi
start svc-postgres.service
# shellcheck disable=SC2016
accepts_queries() { podman exec svc-postgres sh -c 'PGPASSWORD=$POSTGRES_PASSWORD psql -qh 127.0.0.1 -U postgres -d svc -c ""'; }
retry accepts_queries || fail "the database svc does not respond: $(last_log_line svc-postgres.service)"
sync
: >"$svc/database-created"
stage restore
# Earlier releases do not have this unit.
if systemctl cat svc-files-restore.service >/dev/null 2>&1; then start svc-files-restore.service; fi
start svc-restore.service
stage gateway
start svc-gateway.service
stage register
start svc-register.service

systemctl enable svc.target
systemctl start --no-block svc.target
: >"$svc/first-boot-complete"
sync
systemctl disable svc-first-boot.service
say 'the first boot is complete'
