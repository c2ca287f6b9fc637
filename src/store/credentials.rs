//! Credentials for the store that run out, and whoever has others when they do.
//!
//! What gives them is a [`Source`]; what asks it is object_store, before each request, and `resign`, when the store
//! says that a request's credentials have expired.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use jiff::Timestamp;
use object_store::CredentialProvider;
use object_store::aws::AwsCredential;
use secrecy::{ExposeSecret, SecretString};

/// Credentials and the moment from which they are worth nothing.
#[derive(Debug, Clone)]
pub struct Temporary {
    pub access_key: String,
    pub secret_key: SecretString,
    pub session_token: Option<SecretString>,
    pub expires_at: Timestamp,
}

impl Temporary {
    pub fn signing(&self) -> AwsCredential {
        AwsCredential {
            key_id: self.access_key.clone(),
            secret_key: self.secret_key.expose_secret().to_owned(),
            token: self.session_token.as_ref().map(|token| token.expose_secret().to_owned()),
        }
    }
}

/// Why there are no credentials.
#[derive(Debug, thiserror::Error)]
pub enum CredentialError {
    /// Final: another machine has taken this one's place.
    #[error("this machine has been replaced: it gets no credentials for the object store any more")]
    Withdrawn,
    #[error("credentials for the object store were refused: {0}")]
    Refused(String),
    #[error("no credentials for the object store could be had: {0}")]
    Unavailable(String),
}

/// Has credentials at hand, and gets new ones when they run out.
#[async_trait]
pub trait Source: fmt::Debug + Send + Sync + 'static {
    /// Credentials that have not expired, as far as this machine's clock tells.
    ///
    /// # Errors
    /// [`CredentialError`].
    async fn current(&self) -> Result<Arc<AwsCredential>, CredentialError>;

    /// Others than those of this access key, which the store took for expired.
    ///
    /// # Errors
    /// [`CredentialError`].
    async fn instead_of(&self, access_key: &str) -> Result<Arc<AwsCredential>, CredentialError>;
}

/// A [`Source`] as object_store asks it.
#[derive(Debug)]
pub(super) struct Asked(pub(super) Arc<dyn Source>);

#[async_trait]
impl CredentialProvider for Asked {
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

/// Whether [`CredentialError::Withdrawn`] is behind an error.
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
