//! The services that the bridge's handlers share.

use std::sync::Arc;
use std::time::Duration;

use super::changes::{ChangeFeed, EventIdSecret};
use super::insert_batch::InsertBatcher;
use super::problems;
use crate::apps::{App, Quotas, Registry};
use crate::database::Database;
use crate::writers::Writers;
use svc_host::agents::bridge_tokens::BridgeTokens;
use svc_host::agents::kernel::Kernel;
use svc_http::problem::{Code, Problem};
use svc_machine::epoch::Epoch;

/// The bridge to the apps' tables.
pub struct Bridge {
    pub apps: Arc<Registry>,
    pub database: Arc<Database>,
    pub quotas: Arc<Quotas>,
    pub writers: Arc<Writers>,
    /// Holds the owner's settings, which set the quotas.
    pub kernel: Arc<Kernel>,
    pub bridge_tokens: Arc<BridgeTokens>,
    pub changes: Arc<ChangeFeed>,
    pub event_id_secret: EventIdSecret,
    pub epoch: Epoch,
    pub inserts: Arc<InsertBatcher>,
    /// Timeout of a single statement of an app's role. A whole transaction gets a few seconds more.
    pub statement_timeout: Duration,
}

impl Bridge {
    pub(super) fn find_app(&self, slug: &str) -> Result<Arc<App>, Problem> {
        let snapshot = self.apps.snapshot();
        match snapshot.apps.get(slug) {
            Some(app) => Ok(app.clone()),
            None if !snapshot.is_loaded => Err(problems::database_unavailable()),
            None => Err(Problem::new(Code::NotFound, "There is no such app.")),
        }
    }
}
