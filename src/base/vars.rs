//! Environment variables shared by several programs.

crate::variables! {
    "all", in "process environment", by [] {
        /// Log filter, in the format of [tracing](https://docs.rs/tracing-subscriber). In a release, the lowest level
        /// is `debug`: trace events are not compiled in.
        RUST_LOG: "filter" = "info";
        /// Disables colors on a terminal.
        NO_COLOR: "any text" = unset;
        /// For tests only: fail points at which the process is killed, fails or waits. A build without the feature
        /// `failpoints` ignores the variable.
        FAILPOINTS: "list of fail points" = unset;
    }

    "platform.env-file", in "process environment", by ["svc-platform", "svcctl"] {
        /// The platform's env file, unless `--env-file` names one.
        PLATFORM_ENV_FILE: "path" = unset;
    }
}
