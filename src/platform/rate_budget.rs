//! Shares the provider's rate limit among all platform processes: a token bucket in the database, from which each
//! process reserves several calls at once while enough remain.

use std::time::Duration;

use async_trait::async_trait;
use secrecy::{ExposeSecret, SecretString};
use sha2::{Digest, Sha256};
use url::Url;

use super::db::{self, Db, DbError};
use svc_http::problem::format_chain;
use svc_provider::{BudgetGrant, ObservedBudget, RateBudget};

pub struct SharedBudget {
    db: Db,
    /// Identifies the provider's project, to which the limit applies: a digest of the API URL and the token.
    project: String,
}

impl SharedBudget {
    pub fn new(db: Db, api: &Url, token: &SecretString) -> Self {
        let digest = Sha256::digest(format!("{api}\n{}", token.expose_secret()));
        Self { db, project: hex::encode(&digest[..16]) }
    }

    async fn try_reserve(
        &self,
        wanted: u32,
        unused: u32,
        observed: Option<ObservedBudget>,
    ) -> Result<BudgetGrant, DbError> {
        let session = self.db.session().await?;
        db::budget::reserve(&session, &self.project, wanted, unused, observed).await
    }

    async fn try_suspend_calls(&self, wait: Duration) -> Result<(), DbError> {
        let session = self.db.session().await?;
        db::budget::suspend_calls(&session, &self.project, wait).await
    }
}

#[async_trait]
impl RateBudget for SharedBudget {
    async fn reserve(
        &self,
        wanted: u32,
        unused: u32,
        observed: Option<ObservedBudget>,
    ) -> Option<BudgetGrant> {
        let grant = self.try_reserve(wanted, unused, observed).await;
        grant
            .inspect_err(
                |error| tracing::debug!(error = %format_chain(error), "cannot reserve from the shared rate budget"),
            )
            .ok()
    }

    async fn suspend_calls(&self, wait: Duration) {
        if let Err(error) = self.try_suspend_calls(wait).await {
            tracing::debug!(error = %format_chain(&error), "cannot suspend calls in the shared rate budget");
        }
    }
}
