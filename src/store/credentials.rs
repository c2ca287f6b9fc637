//! Temporary credentials for the store.
//!
//! A [`CredentialSource`] provides them to object_store before each request, and to `retrying_signer` before each
//! attempt and again when the store rejects a request's credentials as expired.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use jiff::Timestamp;
use object_store::CredentialProvider;
use object_store::aws::AwsCredential;
use secrecy::{ExposeSecret, SecretString};

/// Credentials with their expiry.
#[derive(Debug, Clone)]
pub struct TemporaryCredentials {
    pub access_key: String,
    pub secret_key: SecretString,
    pub session_token: Option<SecretString>,
    pub expires_at: Timestamp,
}

impl TemporaryCredentials {
    pub fn to_aws_credential(&self) -> AwsCredential {
        AwsCredential {
            key_id: self.access_key.clone(),
            secret_key: self.secret_key.expose_secret().to_owned(),
            token: self.session_token.as_ref().map(|token| token.expose_secret().to_owned()),
        }
    }
}

/// The reason there are no credentials.
#[derive(Debug, thiserror::Error)]
pub enum CredentialError {
    /// Permanent: another machine has replaced this one.
    #[error("this machine has been replaced and can no longer get credentials for the object store")]
    Withdrawn,
    #[error("credentials for the object store were refused: {0}")]
    Refused(String),
    #[error("cannot get credentials for the object store: {0}")]
    Unavailable(String),
}

/// Provides credentials, and renews them when they expire.
#[async_trait]
pub trait CredentialSource: fmt::Debug + Send + Sync + 'static {
    /// Returns credentials that have not expired according to this machine's clock.
    async fn current(&self) -> Result<Arc<AwsCredential>, CredentialError>;

    /// Returns new credentials, because the store has rejected those with this access key as expired.
    async fn replacement_for(&self, access_key: &str) -> Result<Arc<AwsCredential>, CredentialError>;
}

/// Provides credentials from a [`CredentialSource`] to object_store.
#[derive(Debug)]
pub(super) struct SourceAdapter(pub(super) Arc<dyn CredentialSource>);

#[async_trait]
impl CredentialProvider for SourceAdapter {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        self.0.current().await.map_err(|error| match error {
            CredentialError::Unavailable(_) => {
                object_store::Error::Generic { store: "credentials", source: Box::new(error) }
            }
            error => object_store::Error::PermissionDenied { path: String::new(), source: Box::new(error) },
        })
    }
}

/// Whether [`CredentialError::Withdrawn`] is among the causes of an error.
pub(super) fn is_withdrawn(error: &(dyn Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if matches!(error.downcast_ref(), Some(CredentialError::Withdrawn)) {
            return true;
        }
        cause = error.source();
    }
    false
}
