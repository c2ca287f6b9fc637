//! Reads the store's location and credentials: `OBJECT_STORE_URL` or its short forms, and `AWS_*`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use object_store::aws::{AmazonS3Builder, AwsCredential, AwsCredentialProvider, Checksum, S3ConditionalPut};
use object_store::client::{ClientOptions, HttpClient, HttpConnector};
use object_store::{BackoffConfig, ObjectStore, RetryConfig, StaticCredentialProvider};
use secrecy::{ExposeSecret, SecretString};

use super::bucket::Bucket;
use super::credentials::{CredentialSource, SourceAdapter};
use super::list_counter::ListCounter;
use super::list_filter::ListFilter;
use super::local::{LocalStore, OBJECTS_DIR};
use super::retrying_signer::RetryingSigner;
use super::upload_timeout::{self, UploadTimeout};
use super::write_once::WriteOnce;
use crate::vars;
use svc_base::config::Env;
use svc_base::variable::Variable;
use svc_http::client::{self, Timeouts};

/// The location of the objects: `s3://bucket`, or `file:///dir` for development.
#[derive(Debug, Clone)]
pub enum StoreConfig {
    S3(S3Config),
    Directory(PathBuf),
}

/// An S3 bucket and its credentials.
#[derive(Debug, Clone)]
pub struct S3Config {
    pub bucket: String,
    /// `None` for AWS itself.
    pub endpoint: Option<String>,
    pub region: String,
    pub access_key: String,
    pub secret_key: SecretString,
    pub session_token: Option<SecretString>,
    /// When the credentials expire; `None` if they never expire, or if this is unknown.
    pub expires_at: Option<Timestamp>,
}

impl StoreConfig {
    /// Reads `OBJECT_STORE_URL`, or `OBJECT_STORE_BUCKET`/`S3_BUCKET`; `OBJECT_STORE_ENDPOINT`; `AWS_*`. Adds errors to
    /// `env`; `None` if a required variable is missing or invalid.
    pub fn read(env: &mut Env) -> Option<Self> {
        if let Some(dir) =
            env.text(&vars::OBJECT_STORE_URL).as_deref().and_then(|url| url.strip_prefix("file://"))
        {
            if !dir.starts_with('/') {
                env.add_error(
                    &vars::OBJECT_STORE_URL,
                    "must be file:///<absolute directory> or s3://<bucket>",
                );
                return None;
            }
            return Some(Self::Directory(dir.into()));
        }
        let bucket = read_bucket_name(env);
        let endpoint = env.web_url(&vars::OBJECT_STORE_ENDPOINT).map(|url| url.to_string());
        let region = env.or_default(&vars::AWS_REGION);
        let access_key = env.required(&vars::AWS_ACCESS_KEY_ID);
        let secret_key = env.required_secret(&vars::AWS_SECRET_ACCESS_KEY);
        let session_token = env.secret(&vars::AWS_SESSION_TOKEN);
        let expires_at = read_time(env, &vars::AWS_CREDENTIAL_EXPIRATION);
        Some(Self::S3(S3Config {
            bucket: bucket?,
            endpoint,
            region,
            access_key: access_key?,
            secret_key: secret_key?,
            session_token,
            expires_at,
        }))
    }

    /// Returns the location of a repository in the format that `restic` expects, such as
    /// `s3:https://s3.eu-central-1.amazonaws.com/bucket/user_1/primary/files`.
    pub fn restic_location(&self, repository: &object_store::path::Path) -> String {
        match self {
            Self::Directory(dir) => format!("{}/{repository}", dir.join(OBJECTS_DIR).display()),
            Self::S3(s3) => {
                let endpoint = match &s3.endpoint {
                    Some(endpoint) => endpoint.trim_end_matches('/').to_owned(),
                    None => format!("https://s3.{}.amazonaws.com", s3.region),
                };
                // restic decodes the URL, and an object's key can contain percent signs.
                let key = repository.as_ref().replace('%', "%25");
                format!("s3:{endpoint}/{}/{key}", s3.bucket)
            }
        }
    }

    /// Opens the store, without sending a request to it.
    ///
    /// # Errors
    /// If the HTTP client cannot be built, the settings contradict each other, or the directory cannot be created.
    pub fn open(&self) -> anyhow::Result<Bucket> {
        self.open_with(None)
    }

    /// Like [`Self::open`], but with credentials from `source` instead of those in the settings.
    ///
    /// # Errors
    /// Same as [`Self::open`].
    pub fn open_with(&self, source: Option<Arc<dyn CredentialSource>>) -> anyhow::Result<Bucket> {
        match self {
            Self::S3(config) => config.open(source),
            Self::Directory(dir) => Ok(Bucket::new(Arc::new(LocalStore::open(dir)?))),
        }
    }
}

impl S3Config {
    /// Returns the credentials in the settings.
    pub fn credential(&self) -> AwsCredential {
        AwsCredential {
            key_id: self.access_key.clone(),
            secret_key: self.secret_key.expose_secret().to_owned(),
            token: self.session_token.as_ref().map(|token| token.expose_secret().to_owned()),
        }
    }

    fn open(&self, source: Option<Arc<dyn CredentialSource>>) -> anyhow::Result<Bucket> {
        let client = HttpClient::new(UploadTimeout {
            uploads: HttpClient::new(client::build(upload_timeout::UPLOAD_TIMEOUTS)?),
            others: HttpClient::new(client::build(Timeouts::DOWNLOAD)?),
        });
        let (credentials, client): (AwsCredentialProvider, HttpClient) = match source {
            None => (Arc::new(StaticCredentialProvider::new(self.credential())), client),
            Some(source) => {
                let region = self.region.clone();
                let signer = RetryingSigner { inner: client, source: Arc::clone(&source), region };
                (Arc::new(SourceAdapter(source)), HttpClient::new(signer))
            }
        };
        let client = HttpClient::new(ListCounter { inner: HttpClient::new(WriteOnce { inner: client }) });
        let client = HttpClient::new(ListFilter { inner: client });
        let mut builder = AmazonS3Builder::new()
            .with_bucket_name(&self.bucket)
            .with_region(&self.region)
            .with_credentials(credentials)
            .with_conditional_put(S3ConditionalPut::ETagMatch)
            .with_checksum_algorithm(Checksum::SHA256)
            .with_retry(RetryConfig {
                backoff: BackoffConfig::default(),
                max_retries: 4,
                // No request is retried later than this after its first attempt, so a request that reaches the client's
                // idle timeout is not retried. The caller retries an upload as a whole.
                retry_timeout: Duration::from_secs(30),
            })
            .with_http_connector(Connector(client));
        if let Some(endpoint) = &self.endpoint {
            builder = builder
                .with_endpoint(endpoint.trim_end_matches('/'))
                .with_virtual_hosted_style_request(false)
                .with_allow_http(endpoint.starts_with("http://"));
        }
        let store = Arc::new(builder.build()?);
        Ok(Bucket::new(Arc::clone(&store) as Arc<dyn ObjectStore>).with_upload_ids(store))
    }
}

/// Reads a time. The error does not quote the value, which may contain a secret if lines in the env file were joined by
/// mistake.
fn read_time(env: &mut Env, variable: &Variable) -> Option<Timestamp> {
    let parsed = env.text(variable)?.parse();
    parsed.map_err(|_| env.add_error(variable, "must be a time such as 2026-01-02T03:04:05Z")).ok()
}

fn read_bucket_name(env: &mut Env) -> Option<String> {
    if let Some(url) = env.text(&vars::OBJECT_STORE_URL) {
        let name = url.strip_prefix("s3://").map(|name| name.trim_end_matches('/').to_owned());
        if name.as_deref().is_none_or(|name| name.is_empty() || name.contains('/')) {
            env.add_error(&vars::OBJECT_STORE_URL, "must be s3://<bucket> or file:///<directory>");
            return None;
        }
        return name;
    }
    let name = env.text(&vars::OBJECT_STORE_BUCKET).or_else(|| env.text(&vars::S3_BUCKET));
    if name.is_none() {
        env.add_error(
            &vars::OBJECT_STORE_URL,
            "is required but not set (nor is OBJECT_STORE_BUCKET or S3_BUCKET)",
        );
    }
    name
}

/// Makes object_store use our HTTP client.
#[derive(Debug)]
struct Connector(HttpClient);

impl HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(self.0.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the bucket's name, or the error.
    fn read_bucket(pairs: &[(&str, &str)]) -> Result<String, String> {
        let credentials = [("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "s")];
        let mut env = Env::from_pairs(pairs.iter().copied().chain(credentials));
        let read = StoreConfig::read(&mut env);
        match env.finish(read) {
            Ok(StoreConfig::S3(config)) => Ok(config.bucket),
            Ok(StoreConfig::Directory(dir)) => Err(dir.display().to_string()),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn read_prefers_the_url_to_its_short_forms() {
        let url = ("OBJECT_STORE_URL", "s3://by-url");
        let (short, alternate) = (("OBJECT_STORE_BUCKET", "by-short-form"), ("S3_BUCKET", "by-alternate"));
        assert_eq!(read_bucket(&[alternate]).unwrap(), "by-alternate");
        assert_eq!(read_bucket(&[short]).unwrap(), "by-short-form");
        assert_eq!(read_bucket(&[alternate, short]).unwrap(), "by-short-form");
        assert_eq!(read_bucket(&[alternate, short, url]).unwrap(), "by-url");
        let missing = read_bucket(&[]).unwrap_err();
        assert!(
            ["OBJECT_STORE_URL", short.0, alternate.0].iter().all(|name| missing.contains(name)),
            "{missing}"
        );
    }

    #[test]
    fn read_rejects_endpoint_without_web_scheme() {
        let bucket = ("OBJECT_STORE_URL", "s3://bucket");
        assert_eq!(read_bucket(&[bucket, ("OBJECT_STORE_ENDPOINT", "http://minio:9000")]).unwrap(), "bucket");
        let error = read_bucket(&[bucket, ("OBJECT_STORE_ENDPOINT", "minio:9000")]).unwrap_err();
        assert!(error.contains("OBJECT_STORE_ENDPOINT: must be an http or https URL"), "{error}");
    }

    #[tokio::test]
    async fn restic_location_of_a_directory_contains_its_objects() {
        let dir = tempfile::tempdir().unwrap();
        let config = StoreConfig::Directory(dir.path().to_owned());
        let repository = object_store::path::Path::from_iter(["auth0|x", "primary", "files"]);
        let bucket = config.open().unwrap();
        bucket.put(&repository.clone().join("config"), "{}").await.unwrap();
        let location = PathBuf::from(config.restic_location(&repository));
        assert!(location.join("config").is_file(), "{}", location.display());
    }
}
