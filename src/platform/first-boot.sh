export DEBIAN_FRONTEND=noninteractive
. /opt/svc/env/boot.env
. /opt/svc/env/host.env
fail() { [ ! -x /opt/svc/bin/svc-register ] || /opt/svc/bin/svc-register failure --stage "$1" --message "$2" || true; exit 1; }
command -v podman >/dev/null || { apt-get update && apt-get install -y podman curl; } || fail bundle "packages"
id svc >/dev/null 2>&1 || useradd --create-home --home-dir /home/svc svc
mkdir -p /opt/svc/bootstrap /home/svc/home
if ! grep -q '^DATABASE_URL=' /opt/svc/env/host.env; then
  password=$(head -c 32 /dev/urandom | od -An -vtx1 | tr -d ' \n')
  podman run -d --name svc-postgres --restart always -p 127.0.0.1:5432:5432 -v svc-postgres:/var/lib/postgresql/data \
    -e POSTGRES_PASSWORD="$password" -e POSTGRES_DB=svc -e POSTGRES_INITDB_ARGS=--auth=scram-sha-256 docker.io/library/postgres:16 \
    || fail database "container"
  echo "DATABASE_URL=postgres://postgres:$password@127.0.0.1:5432/svc" >>/opt/svc/env/host.env
fi
for n in $(seq 60); do podman exec svc-postgres pg_isready -q -h 127.0.0.1 && break; sleep 2; done
podman exec svc-postgres pg_isready -q -h 127.0.0.1 || fail database "not ready"
if [ ! -e /opt/svc/current ]; then
  cd /opt/svc/bootstrap
  curl --fail --silent --show-error --retry 5 --header "Authorization: Bearer $UPGRADE_TOKEN" --output bundle.tar.gz "$SVC_HOST_BUNDLE_URL"
  echo "$SVC_BUNDLE_SHA256  bundle.tar.gz" | sha256sum --check --status
  tar --extract --gzip --no-same-owner --file bundle.tar.gz bin/svc
  rm bundle.tar.gz
  ./bin/svc svc-update boot
fi
/opt/svc/bin/svc-restore || fail restore "restore"
systemctl daemon-reload
systemctl enable --now svc-gateway.service svc-sync-agent.service svc-db-backup.timer || fail gateway "units"
/opt/svc/bin/svc-register || fail register "register"
