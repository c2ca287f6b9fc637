//! The variable of every program that connects by TLS.

svc_base::variables! {
    "all", in "process environment", by [] {
        /// PEM file with roots that are trusted in addition to the public ones.
        SSL_CERT_FILE: "path" = unset;
    }
}
