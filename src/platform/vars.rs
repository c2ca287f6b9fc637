//! The platform's variables.

svc_base::variables! {
    "platform.listeners", in "process environment or the platform's env file", by ["svc-platform"] {
        /// Address of the API. Port 0 takes a free port, which is printed at start.
        PLATFORM_LISTEN: "address and port" = "127.0.0.1:8080";
        /// PEM file with the API's certificate chain. Without it and its key, the API speaks plain HTTP.
        PLATFORM_TLS_CERT_FILE: "path" = unset;
        /// PEM file with the key of that certificate.
        PLATFORM_TLS_KEY_FILE: "path" = unset;
        /// Address of the public hosts.
        ROUTER_LISTEN: "address and port" = "0.0.0.0:8443";
        /// PEM file with the certificate chain of the public hosts. Without it and its key, the router speaks
        /// plain HTTP.
        ROUTER_TLS_CERT_FILE: "path" = unset;
        /// PEM file with the key of that certificate.
        ROUTER_TLS_KEY_FILE: "path" = unset;
        /// The platform's base URL, for operators.
        PLATFORM_PUBLIC_URL: "URL" = required;
        /// The URL at which hosts reach the platform.
        PLATFORM_INTERNAL_URL: "URL" = derived "`PLATFORM_PUBLIC_URL`";
        /// Base of the bundle's URL, before `/system-bundles/…`.
        SVC_HOST_BUNDLE_BASE_URL: "URL" = derived "`PLATFORM_PUBLIC_URL`";
        /// The exact URL of the bundle, for every version.
        SVC_HOST_BUNDLE_URL: "URL" = unset;
        /// Public host name of the shell and the gateway. A port is compared only if it is given.
        APP_HOST: "host name" = required;
        /// Public host name of code-server, with an optional port, too. Must differ from `APP_HOST`.
        CODE_HOST: "host name" = required;
        /// The scheme as browsers see it.
        ROUTER_PUBLIC_SCHEME: "`https` or `http`" = derived "the listener's";
    }

    "platform.database", in "process environment or the platform's env file", by ["svc-platform"] {
        /// The platform's database.
        PLATFORM_DATABASE_URL: "`postgres://user:password@host:port/database`" = required;
        /// Maximum connections that one process opens for operators' changes and operations.
        DATABASE_CONTROL_CONNECTIONS: "number, at least 1" = "10";
        /// Maximum connections that one process opens for requests of hosts.
        DATABASE_HOST_CONNECTIONS: "number, at least 1" = "8";
        /// Maximum connections that one process opens for operators' reports about the fleet.
        DATABASE_REPORT_CONNECTIONS: "number, at least 1" = "4";
        /// Maximum connections that one process opens for the router's sessions. The router's polls have one
        /// more.
        DATABASE_ROUTER_CONNECTIONS: "number, at least 1" = "10";
        /// Maximum difference between a process's clock and the database's. Above it `/readyz/control` fails
        /// and the log has a warning. Compared at start and every 30 s (`svc_clock_skew_seconds`).
        MAX_CLOCK_SKEW_MS: "milliseconds" = "2000";
    }

    "platform.keys", in "process environment or the platform's env file", by ["svc-platform"] {
        /// Derives the hosts' and operators' tokens, signs fences and seals the signing keys.
        PLATFORM_KEY: "32 bytes, in hexadecimal or base64" = required;
        /// A second key in force. It only verifies and opens; nothing new is made with it. See [Rotate
        /// PLATFORM_KEY](../operating/keys.md#rotate-platform_key).
        PLATFORM_KEY_PREVIOUS: "32 bytes, in hexadecimal or base64" = unset;
        /// The bearer token with every scope. It creates the first operators.
        PLATFORM_SECRET: "text of at least 32 characters" = required;
        /// Age at which a signing key gets a successor.
        PROOF_KEY_ROTATE_SECONDS: "seconds, at least 1" = "2592000";
        /// How long an old signing key stays after every host has acknowledged the new one; also how long a
        /// new app key waits before it signs. Set it to more than two heartbeat intervals.
        PROOF_KEY_OVERLAP_SECONDS: "seconds, at least 1" = "120";
        /// A rotation does not wait for a host that has sent no heartbeat for this long.
        PROOF_KEY_SILENCE_SECONDS: "seconds, at least 1" = "86400";
        /// Age at which a machine's token gets a successor.
        UPGRADE_TOKEN_ROTATE_SECONDS: "seconds, at least 1" = "2592000";
        /// How long a token is accepted after a heartbeat with its successor.
        UPGRADE_TOKEN_OVERLAP_SECONDS: "seconds" = "3600";
    }

    "platform.identity", in "process environment or the platform's env file", by ["svc-platform"] {
        /// The identity provider's issuer. Passed on to hosts.
        IDP_ISSUER: "text" = required;
        /// Accepted audiences. Passed on to hosts.
        IDP_AUDIENCE: "list, separated by commas" = required;
        /// The identity provider's keys. Passed on to hosts.
        IDP_JWKS_URL: "URL" = derived "`<issuer>/.well-known/jwks.json`";
        /// Where the router sends browsers without an identity.
        IDP_SIGN_IN_URL: "URL" = required;
    }

    "platform.provisioning", in "process environment or the platform's env file", by ["svc-platform"] {
        /// Permits provisioning.
        CUSTOMER_VPS_ENABLED: "flag" = "false";
        /// Bundle version of new machines.
        CUSTOMER_VPS_IMAGE_VERSION: "version" = required;
        /// Port on which hosts listen.
        CUSTOMER_VPS_HTTPS_PORT: "port" = "443";
        /// A host's certificate must chain to a trusted root for the host's name, in addition to having the
        /// pinned key. Needs `HOST_DOMAIN`. See [Certificates of machines](../operating/certificates.md).
        CUSTOMER_VPS_TLS_VERIFY: "flag" = "false";
        /// How long after its registration a machine is reached by its pinned key alone, so that it can get its
        /// first certificate.
        CUSTOMER_VPS_TLS_VERIFY_GRACE_SECONDS: "seconds" = "86400";
        /// Machines that stay reachable by their pinned key alone.
        CUSTOMER_VPS_TLS_VERIFY_EXCEPT: "machine ids, separated by commas" = unset;
        /// Domain of the hosts' names, `<machine-id>.<HOST_DOMAIN>`. Not below the registrable domain of `APP_HOST`,
        /// `CODE_HOST` or the sign-in page: see [Names](../operating/certificates.md#names).
        HOST_DOMAIN: "domain" = unset;
        /// Directory of the certificate authority from which hosts request certificates (ACME, RFC 8555), for
        /// example `https://acme-v02.api.letsencrypt.org/directory`. Setting it states that you accept the
        /// authority's terms of service. Needs `HOST_DOMAIN`.
        ACME_DIRECTORY_URL: "https URL" = unset;
        /// Where the authority sends notices.
        ACME_CONTACT: "e-mail address" = unset;
        /// Id of the account with the authority to which the hosts' accounts are bound, if it requires one.
        ACME_EAB_KEY_ID: "text" = unset;
        /// Key of that account. Every host gets it.
        ACME_EAB_HMAC_KEY: "base64url" = unset;
        /// Ed25519 keys whose signature on a bundle's manifest hosts trust: base64 of the raw 32 bytes.
        BUNDLE_PUBLIC_KEYS: "list, separated by commas" = unset;
        /// Number of that key set, with which new hosts start: the `--keys-sequence` of the last release that
        /// brought the set. See [Rotate the keys of
        /// releases](../operating/keys.md#rotate-the-keys-of-releases).
        BUNDLE_KEYS_SEQUENCE: "number" = "0";
        /// Networks from which the platform connects to hosts. New hosts admit only these to :443. Loopback,
        /// multicast and unspecified addresses are refused. Not set: every address is admitted.
        PLATFORM_EGRESS_CIDRS: "1 to 32 addresses or CIDRs, separated by commas" = unset;
        /// Container image of the hosts' database.
        SVC_POSTGRES_IMAGE: "name of an image" = derived "`docker.io/library/postgres:16`";
        /// Provisioning needs a subscription.
        BILLING_ENFORCEMENT: "flag" = "true";
        /// A provision that adds a customer must confirm the monthly cost and the customer's consent
        /// (`confirmedMonthlyCost`, `confirmedOptIn`). One that replaces a failed machine by one of another server type
        /// must confirm the cost. `svcctl provision` always sends them.
        PROVISION_CONFIRMATION: "flag" = "false";
        /// Name of this environment, such as `production`. `svcctl provision` shows it before it changes anything.
        PLATFORM_ENVIRONMENT: "text of at most 64 characters" = unset;
        /// Maximum preview machines of one owner.
        PREVIEW_MAX_PER_OWNER: "number" = "8";
        /// Age at which a preview machine is deleted.
        PREVIEW_TTL_HOURS: "hours" = "72";
        /// Where requests go if the user has no running machine; only for old deployments.
        LEGACY_FALLBACK_URL: "URL" = unset;
        /// Timeout of a host's registration, from the accepted create.
        REGISTRATION_TTL_SECONDS: "seconds" = "1800";
    }

    "platform.provider", in "process environment or the platform's env file", by ["svc-platform"] {
        /// Token of the cloud provider.
        PROVIDER_API_TOKEN: "text" = required;
        /// The provider's API.
        PROVIDER_API_URL: "URL" = "https://api.hetzner.cloud/v1";
        /// Name of the provider's project that the token belongs to, which the provider's API does not report.
        /// `svcctl provision` shows it.
        PROVIDER_PROJECT: "text of at most 64 characters" = unset;
        /// The project's limit of servers, which the provider's API does not report. A provision that would exceed
        /// it is refused. A replaced machine keeps its server for a while: one replacement for each slot may exceed it.
        PROVIDER_SERVER_LIMIT: "number, at least 1" = unset;
        /// Type of a machine if the request names none.
        PROVIDER_SERVER_TYPE: "server type" = "cpx22";
        /// Where servers are created.
        PROVIDER_LOCATION: "location" = "nbg1";
        /// Locations to try, in this order, if the provider has no capacity in `PROVIDER_LOCATION`, for
        /// example `hel1,fsn1`.
        PROVIDER_FALLBACK_LOCATIONS: "at most 8 locations, separated by commas" = unset;
        /// Image of new servers.
        PROVIDER_IMAGE: "name of an image" = "debian-12";
        /// How long a create request without a response may still produce a server.
        PROVIDER_AMBIGUOUS_WAIT_SECONDS: "seconds" = "60";
    }

    "platform.store-credentials", in "process environment or the platform's env file", by ["svc-platform"] {
        /// The object store's URL for hosts, if it differs from the platform's.
        HOST_OBJECT_STORE_ENDPOINT: "URL" = derived "`OBJECT_STORE_ENDPOINT`";
        /// `sts`: each host gets short-lived credentials that reach only its own slot and cannot delete;
        /// renewed while its machine is current. `static`: every host gets the platform's own credentials;
        /// the log has a warning at start.
        STORE_HOST_CREDENTIALS: "`sts` or `static`" = derived "`sts` with `STS_ROLE_ARN`, else **required**";
        /// The role that is assumed for hosts. It needs at least get, put, list and abort on the bucket.
        /// MinIO accepts any name.
        STS_ROLE_ARN: "ARN" = derived "**required** with `sts`";
        /// Where AssumeRole is sent.
        STS_ENDPOINT: "URL" = derived "`OBJECT_STORE_ENDPOINT`, else AWS's for `AWS_REGION`";
        /// Hosts' sessions can create snapshots and entries of the pointer log, but not overwrite them. See
        /// below.
        STORE_WRITE_ONCE: "flag" = "false";
        /// Lifetime of a host's outage session. See below.
        STS_DURATION_SECONDS: "seconds, 900 to 604800" = "43200";
    }

    "platform.replacement", in "process environment or the platform's env file", by ["svc-platform"] {
        /// How long the old host may be unreachable before its final backup is skipped. A host that responds
        /// is waited for while it makes progress.
        LAST_BACKUP_DEADLINE_SECONDS: "seconds" = "60";
        /// How long a final backup may make no progress, or less than 1 MiB, before the operation waits for an
        /// operator.
        LAST_BACKUP_STALL_SECONDS: "seconds" = "300";
        /// How long a final backup may take in total before the operation waits for an operator, regardless of
        /// progress.
        LAST_BACKUP_LIMIT_SECONDS: "seconds" = "43200";
        /// How long, beyond the shutdown timeout, the provider may fail to switch a replaced server off
        /// before the replacement continues.
        POWER_OFF_RETRY_SECONDS: "seconds" = "120";
        /// How long a replaced server is kept after its successor's first healthy heartbeat. 0 deletes it at
        /// once.
        PREDECESSOR_KEEP_SECONDS: "seconds" = "86400";
        /// How long a deleted machine's server is kept, switched off, for `undelete`.
        DELETE_GRACE_SECONDS: "seconds" = "86400";
        /// How long a server of this installation without a known machine is kept, once an operator has
        /// released it.
        ORPHAN_GRACE_SECONDS: "seconds" = "86400";
    }

    "platform.operations", in "process environment or the platform's env file", by ["svc-platform"] {
        /// An operation without progress for this long fails. Deletions are retried until they succeed, and
        /// an operation that needs a decision waits for it.
        OPERATION_DEADLINE_SECONDS: "seconds" = "7200";
        /// Maximum duration of an operation, and of a boot that makes progress.
        OPERATION_LIMIT_SECONDS: "seconds" = "86400";
        /// Timeout of a host's shutdown; then its power is cut.
        RESIZE_SHUTDOWN_SECONDS: "seconds" = "90";
        /// Timeout of power-off and change of type after that; then the change is abandoned.
        RESIZE_CHANGE_SECONDS: "seconds" = "600";
        /// Timeout of the power-on, and again of the host's first healthy heartbeat.
        RESIZE_HEALTH_SECONDS: "seconds" = "600";
        /// How long a host may report nothing about a requested update; six times as long if it reports that
        /// the update is in progress. Time in which the rollout is paused does not count.
        ROLLOUT_SILENCE_SECONDS: "seconds" = "1800";
        /// How often operations are polled without a notification.
        PLATFORM_POLL_MS: "milliseconds, at least 10" = "500";
        /// Lease of an operation: how long it stays with a silent process.
        PLATFORM_LEASE_SECONDS: "seconds, at least 1" = "15";
    }

    "platform.reconciler", in "process environment or the platform's env file", by ["svc-platform"] {
        /// Interval at which the provider's servers and leftovers are checked. A fleet of more than 400 servers is listed
        /// less often, so that the list takes at most a quarter of the provider's rate: 5,000 servers every 400 s.
        RECONCILE_SECONDS: "seconds, at least 1" = "30";
        /// Minimum interval at which heartbeats of one machine that is switched off or has failed make the
        /// platform query its server at the provider.
        SERVER_CHECK_SECONDS: "seconds" = "60";
        /// Minimum time that a host must have been silent before its server counts as gone.
        SERVER_GONE_SILENCE_SECONDS: "seconds" = "120";
        /// How long ended operations and rollouts are kept.
        OPERATION_RETENTION_DAYS: "days, 1 to 36500" = "400";
        /// How long the operators' audit is kept.
        AUDIT_RETENTION_DAYS: "days, 1 to 36500" = "3653";
    }

    "platform.rates", in "process environment or the platform's env file", by ["svc-platform"] {
        // Above the rate of an operator's script in a loop; a runaway script leaves room for others.
        /// Requests of one operator, or with `PLATFORM_SECRET`, per second; the burst is ten seconds' worth.
        PLATFORM_OPERATOR_REQUESTS_PER_SECOND: "number" = "200";
        // A host sends two heartbeats a minute, and a download or an update adds a few requests.
        /// Requests with one host's `UPGRADE_TOKEN` per second; the burst is 20 seconds' worth. Requests for
        /// storage credentials: one in 10 seconds, with a burst of 20. `0` lifts both limits.
        PLATFORM_HOST_REQUESTS_PER_SECOND: "number" = "5";
        // A fleet of 6,000 machines behind one address, once a minute after a platform restart.
        /// Bearer tokens per second from one address (IPv4) or network (IPv6, /64); the burst is ten seconds'
        /// worth. Tokens that the process has accepted in the last ten minutes do not count.
        PLATFORM_ADDRESS_CHECKS_PER_SECOND: "number" = "100";
        /// Addresses of the proxies in front of the API. No limit by address applies to them.
        PLATFORM_TRUSTED_PROXIES: "addresses and CIDRs, separated by commas" = unset;
    }

    "platform.router", in "process environment or the platform's env file", by ["svc-platform"] {
        // A change of a machine must take effect within one second.
        /// How often routes are refreshed.
        PLATFORM_ROUTES_POLL_MS: "milliseconds, 10 to 500" = "500";
        // Stale routes are safe, because a connection requires the TLS key that the machine registered.
        /// How long stale routes are served while the database is unreachable.
        ROUTER_MAX_STALE_SECONDS: "seconds, at least 1" = "1800";
        // A quarter of the throughput of one core.
        /// Requests of one user that a router process forwards per second; the burst is two seconds' worth.
        /// More get 429 with `Retry-After`. `0`: no limit.
        ROUTER_USER_REQUESTS_PER_SECOND: "number" = "5000";
        // A browser needs about one check per minute, so thousands can share an address.
        /// Credentials per second, from one address (IPv4) or network (IPv6, /64), that a router process has
        /// not verified before. Not counted for `ROUTER_TRUSTED_PROXIES`, nor if `ROUTER_PUBLIC_SCHEME` says
        /// that a proxy is in front of the router. `0`: no limit.
        ROUTER_ADDRESS_CHECKS_PER_SECOND: "number" = "100";
        /// Addresses of the load balancers in front of the router. All clients share these addresses, so the
        /// router's limit of connections per address does not apply to them; its limit of all connections
        /// does.
        ROUTER_TRUSTED_PROXIES: "addresses and CIDRs, separated by commas" = unset;
    }
}
