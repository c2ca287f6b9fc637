//! Environment variables for `svcctl`.

svc_base::variables! {
    "svcctl", in "process environment", by ["svcctl"] {
        /// The platform's base URL; not needed with `--platform-url`.
        PLATFORM_PUBLIC_URL: "URL" = required;
        /// The platform's `PLATFORM_SECRET`, or an operator's token; not needed with `--secret-file`.
        PLATFORM_SECRET: "text" = required;
        /// Keys that `bundle publish` expects hosts to trust: the value of the platform's variable with the same name.
        BUNDLE_PUBLIC_KEYS: "comma-separated list" = unset;
        /// Sequence number of the key set in `BUNDLE_PUBLIC_KEYS`.
        BUNDLE_KEYS_SEQUENCE: "number" = "0";
        /// The owner's session for `verify-rollout --app-url`: a JWT from the identity provider, or a browser's
        /// `svc_session` cookie. Not needed with `--session-file`.
        SVC_SESSION_TOKEN: "text" = derived "**required** with `--app-url`";
        /// If set, `doctor` checks the platform by default, unless this machine is a host.
        PLATFORM_DATABASE_URL: "text" = unset;
        /// If `dumb`, there are no colors and no progress bars on a terminal.
        TERM: "text" = unset;
    }
}
