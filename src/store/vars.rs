//! Environment variables for the object store.

svc_base::variables! {
    "store", in "process environment; on hosts also `r2.env`", by [
        "svc-platform", "svcctl", "svc-db-backup", "svc-restore", "svc-sync-agent"
    ] {
        /// The bucket; `file:///dir` is for development.
        OBJECT_STORE_URL: "`s3://bucket` or `file:///dir`" = derived "**required**, or one of the next two";
        /// The bucket's name, if `OBJECT_STORE_URL` is not set.
        OBJECT_STORE_BUCKET: "name" = unset;
        /// The bucket's name, if neither `OBJECT_STORE_URL` nor `OBJECT_STORE_BUCKET` is set.
        S3_BUCKET: "name" = unset;
        /// URL of an S3 server other than AWS.
        OBJECT_STORE_ENDPOINT: "URL" = derived "AWS";
        /// The bucket's region.
        AWS_REGION: "text" = "auto";
        /// The access key's id.
        AWS_ACCESS_KEY_ID: "text" = derived "**required** for `s3`";
        /// The secret access key.
        AWS_SECRET_ACCESS_KEY: "text" = derived "**required** for `s3`";
        /// The session token of temporary credentials.
        AWS_SESSION_TOKEN: "text" = unset;
        /// On hosts, with `sts`: when the first credentials expire. The platform provides later ones, which are stored
        /// in `/var/lib/svc/store-credentials.json`.
        AWS_CREDENTIAL_EXPIRATION: "time, RFC 3339" = unset;
    }
}
