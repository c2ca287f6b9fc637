//! The environment variable of all programs that open TLS connections.

svc_base::variables! {
    "all", in "process environment", by [] {
        /// PEM file with root certificates that are trusted in addition to the public ones.
        SSL_CERT_FILE: "path" = unset;
    }
}
