//! Declares the platform's environment variables.

svc_base::variables! {
    "platform.listeners", in "process environment or the platform's env file", by ["svc-platform"] {
        /// Address of the API. With port 0, a free port is chosen and printed at startup.
        PLATFORM_LISTEN: "address and port" = "127.0.0.1:8080";
        /// PEM file with the API's certificate chain. Without it and its key, the API serves plain HTTP.
        PLATFORM_TLS_CERT_FILE: "path" = unset;
        /// PEM file with the key of that certificate.
        PLATFORM_TLS_KEY_FILE: "path" = unset;
        /// Address of the public hosts.
        ROUTER_LISTEN: "address and port" = "0.0.0.0:8443";
        /// PEM file with the certificate chain of the public hosts. Without it and its key, the router serves
        /// plain HTTP.
        ROUTER_TLS_CERT_FILE: "path" = unset;
        /// PEM file with the key of that certificate.
        ROUTER_TLS_KEY_FILE: "path" = unset;
        /// The platform's base URL for operators.
        PLATFORM_PUBLIC_URL: "URL" = required;
        /// The URL at which hosts reach the platform.
        PLATFORM_INTERNAL_URL: "URL" = derived "`PLATFORM_PUBLIC_URL`";
        /// Base of the bundle's URL, before `/system-bundles/…`.
        SVC_HOST_BUNDLE_BASE_URL: "URL" = derived "`PLATFORM_PUBLIC_URL`";
        /// The exact URL of the bundle, used for every version.
        SVC_HOST_BUNDLE_URL: "URL" = unset;
        /// Public host name of the shell and the gateway, optionally with a port. If a port is given, requests must
        /// use it.
        APP_HOST: "host name" = required;
        /// Public host name of code-server, optionally with a port. Must differ from `APP_HOST`.
        CODE_HOST: "host name" = required;
        /// The scheme that browsers use.
        ROUTER_PUBLIC_SCHEME: "`https` or `http`" = derived "the listener's";
    }

    "platform.database", in "process environment or the platform's env file", by ["svc-platform"] {
        /// URL of the platform's database.
        PLATFORM_DATABASE_URL: "`postgres://user:password@host:port/database`" = required;
        /// Maximum number of connections that one process opens for operators' changes and operations.
        DATABASE_CONTROL_CONNECTIONS: "number, at least 1" = "10";
        /// Maximum number of connections that one process opens for requests from hosts.
        DATABASE_HOST_CONNECTIONS: "number, at least 1" = "8";
        /// Maximum number of connections that one process opens for operators' reports on the fleet.
        DATABASE_REPORT_CONNECTIONS: "number, at least 1" = "4";
        /// Maximum number of connections that one process opens for the router's sessions. The router's polls use
        /// one more connection.
        DATABASE_ROUTER_CONNECTIONS: "number, at least 1" = "10";
        /// Maximum difference between a process's clock and the database's. If it is exceeded, `/readyz/control`
        /// fails and a warning is logged. The clocks are compared at startup and every 30 s
        /// (`svc_clock_skew_seconds`).
        MAX_CLOCK_SKEW_MS: "milliseconds" = "2000";
    }

    "platform.keys", in "process environment or the platform's env file", by ["svc-platform"] {
        /// The key with which the platform issues tokens to hosts and operators, signs fences, and encrypts the signing
        /// keys and the keys of file backups.
        PLATFORM_KEY: "32 bytes, in hexadecimal or base64" = required;
        /// A second active key. It only verifies and decrypts; nothing new is signed or encrypted with it. See [Rotate
        /// PLATFORM_KEY](../operating/keys.md#rotate-platform_key).
        PLATFORM_KEY_PREVIOUS: "32 bytes, in hexadecimal or base64" = unset;
        /// A bearer token that has every scope. It is used to create the first operators.
        PLATFORM_SECRET: "at least 32 printable ASCII characters" = required;
        /// Age at which a signing key gets a successor.
        PROOF_KEY_ROTATE_SECONDS: "seconds, at least 1" = "2592000";
        /// How long an old signing key remains active after every host has acknowledged the new one; also the age at
        /// which a new app key starts to sign. Set it to more than two heartbeat intervals.
        PROOF_KEY_OVERLAP_SECONDS: "seconds, at least 1" = "120";
        /// Time without a heartbeat after which a rotation no longer waits for a host.
        PROOF_KEY_SILENCE_SECONDS: "seconds, at least 1" = "86400";
        /// Age at which a machine's `UPGRADE_TOKEN` gets a successor.
        UPGRADE_TOKEN_ROTATE_SECONDS: "seconds, at least 1" = "2592000";
        /// How long an `UPGRADE_TOKEN` is accepted after the first heartbeat with its successor.
        UPGRADE_TOKEN_OVERLAP_SECONDS: "seconds" = "3600";
    }

    "platform.identity", in "process environment or the platform's env file", by ["svc-platform"] {
        /// The identity provider's issuer; passed on to hosts.
        IDP_ISSUER: "text" = required;
        /// Accepted audiences; passed on to hosts.
        IDP_AUDIENCE: "comma-separated list" = required;
        /// URL of the identity provider's keys; passed on to hosts.
        IDP_JWKS_URL: "URL" = derived "`<issuer>/.well-known/jwks.json`";
        /// URL of the sign-in page, to which the router redirects browsers that are not signed in.
        IDP_SIGN_IN_URL: "URL" = required;
    }

    "platform.provisioning", in "process environment or the platform's env file", by ["svc-platform"] {
        /// Permits provisioning.
        CUSTOMER_VPS_ENABLED: "flag" = "false";
        /// Bundle version for new machines.
        CUSTOMER_VPS_IMAGE_VERSION: "version" = required;
        /// Port on which the platform connects to hosts. It is not passed on to hosts, which accept HTTPS only on
        /// 443: change it only with a simulated provider.
        CUSTOMER_VPS_HTTPS_PORT: "port" = "443";
        /// Whether a host's certificate must chain to a trusted root for the host's name, in addition to having the
        /// pinned key. Requires `HOST_DOMAIN`. See [Machine certificates](../operating/certificates.md).
        CUSTOMER_VPS_TLS_VERIFY: "flag" = "false";
        /// How long after its registration a machine is verified only by its pinned key, so that it can get its first
        /// certificate.
        CUSTOMER_VPS_TLS_VERIFY_GRACE_SECONDS: "seconds" = "86400";
        /// Machines that are always verified only by their pinned keys.
        CUSTOMER_VPS_TLS_VERIFY_EXCEPT: "machine ids, separated by commas" = unset;
        /// Domain of the hosts' names, `<machine-id>.<HOST_DOMAIN>`. Must not be below the registrable domain of
        /// `APP_HOST`, `CODE_HOST` or the sign-in page: see [Names](../operating/certificates.md#names).
        HOST_DOMAIN: "domain" = unset;
        /// Directory of the certificate authority from which hosts request certificates (ACME, RFC 8555), for
        /// example `https://acme-v02.api.letsencrypt.org/directory`. By setting it, you accept the authority's terms
        /// of service. Requires `HOST_DOMAIN`.
        ACME_DIRECTORY_URL: "https URL" = unset;
        /// Address to which the authority sends notices.
        ACME_CONTACT: "e-mail address" = unset;
        /// Key identifier for external account binding (EAB), as issued by the authority. Set it if the authority
        /// requires the hosts' ACME accounts to be bound to your account.
        ACME_EAB_KEY_ID: "text" = unset;
        /// HMAC key for external account binding. It is sent to every host.
        ACME_EAB_HMAC_KEY: "base64url" = unset;
        /// Ed25519 keys with which hosts verify bundle manifests: base64 of the raw 32 bytes.
        BUNDLE_PUBLIC_KEYS: "comma-separated list" = unset;
        /// Sequence number of the key set in `BUNDLE_PUBLIC_KEYS`, with which new hosts start: the `--keys-sequence` of
        /// the last release that contained the set. See [Rotate the release
        /// keys](../operating/keys.md#rotate-the-release-keys).
        BUNDLE_KEYS_SEQUENCE: "number" = "0";
        /// Networks from which the platform connects to hosts. New hosts accept connections to :443 only from these
        /// networks. Loopback, multicast and unspecified addresses are rejected. If unset, every address is accepted.
        PLATFORM_EGRESS_CIDRS: "1 to 32 addresses or CIDRs, separated by commas" = unset;
        /// Container image of the hosts' database.
        SVC_POSTGRES_IMAGE: "image name" = derived "`docker.io/library/postgres:16`";
        /// Whether provisioning requires a subscription.
        BILLING_ENFORCEMENT: "flag" = "true";
        /// Whether confirmations are required: a request that provisions a new customer must confirm the monthly cost
        /// and the customer's consent (`confirmedMonthlyCost`, `confirmedOptIn`), and a request that replaces a failed
        /// machine with a machine of a different server type must confirm the cost. `svcctl provision` always sends
        /// them.
        PROVISION_CONFIRMATION: "flag" = "false";
        /// Name of this environment, such as `production`. `svcctl provision` shows it before it changes anything.
        PLATFORM_ENVIRONMENT: "text of at most 64 characters" = unset;
        /// Maximum number of preview machines per owner.
        PREVIEW_MAX_PER_OWNER: "number" = "8";
        /// Age at which a preview machine is deleted.
        PREVIEW_TTL_HOURS: "hours" = "72";
        /// URL to which requests are redirected if the user has no running machine; only for legacy deployments.
        LEGACY_FALLBACK_URL: "URL" = unset;
        /// Timeout for a host's registration, counted from the creation of its server, or from the host's last report
        /// of progress.
        REGISTRATION_TTL_SECONDS: "seconds" = "1800";
    }

    "platform.provider", in "process environment or the platform's env file", by ["svc-platform"] {
        /// Token for the cloud provider's API.
        PROVIDER_API_TOKEN: "text" = required;
        /// URL of the provider's API.
        PROVIDER_API_URL: "URL" = "https://api.hetzner.cloud/v1";
        /// Name of the project to which the token belongs. The provider's API does not report it.
        /// `svcctl provision` shows it.
        PROVIDER_PROJECT: "text of at most 64 characters" = unset;
        /// Maximum number of servers in the project. The provider's API does not report it. A request that would exceed
        /// it is rejected. Because the server of a replaced machine is kept for some time, one replacement per slot may
        /// exceed it.
        PROVIDER_SERVER_LIMIT: "number, at least 1" = unset;
        /// Server type for a machine if the request does not specify one.
        PROVIDER_SERVER_TYPE: "server type" = "cpx22";
        /// Location in which servers are created.
        PROVIDER_LOCATION: "location" = "nbg1";
        /// Locations to try, in this order, if the provider has no capacity in `PROVIDER_LOCATION`, for
        /// example `hel1,fsn1`.
        PROVIDER_FALLBACK_LOCATIONS: "at most 8 locations, separated by commas" = unset;
        /// Image for new servers.
        PROVIDER_IMAGE: "image name" = "debian-12";
        /// How long a server may take to appear after a create request that received no response.
        PROVIDER_AMBIGUOUS_WAIT_SECONDS: "seconds" = "60";
    }

    "platform.store-credentials", in "process environment or the platform's env file", by ["svc-platform"] {
        /// The object store's URL for hosts, if it differs from the platform's.
        HOST_OBJECT_STORE_ENDPOINT: "URL" = derived "`OBJECT_STORE_ENDPOINT`";
        /// `sts`: each host gets short-lived credentials that reach only its own slot and cannot delete objects; they
        /// are renewed while its machine is current. `static`: every host gets the platform's own credentials; a
        /// warning is logged at startup.
        STORE_HOST_CREDENTIALS: "`sts` or `static`" = derived "`sts` with `STS_ROLE_ARN`, else **required**";
        /// The role that is assumed for hosts. It needs at least get, put, list and abort on the bucket.
        /// MinIO accepts any name.
        STS_ROLE_ARN: "ARN" = derived "**required** with `sts`";
        /// URL to which AssumeRole requests are sent.
        STS_ENDPOINT: "URL" = derived "`OBJECT_STORE_ENDPOINT`, else AWS's for `AWS_REGION`";
        /// Whether hosts' sessions can create snapshots and pointer-log entries but not overwrite them. See below.
        STORE_WRITE_ONCE: "flag" = "false";
        /// Lifetime of a host's outage session. See below.
        STS_DURATION_SECONDS: "seconds, 900 to 604800" = "43200";
    }

    "platform.replacement", in "process environment or the platform's env file", by ["svc-platform"] {
        /// How long the old host may be unreachable before its final backup is skipped. As long as the host responds
        /// and makes progress, the operation waits for it.
        LAST_BACKUP_DEADLINE_SECONDS: "seconds" = "60";
        /// How long a final backup may make less than 1 MiB of progress before the operation waits for an operator.
        LAST_BACKUP_STALL_SECONDS: "seconds" = "300";
        /// How long a final backup may take in total before the operation waits for an operator, regardless of
        /// progress.
        LAST_BACKUP_LIMIT_SECONDS: "seconds" = "43200";
        /// How long powering off a replaced or deleted machine's server is retried after the shutdown timeout before
        /// the operation continues.
        POWER_OFF_RETRY_SECONDS: "seconds" = "120";
        /// How long a replaced server is kept after its successor's first healthy heartbeat. With 0, it is deleted
        /// immediately.
        PREDECESSOR_KEEP_SECONDS: "seconds" = "86400";
        /// How long a deleted machine's server is kept, powered off, for `undelete`.
        DELETE_GRACE_SECONDS: "seconds" = "86400";
        /// How often each slot's file backups are pruned. With 0, they are pruned only on request.
        FILES_PRUNE_SECONDS: "seconds" = "86400";
        /// How long this installation keeps a server without a known machine after first seeing it. It is then deleted
        /// only if an operator has released it.
        ORPHAN_GRACE_SECONDS: "seconds" = "86400";
    }

    "platform.operations", in "process environment or the platform's env file", by ["svc-platform"] {
        /// Time without progress after which an operation fails. Deletions are retried until they succeed, and an
        /// operation that needs a decision waits for it.
        OPERATION_DEADLINE_SECONDS: "seconds" = "7200";
        /// Maximum duration of an operation, and of a boot that makes progress.
        OPERATION_LIMIT_SECONDS: "seconds" = "86400";
        /// Timeout for a host's shutdown, after which its power is cut.
        RESIZE_SHUTDOWN_SECONDS: "seconds" = "90";
        /// Timeout for cutting the power and changing the server type after the shutdown. When it expires, the change
        /// is abandoned.
        RESIZE_CHANGE_SECONDS: "seconds" = "600";
        /// Timeout for powering on a resized server, for restarting a server, and for a host's first healthy heartbeat
        /// after its server was powered on or restarted.
        RESIZE_HEALTH_SECONDS: "seconds" = "600";
        /// How long a host may report nothing about a requested update. If it reports that the update is in progress,
        /// the limit is six times as long. Time during which the rollout is paused does not count.
        ROLLOUT_SILENCE_SECONDS: "seconds" = "1800";
        /// Interval at which processes poll for due operations.
        PLATFORM_POLL_MS: "milliseconds, at least 10" = "500";
        /// Duration of a lease: a process that does not renew it within this time loses its operation.
        PLATFORM_LEASE_SECONDS: "seconds, at least 1" = "15";
    }

    "platform.reconciler", in "process environment or the platform's env file", by ["svc-platform"] {
        /// Interval at which the provider's servers and expired rows are checked. A fleet of more than 400 servers is
        /// listed less often, so that the requests use at most a quarter of the provider's rate limit: 5,000 servers
        /// every 400 s.
        RECONCILE_SECONDS: "seconds, at least 1" = "30";
        /// Minimum interval between two heartbeat-triggered lookups of one machine's server. A heartbeat triggers a
        /// lookup at the provider if the machine should be off or has failed.
        SERVER_CHECK_SECONDS: "seconds" = "60";
        /// Minimum time without a heartbeat before a host's server can count as gone.
        SERVER_GONE_SILENCE_SECONDS: "seconds" = "120";
        /// How long ended operations and rollouts are kept.
        OPERATION_RETENTION_DAYS: "days, 1 to 36500" = "400";
        /// How long the operators' audit log is kept.
        AUDIT_RETENTION_DAYS: "days, 1 to 36500" = "3653";
    }

    "platform.rates", in "process environment or the platform's env file", by ["svc-platform"] {
        // Above the rate of an operator's script that runs in a loop, but low enough that a runaway script does not
        // exhaust the process.
        /// Requests per second from one operator, or with `PLATFORM_SECRET`; the burst is ten seconds' worth. `0` means
        /// no limit.
        PLATFORM_OPERATOR_REQUESTS_PER_SECOND: "number" = "200";
        // A host sends two heartbeats a minute; a download or an update adds a few requests.
        /// Requests per second with one host's `UPGRADE_TOKEN`; the burst is 20 seconds' worth. Requests for storage
        /// credentials are limited to one every 10 seconds, with a burst of 20. `0` removes both limits.
        PLATFORM_HOST_REQUESTS_PER_SECOND: "number" = "5";
        // Enough for a fleet of 6,000 machines behind one address to send one token each per minute after a platform
        // restart.
        /// Bearer tokens per second from one address (IPv4) or network (IPv6, /64); the burst is ten seconds'
        /// worth. Tokens that the process has accepted in the last ten minutes do not count. `0` means no limit.
        PLATFORM_ADDRESS_CHECKS_PER_SECOND: "number" = "100";
        /// Addresses of the proxies in front of the API. They are exempt from the per-address limit.
        PLATFORM_TRUSTED_PROXIES: "addresses and CIDRs, separated by commas" = unset;
    }

    "platform.router", in "process environment or the platform's env file", by ["svc-platform"] {
        // A change to a machine must take effect within one second.
        /// Interval at which routes are refreshed.
        PLATFORM_ROUTES_POLL_MS: "milliseconds, 10 to 500" = "500";
        // Stale routes are safe, because a connection requires the TLS key that the machine registered.
        /// How long routes are served while the database is unreachable.
        ROUTER_MAX_STALE_SECONDS: "seconds, at least 1" = "1800";
        // A quarter of one core's throughput.
        /// Requests from one user that a router process forwards per second; the burst is two seconds' worth. Requests
        /// beyond that get 429 with `Retry-After`. `0` means no limit.
        ROUTER_USER_REQUESTS_PER_SECOND: "number" = "5000";
        // A browser needs about one verification per minute, so thousands of browsers can share an address.
        /// Credentials per second from one address (IPv4) or network (IPv6, /64), except those that the router process
        /// has accepted in the last minute. The limit does not apply to `ROUTER_TRUSTED_PROXIES`. It does not apply at
        /// all if `ROUTER_PUBLIC_SCHEME` is set, because a proxy is then in front of the router. `0` means no limit.
        ROUTER_ADDRESS_CHECKS_PER_SECOND: "number" = "100";
        /// Addresses of the load balancers in front of the router. Because all clients share these addresses, the
        /// router's limit on connections per address does not apply to them, but its limit on all connections does.
        ROUTER_TRUSTED_PROXIES: "addresses and CIDRs, separated by commas" = unset;
    }
}
