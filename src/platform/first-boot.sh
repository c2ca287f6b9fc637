export DEBIAN_FRONTEND=noninteractive
. /opt/svc/env/boot.env
. /opt/svc/env/host.env
# A credential is no argument of a process: curl reads it as configuration, from a builtin.
authorized() { token=$1; shift; printf 'header = "Authorization: Bearer %s"\n' "$token" | curl --config - --silent --show-error "$@"; }
# What svc-register says better, once it is here.
tell() {
  authorized "$REGISTRATION_TOKEN" --max-time 5 --output /dev/null --header 'content-type: application/json' \
    --data "$2" "${PLATFORM_INTERNAL_URL%/}/vps/$SVC_MACHINE_ID/$1" || true
}
register() {
  if [ -x /opt/svc/bin/svc-register ]; then /opt/svc/bin/svc-register "$@"
  elif [ -x /opt/svc/bootstrap/bin/svc ]; then /opt/svc/bootstrap/bin/svc svc-register "$@"
  else return 127; fi
}
stage() { register stage "$1" || tell boot-stage "{\"stage\":\"$1\"}"; }
fail() { register failure --stage "$1" --message "$2" || tell boot-failure "{\"stage\":\"$1\",\"message\":\"$2\"}"; exit 1; }
# A program of ours: its last words go with its failure.
part() {
  at=$1; shift; ended=0
  "$@" 2>/opt/svc/boot.err || ended=$?
  cat /opt/svc/boot.err >&2
  [ $ended -eq 0 ] || fail "$at" "$(tail -n 1 /opt/svc/boot.err)"
}
stage database
command -v podman >/dev/null && command -v curl >/dev/null || { apt-get update && apt-get install -y podman curl; } || fail database "the packages podman and curl could not be installed"
id svc >/dev/null 2>&1 || useradd --create-home --home-dir /home/svc svc
mkdir -p /opt/svc/bootstrap /home/svc/home
if ! grep -q '^DATABASE_URL=' /opt/svc/env/host.env; then
  password=$(head -c 32 /dev/urandom | od -An -vtx1 | tr -d ' \n')
  POSTGRES_PASSWORD=$password podman run -d --name svc-postgres --restart always -p 127.0.0.1:5432:5432 -v svc-postgres:/var/lib/postgresql/data \
    -e POSTGRES_PASSWORD -e POSTGRES_DB=svc -e POSTGRES_INITDB_ARGS=--auth=scram-sha-256 docker.io/library/postgres:16 \
    || fail database "the container of PostgreSQL did not start"
  echo "DATABASE_URL=postgres://postgres:$password@127.0.0.1:5432/svc" >>/opt/svc/env/host.env
fi
for n in $(seq 60); do podman exec svc-postgres pg_isready -q -h 127.0.0.1 && break; sleep 2; done
podman exec svc-postgres pg_isready -q -h 127.0.0.1 || fail database "PostgreSQL was not ready within two minutes"
if [ ! -e /opt/svc/current ]; then
  stage bundle
  cd /opt/svc/bootstrap
  authorized "$UPGRADE_TOKEN" --fail --retry 5 --output bundle.tar.gz "$SVC_HOST_BUNDLE_URL" || fail bundle "the bundle could not be downloaded"
  echo "$SVC_BUNDLE_SHA256  bundle.tar.gz" | sha256sum --check --status || fail bundle "the bundle has another SHA-256 than was asked for"
  tar --extract --gzip --no-same-owner --file bundle.tar.gz bin/svc || fail bundle "the bundle could not be unpacked"
  rm bundle.tar.gz
  part bundle ./bin/svc svc-update boot
fi
stage restore
part restore /opt/svc/bin/svc-restore
stage gateway
systemctl daemon-reload
systemctl enable --now svc-gateway.service svc-sync-agent.service svc-db-backup.timer || fail gateway "the units did not start; their journal on the host says why"
stage register
part register /opt/svc/bin/svc-register
