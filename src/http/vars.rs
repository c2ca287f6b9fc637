//! The environment variable that every program with TLS connections reads.

svc_base::variables! {
    "all", in "process environment", by [] {
        /// PEM file with root certificates that are trusted in addition to the public ones.
        SSL_CERT_FILE: "path" = unset;
    }
}
