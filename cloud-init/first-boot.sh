#!/bin/sh
# The first boot of a machine: from user-data to a registered host. svc-first-boot.service runs it until it has come
# through, however often the power goes: each step is done again or found done.
# A stage that fails is reported, with the last words of whoever failed, and ends it (99). Where nobody hears of it (75),
# and wherever else it ends, it is tried again.
# No credential is an argument of a process: curl reads it as configuration, from a builtin.
set -eu
export DEBIAN_FRONTEND=noninteractive
root=${SVC_ROOT:-}
svc=$root/opt/svc
# All files of the user-data are here, this one last. Until this is noted, each boot writes them anew.
[ -e "$svc/user-data-written" ] || { sync; : >"$svc/user-data-written"; sync; }
say() { printf '%s\n' "$*" >&2; }

# The value of a variable in an env file, which quotes it as systemd does.
value() { sed -n "s/^$2=\"\(.*\)\"\$/\1/p" "$svc/env/$1.env" | sed 's/\\\(.\)/\1/g' | tail -n 1; }
# What root acts on is in root's own file: after the stage bundle the others are svc-gateway's.
machine=$(value update SVC_MACHINE_ID)
platform=$(value update PLATFORM_INTERNAL_URL)
registration=$(value boot REGISTRATION_TOKEN | tr -cd 'A-Za-z0-9_-')
image=$(value update SVC_POSTGRES_IMAGE)
image=${image:-docker.io/library/postgres:16}

as() {
  bearer=$1; shift
  printf 'header = "Authorization: Bearer %s"\n' "$bearer" | curl --config - --silent --show-error --connect-timeout 10 "$@"
}
# What svc-register says better, once it is here.
tell() {
  as "$registration" --max-time 10 --output /dev/null --header 'content-type: application/json' \
    --data "$2" "${platform%/}/vps/$machine/$1"
}
register() {
  for program in "$svc/bin/svc" "$svc/bootstrap/bin/svc"; do
    [ ! -x "$program" ] || { "$program" svc-register "$@"; return; }
  done
  return 127
}
stage() { at=$1; say "stage $at"; register stage "$at" || tell boot-stage "{\"stage\":\"$at\"}" || true; }
fail() {
  say "stage $at: $1"
  ended=0
  register failure --stage "$at" --message "$1" || ended=$?
  case $ended in
    # 77: heard, and of no use any more.
    0 | 77) exit 99 ;;
    75) exit 75 ;;
  esac
  words=$(printf %s "$1" | tr -d '\\"' | tr '\n\t' '  ')
  tell boot-failure "{\"stage\":\"$at\",\"message\":\"$words\"}" && exit 99
  exit 75
}
# Up to eight times, with longer and longer rests.
patiently() {
  for rest in 2 5 10 20 40 60 60 0; do
    if "$@"; then return 0; fi
    sleep "$rest"
  done
  return 1
}

missing() {
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

# Memory that is short for a moment then costs time, not a process. None where the disk is small.
swap() {
  [ -z "$(swapon --show --noheadings)" ] || return 0
  ram=$(awk '/^MemTotal:/ { print int($2 / 1024) }' /proc/meminfo)
  free=$(df --output=avail --block-size=1M "$root/" | tail -n 1)
  size=$((ram < 4096 ? ram : 4096))
  [ "$((size * 5))" -le "$free" ] || return 0
  rm -f "$root/swapfile"
  (umask 077 && fallocate -l "${size}M" "$root/swapfile") && mkswap "$root/swapfile" && swapon "$root/swapfile" || return
  grep -q '^/swapfile ' "$root/etc/fstab" || echo '/swapfile none swap sw 0 0' >>"$root/etc/fstab"
}

# What a unit's own processes said last, without systemd's words about it.
last_words() {
  journalctl --sync || true
  words=$(journalctl --boot --quiet --no-pager --output=cat --lines=1 "_SYSTEMD_UNIT=$1") || true
  printf '%s\n' "${words:-it ended: $(systemctl show --property=Result --value "$1")}"
}
# Starts a unit and waits until it is up; what is started again by itself gets a minute for it.
start() {
  systemctl start "$1" || true
  for _ in $(seq 30); do
    case $(systemctl show --property=ActiveState --value "$1") in
      active) return 0 ;;
      activating) sleep 2 ;;
      *) break ;;
    esac
  done
  fail "$1: $(last_words "$1")"
}

stage bundle
packages=$(missing)
[ -z "$packages" ] || patiently install_packages || fail 'the packages that are missing could not be installed'
{ systemctl enable nftables.service && systemctl restart nftables.service && nft list table inet svc >/dev/null; } ||
  fail 'the network rules could not be loaded'
swap || say 'there is no swap: it could not be made'
sysctl --quiet --system || say 'not every sysctl could be set'
# What may not read host.env cannot say itself whose log line it is.
for unit in svc-postgres svc-apps svc-shell svc-code svc-agent@; do
  mkdir -p "$root/etc/systemd/system/$unit.service.d"
  printf '[Service]\nLogExtraFields=SVC_MACHINE_ID=%s\n' "$machine" >"$root/etc/systemd/system/$unit.service.d/10-machine.conf"
done
printf 'Environment=SVC_POSTGRES_IMAGE=%s\n' "$image" >>"$root/etc/systemd/system/svc-postgres.service.d/10-machine.conf"

# It comes while the bundle does.
pull() { podman image exists "$image" || podman pull --quiet "$image"; }
patiently pull &
pulling=$!

program=$svc/current/bin/svc
url=$(value update SVC_HOST_BUNDLE_URL)
sha256=$(value update SVC_BUNDLE_SHA256)
mkdir -p "$svc/bootstrap"
cd "$svc/bootstrap"
if [ ! -x "$program" ]; then
  token=
  [ -z "$(value update SVC_HOST_BUNDLE_WITH_TOKEN)" ] || token=$(value host UPGRADE_TOKEN | tr -cd 'A-Za-z0-9_-')
  # An address may have a signature in it: it is no argument, either.
  download() {
    ended=0
    { [ -z "$token" ] || printf 'header = "Authorization: Bearer %s"\n' "$token"; printf 'url = "%s"\n' "$url"; } |
      curl --config - --silent --show-error --connect-timeout 10 --fail --location --speed-limit 1000 --speed-time 60 \
        --continue-at - --output bundle.tar.gz 2>download.err || ended=$?
    [ "$ended" != 0 ] || return 0
    cat download.err >&2
    # What is here is no beginning of what is there, or the server does not say from where it goes on.
    case "$ended $(cat download.err)" in 33\ * | 22\ *416*) rm -f bundle.tar.gz ;; esac
    return 1
  }
  fetch() { patiently download || fail "the bundle could not be downloaded: $(tail -n 1 download.err)"; }
  whole() { echo "$sha256  bundle.tar.gz" | sha256sum --check --status 2>/dev/null; }
  whole || fetch
  # Once anew: the beginning may be of another time.
  whole || { rm -f bundle.tar.gz; fetch; }
  whole || { rm -f bundle.tar.gz; fail 'the bundle has another SHA-256 than was asked for'; }
  tar --extract --gzip --no-same-owner --file bundle.tar.gz bin/svc || fail 'the bundle could not be unpacked'
  program=./bin/svc
  url=file://$svc/bootstrap/bundle.tar.gz
fi
# A release that is there already only gets what a cut kept from it: links, units, the database's password.
ended=0
SVC_HOST_BUNDLE_URL=$url SVC_BUNDLE_SHA256=$sha256 "$program" svc-update boot 2>boot.err || ended=$?
cat boot.err >&2
[ "$ended" = 0 ] || fail "$(tail -n 1 boot.err)"
cd /
rm -rf "$svc/bootstrap"
# The env files were here before their owners.
{ systemd-sysusers "$root/etc/sysusers.d/svc.conf" && systemd-tmpfiles --create "$root/etc/tmpfiles.d/svc.conf"; } ||
  fail 'users and directories could not be made'
systemctl daemon-reload

stage database
wait "$pulling" || fail "the image $image could not be pulled"
# What a cut left of a database that was being made may never start. Nobody has put anything into it before the gate.
if [ ! -e "$svc/database-made" ] && [ ! -e "$root/var/lib/svc/restore-complete" ] && podman volume exists svc-postgres; then
  systemctl stop svc-postgres.service
  podman volume rm --force svc-postgres >/dev/null || fail 'what was begun of a database could not be removed'
fi
start svc-postgres.service
# shellcheck disable=SC2016
answers() { podman exec svc-postgres sh -c 'PGPASSWORD=$POSTGRES_PASSWORD psql -qh 127.0.0.1 -U postgres -d svc -c ""'; }
patiently answers || fail "the database svc does not answer: $(last_words svc-postgres.service)"
sync
: >"$svc/database-made"
stage restore
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
