#!/bin/sh
# Builds the boot files of the lab's machines in $1: base.img (ext4), vmlinuz, initrd. Requires root, mmdebstrap, podman
# and e2fsprogs. $2 is a directory with PostgreSQL 16 (`bin`, `lib`, `share`), $3 the directory of its libraries, $4 the
# public SSH key for root, as installed by a provider.
set -eu
out=$1 postgres=$2 libraries=$3 key=$4
suite=bookworm
work=$(mktemp -d "$out/.build-XXXXXX")

# Mounts are confined to a namespace that ends with this script.
if [ "${IN_NAMESPACE:-}" != 1 ]; then
  rm -rf "$work"
  exec unshare --mount --propagation private env IN_NAMESPACE=1 sh "$0" "$@"
fi
trap 'umount -R "$work/root" 2>/dev/null || true; rm -rf "$work"' EXIT INT TERM

packages="systemd,systemd-sysv,dbus,udev,cloud-init,linux-image-cloud-amd64,iproute2,ca-certificates,curl,podman,crun,\
netavark,aardvark-dns,iptables,nftables,openssh-server,isc-dhcp-client,ifupdown,procps,kmod,systemd-timesyncd,e2fsprogs,jq"
mmdebstrap --quiet --variant=minbase --include="$packages" "$suite" "$work/root"
mmdebstrap --quiet --variant=minbase "$suite" "$work/postgres"

# The database's image, compatible with Docker's official `postgres:16`: the same variables, user and volume.
image=$work/postgres
rm -rf "$image/var/cache/apt" "$image/var/lib/apt/lists" "$image/usr/share/doc" "$image/usr/share/man" "$image/usr/share/locale"
mkdir -p "$image/opt/postgresql/server" "$image/usr/lib/postgresql"
cp -a "$postgres" "$image/opt/postgresql/server/install"
cp -a "$libraries" "$image/opt/postgresql/$(basename "$libraries")"
ln -s /opt/postgresql/server/install "$image/usr/lib/postgresql/16"
chmod -R go+rX "$image/opt/postgresql"
echo 'postgres:x:999:999::/var/lib/postgresql:/bin/sh' >>"$image/etc/passwd"
echo 'postgres:x:999:' >>"$image/etc/group"
mkdir -p "$image/var/lib/postgresql/data" "$image/var/run/postgresql"
chown -R 999:999 "$image/var/lib/postgresql" "$image/run/postgresql" 2>/dev/null || chown -R 999:999 "$image/var/lib/postgresql"
cat >"$image/usr/local/bin/docker-entrypoint.sh" <<'ENTRYPOINT'
#!/bin/sh
set -eu
if [ "$(id -u)" = 0 ]; then
  mkdir -p "$PGDATA" /var/run/postgresql
  chown -R postgres:postgres "$PGDATA" /var/run/postgresql
  chmod 0700 "$PGDATA"
  exec setpriv --reuid=postgres --regid=postgres --clear-groups "$0" "$@"
fi
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  : "${POSTGRES_PASSWORD:?must be set for a new database}"
  secret=$(mktemp)
  printf '%s\n' "$POSTGRES_PASSWORD" >"$secret"
  initdb --username="${POSTGRES_USER:-postgres}" --pwfile="$secret" ${POSTGRES_INITDB_ARGS:-} >/dev/null
  rm "$secret"
  echo 'host all all all scram-sha-256' >>"$PGDATA/pg_hba.conf"
  pg_ctl -o "-c listen_addresses=''" -w start >/dev/null
  database=${POSTGRES_DB:-postgres}
  [ "$database" = postgres ] || PGPASSWORD=$POSTGRES_PASSWORD createdb --username="${POSTGRES_USER:-postgres}" "$database"
  pg_ctl -m fast -w stop >/dev/null
fi
unset POSTGRES_PASSWORD
exec "$@"
ENTRYPOINT
chmod 0755 "$image/usr/local/bin/docker-entrypoint.sh"

# Imports the image into the machine's image store with the machine's own podman: an import in a guest would take minutes.
root=$work/root
mkdir -p "$root/etc/containers"
printf '[storage]\ndriver = "overlay"\nrunroot = "/run/containers/storage"\ngraphroot = "/var/lib/containers/storage"\n' \
  >"$root/etc/containers/storage.conf"
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/run"
tar --create --numeric-owner --directory="$image" . | chroot "$root" podman import --quiet \
  --change 'ENV PATH=/usr/local/bin:/usr/lib/postgresql/16/bin:/usr/bin:/bin:/usr/sbin:/sbin' \
  --change 'ENV PGDATA=/var/lib/postgresql/data' --change 'ENV LANG=C.UTF-8' \
  --change 'VOLUME /var/lib/postgresql/data' --change 'EXPOSE 5432' --change 'STOPSIGNAL SIGINT' \
  --change 'ENTRYPOINT ["docker-entrypoint.sh"]' --change 'CMD ["postgres"]' - docker.io/library/postgres:16 >/dev/null
umount -R "$root"

# A cloud image: no host keys, no machine id, and cloud-init with the seed as its only data source.
rm -f "$root"/etc/ssh/ssh_host_* "$root"/var/lib/dbus/machine-id
: >"$root/etc/machine-id"
printf 'datasource_list: [ NoCloud, None ]\nlocale: false\ngrub_dpkg: { enabled: false }\n' >"$root/etc/cloud/cloud.cfg.d/90-lab.cfg"
# The default interval of half a minute would slow down the tests.
mkdir -p "$root/etc/systemd/system/svc-sync-agent.service.d"
printf '[Service]\nEnvironment=HEARTBEAT_SECONDS=5\n' >"$root/etc/systemd/system/svc-sync-agent.service.d/lab.conf"
printf '/dev/vda / ext4 errors=remount-ro,noatime 0 1\n' >"$root/etc/fstab"
mkdir -p -m 0700 "$root/root/.ssh"
cp "$key" "$root/root/.ssh/authorized_keys"
chmod 0600 "$root/root/.ssh/authorized_keys"
mkdir -p "$root/var/log/journal"
cp "$root"/boot/vmlinuz-* "$out/vmlinuz"
cp "$root"/boot/initrd.img-* "$out/initrd"
truncate --size=8G "$work/base.img"
mkfs.ext4 -q -F -E lazy_itable_init=0,nodiscard -O ^has_journal -d "$root" "$work/base.img"
tune2fs -O has_journal "$work/base.img" >/dev/null
mv "$work/base.img" "$out/base.img"
