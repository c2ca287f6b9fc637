//! The state shared by the gateway's handlers.

use std::sync::Arc;

use super::apps::{GzipCache, Quotas, Registry};
use super::auth::PrincipalResolver;
use super::bridge::{ChangeFeed, IdSecret};
use super::config::Config;
use super::database::Database;
use super::proxy::Upstreams;
use super::writers::Writers;
use crate::agents::bridge_tokens::AgentTokens;
use crate::agents::dispatch::Dispatcher;
use crate::agents::kernel::Kernel;

/// One running gateway.
pub struct Gateway {
    pub principal_resolver: PrincipalResolver,
    pub agent_tokens: Arc<AgentTokens>,
    pub database: Arc<Database>,
    pub apps: Registry,
    pub quotas: Quotas,
    pub gzip_cache: GzipCache,
    pub changes: Arc<ChangeFeed>,
    pub change_ids: IdSecret,
    pub kernel: Arc<Kernel>,
    pub dispatcher: Arc<Dispatcher>,
    pub writers: Arc<Writers>,
    pub upstreams: Upstreams,
    pub config: Config,
}

impl Gateway {
    /// # Errors
    /// The HTTP client for the identity provider's keys, or a thread, cannot be created.
    pub fn new(config: Config, change_ids: IdSecret) -> anyhow::Result<Arc<Self>> {
        let kernel = Arc::new(Kernel::new(&config.layout)?);
        let writers = Writers::open(&config.layout)?;
        let agent_tokens = Arc::<AgentTokens>::default();
        let dispatcher = Dispatcher::new(&config.layout, &kernel, &agent_tokens);
        if writers.is_quiesced() {
            dispatcher.pause();
        }
        Ok(Arc::new(Self {
            principal_resolver: PrincipalResolver::new(&config, Arc::clone(&agent_tokens))?,
            agent_tokens,
            database: Arc::new(Database::new(&config)),
            apps: Registry::default(),
            quotas: Quotas::new(&config.layout),
            gzip_cache: GzipCache::default(),
            changes: Arc::default(),
            change_ids,
            dispatcher,
            writers,
            kernel,
            upstreams: Upstreams::new(&config.layout.owner_sockets()),
            config,
        }))
    }
}
