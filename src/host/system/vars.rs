//! Configuration variables for hosts.

svc_base::variables! {
    "host.provisioned", in "`host.env`", by ["all host programs"] {
        /// The id of this machine.
        SVC_MACHINE_ID: "UUID" = required, in "`host.env`, `update.env`";
        /// The owner's id at the identity provider.
        SVC_USER_ID: "text" = required;
        /// The owner's handle.
        SVC_HANDLE: "text" = required;
        /// The machine's slot.
        SVC_SLOT: "text" = "primary";
        /// The machine's epoch when it was created. Heartbeats deliver later epochs.
        SVC_EPOCH: "number" = required;
        /// URL of the platform. Root prefers the value in `update.env`, and copies it there from `host.env` if it is
        /// missing.
        PLATFORM_INTERNAL_URL: "URL" = required, in "`host.env`, `update.env`";
        /// The machine's own initial token for the platform. Heartbeats deliver later tokens.
        UPGRADE_TOKEN: "text" = required;
        /// The platform's initial public keys. Heartbeats deliver later keys.
        SVC_PROOF_KEYS: "JWK set" = required, by ["svc-gateway", "svc-sync-agent"];
        /// The machine's host name, for its certificate. Heartbeats deliver later
        /// names and the certificate authority's settings.
        SVC_HOST_NAME: "host name" = unset, by ["svc-gateway", "svcctl"];
        /// The identity provider's issuer.
        IDP_ISSUER: "text" = unset, by ["svc-gateway"];
        /// Accepted audiences.
        IDP_AUDIENCE: "comma-separated list" = derived "**required** with `IDP_ISSUER`",
            by ["svc-gateway"];
        /// URL of the identity provider's JWK set. Requires `IDP_ISSUER`. If it is not an http or https URL, the
        /// gateway ignores the issuer and logs an error.
        IDP_JWKS_URL: "URL" = derived "`<issuer>/.well-known/jwks.json`", by ["svc-gateway"];
        /// URL of the local database. `svc-update boot` appends this variable, with a password that it generates
        /// on the machine.
        DATABASE_URL: "`postgres://user:password@host:port/database`" = required;
        /// Version of the first release.
        SVC_IMAGE_VERSION: "version" = required,
            in "`host.env`, `boot.env`", by ["svc-update", "svc-register", "svc-sync-agent"];
        /// Token for the machine's one-time registration and for its boot reports.
        REGISTRATION_TOKEN: "text" = required, in "`boot.env`", by ["svc-register", "svc-restore"];
        /// URL of the first release's bundle.
        SVC_HOST_BUNDLE_URL: "URL" = required, in "`update.env`", by ["svc-update"];
        /// Digest of the first release's bundle.
        SVC_BUNDLE_SHA256: "64 hexadecimal digits" = required,
            in "`update.env`", by ["svc-update", "svc-register"];
        /// Container image of the database, if it is not the default.
        SVC_POSTGRES_IMAGE: "image name" = derived "the unit's image",
            in "`update.env`", by ["svc-postgres.service"];
        /// Ed25519 keys whose signature on a bundle's manifest is trusted. An update with a newer key
        /// set writes this variable and `SVC_BUNDLE_KEYS_SEQUENCE`. The process environment is ignored.
        SVC_BUNDLE_PUBLIC_KEYS: "comma-separated list" = unset, in "`update.env`", by ["svc-update"];
        /// Sequence number of the key set in `SVC_BUNDLE_PUBLIC_KEYS`.
        SVC_BUNDLE_KEYS_SEQUENCE: "number" = "0", in "`update.env`", by ["svc-update"];
        /// Password of the database's container. `svc-update boot` generates it on the machine. It is not
        /// quoted, because podman would keep the quotes.
        POSTGRES_PASSWORD: "text" = unset, in "`postgres.env`", by ["svc-update", "svc-postgres.service"];
        /// The snapshot for the machine's first restore. Later restores use the latest.
        SVC_RESTORE_SNAPSHOT: "key" = derived "the latest", in "`boot.env`", by ["svc-restore"];
        /// `required`: there must be a snapshot to restore. `empty`: if it is confirmed that there is no
        /// snapshot, the machine starts without one.
        SVC_RESTORE_MODE: "`required` or `empty`" = required, in "`boot.env`", by ["svc-restore"];
        /// Whether the first boot restores the owner's files. `svcctl recover --without-files` sets `false`.
        SVC_RESTORE_FILES: "`true` or `false`" = "true", in "`boot.env`", by ["svc-sync-agent"];
        /// Whether an earlier machine has saved files, so that an empty file backup counts as a loss.
        SVC_EXPECT_FILES: "`true` or `false`" = "false", in "`boot.env`", by ["svc-sync-agent"];
    }

    "host.settings", in "process environment or the files above", by ["svc-gateway"] {
        /// Root of all paths of a host, so that several hosts can share one machine.
        SVC_ROOT: "path" = "/", in "process environment", by ["all host programs"];
        /// Address of the gateway.
        GATEWAY_LISTEN: "address and port" = "0.0.0.0:443",
            by ["svc-gateway", "svc-register", "svc-sync-agent", "svc-update"];
        /// Directory of the PostgreSQL 16 client tools. If the release's runtime has none, the tools in the
        /// container `svc-postgres` are used. Programs that run as root ignore it in files that belong to another
        /// user.
        SVC_PG_BIN_DIR: "path" = derived "the release's runtime", by ["svc-db-backup", "svc-restore"];
        /// How long a release may take to become healthy before `svc-update` rolls back.
        SVC_UPDATE_HEALTH_SECONDS: "seconds" = "180",
            in "process environment or `update.env`", by ["svc-update"];
        /// How long an update waits for a database snapshot, measured from the last time a backup made progress.
        SVC_UPDATE_SNAPSHOT_SECONDS: "seconds" = "1800",
            in "process environment or `update.env`", by ["svc-update"];
        /// Program to use in place of `systemctl`, for an `SVC_ROOT` that systemd does not manage.
        SVC_SYSTEMCTL: "path" = derived "`systemctl`, if systemd is running", in "process environment",
            by ["svc-update", "svc-restore", "svcctl"];
        /// An operator's credential on the host, accepted together with a proof, or on the gateway's socket. The
        /// gateway ignores an invalid token and logs an error.
        ADMIN_TOKEN: "at least 32 printable ASCII characters" = unset;
        /// PEM file with a certificate chain for the machine's name and TLS key, used in place of a chain from
        /// the certificate authority. The gateway reloads it when it changes. See [Machine
        /// certificates](../operating/certificates.md#certificates-from-files).
        GATEWAY_TLS_CERT_FILE: "path" = unset;
        /// Initial backoff after a failed request for a certificate. It doubles, up to 6 hours; jitter adds up
        /// to 100%.
        ACME_RETRY_SECONDS: "seconds, at least 1" = "120";
        /// Timeout of an app's SQL statement. The gateway reduces a longer one to the maximum and logs an error.
        BRIDGE_STATEMENT_TIMEOUT_MS: "milliseconds, 1 to 2147483647" = "10000";
        /// How long a change listener may stay disconnected and still resume.
        BRIDGE_CHANGES_KEEP_SECONDS: "seconds, at least 1" = "3600";
        /// Compression of dumps. See below.
        BACKUP_COMPRESSION: "`none`, `gzip:1` to `gzip:9`, `zstd:1` to `zstd:19`" = "gzip:1",
            by ["svc-db-backup"];
        /// How long a restore, drill or check keeps retrying while the store or database is unreachable,
        /// measured from the last time it made progress.
        RESTORE_STORE_DEADLINE_SECONDS: "seconds" = "300", by ["svc-restore", "svc-db-backup"];
        /// Initial backoff after a failed hourly backup. It doubles, up to 15 minutes, until the next hourly
        /// run is near.
        BACKUP_RETRY_SECONDS: "seconds, at least 1" = "120", by ["svc-db-backup"];
        /// Maximum time between verifications of a snapshot of the database, and of a pack of the file backup.
        VERIFY_WITHIN_DAYS: "days, at least 1" = "30", by ["svc-db-backup", "svc-sync-agent"];
        /// Maximum rate at which the file backup uploads; 0 for no limit.
        FILES_UPLOAD_KIB_PER_SECOND: "KiB per second" = "0", by ["svc-sync-agent"];
        /// How long registration waits for the gateway to be ready.
        REGISTER_GATEWAY_DEADLINE_SECONDS: "seconds" = "120", by ["svc-register"];
        /// How long registration keeps retrying if the platform does not respond.
        REGISTER_PLATFORM_DEADLINE_SECONDS: "seconds" = "120", by ["svc-register"];
        /// Interval between heartbeats to the platform.
        HEARTBEAT_SECONDS: "seconds, at least 1" = "30", by ["svc-sync-agent"];
        /// Interval between checks for changes to the content of `system/vps-meta.json`.
        VPS_META_SECONDS: "seconds, at least 1" = "300", by ["svc-sync-agent"];
        /// Maximum time between writes of `system/vps-meta.json`.
        VPS_META_AT_LEAST_SECONDS: "seconds, at least 1" = "86400", by ["svc-sync-agent"];
        /// Development only. See below.
        GATEWAY_AUTH: "flag" = "true";
        /// Development only. See below.
        SVC_PRODUCTION: "flag" = "true";
        /// Development only. See below.
        SVC_ENVIRONMENT: "`production`, `development` or `local`" = "production";
    }
}
