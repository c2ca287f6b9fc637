//! The gateway's services. Each handler extracts the ones it uses.

use std::sync::Arc;

use axum::extract::FromRef;

use super::apps::{AppFiles, Quotas, Registry};
use super::auth::PrincipalResolver;
use super::bridge::{Bridge, ChangeFeed, EventIdSecret, StreamLimits};
use super::config::Config;
use super::database::Database;
use super::proxy::Upstreams;
use super::writers::Writers;
use svc_host::agents::bridge_tokens::BridgeTokens;
use svc_host::agents::dispatch::Dispatcher;
use svc_host::agents::kernel::Kernel;
use svc_host::system::layout::Layout;
use svc_http::server::ListenerLimits;

/// The services of a running gateway.
pub struct Services {
    pub layout: Layout,
    pub principal_resolver: Arc<PrincipalResolver>,
    pub database: Arc<Database>,
    pub apps: Arc<Registry>,
    pub app_files: Arc<AppFiles>,
    pub quotas: Arc<Quotas>,
    pub bridge: Arc<Bridge>,
    pub changes: Arc<ChangeFeed>,
    pub kernel: Arc<Kernel>,
    pub dispatcher: Arc<Dispatcher>,
    pub writers: Arc<Writers>,
    pub upstreams: Arc<Upstreams>,
}

impl Services {
    /// # Errors
    /// The HTTP client for the identity provider's keys, or a thread, cannot be created; or the writers' state cannot
    /// be read.
    pub fn new(config: &Config, event_id_secret: EventIdSecret) -> anyhow::Result<Self> {
        let layout = config.layout.clone();
        let kernel = Arc::new(Kernel::new(&layout)?);
        let bridge_tokens = Arc::<BridgeTokens>::default();
        let dispatcher = Dispatcher::new(&layout, &kernel, &bridge_tokens);
        let database = Arc::new(Database::new(config));
        let writers = Writers::open(&layout, dispatcher.clone(), kernel.clone(), database.clone())?;
        let apps = Arc::<Registry>::default();
        let quotas = Arc::new(Quotas::new(&layout));
        let max_connections = ListenerLimits::default().max_connections;
        let changes = Arc::new(ChangeFeed::new(StreamLimits::from_connections(max_connections)));
        let bridge = Arc::new(Bridge {
            apps: apps.clone(),
            database: database.clone(),
            quotas: quotas.clone(),
            writers: writers.clone(),
            kernel: kernel.clone(),
            bridge_tokens: bridge_tokens.clone(),
            changes: changes.clone(),
            event_id_secret,
            epoch: config.epoch(),
            statement_timeout: config.statement_timeout,
        });
        Ok(Self {
            principal_resolver: Arc::new(PrincipalResolver::new(config, bridge_tokens)?),
            app_files: Arc::new(AppFiles::new(apps.clone(), layout.home())),
            upstreams: Arc::new(Upstreams::new(&layout)),
            layout,
            database,
            apps,
            quotas,
            bridge,
            changes,
            kernel,
            dispatcher,
            writers,
        })
    }
}

/// The router state. Cloning it increments one reference count, regardless of the number of services.
#[derive(Clone)]
pub struct Gateway(pub Arc<Services>);

macro_rules! extract {
    ($($field:ident: $service:ty),+ $(,)?) => {$(
        impl FromRef<Gateway> for $service {
            fn from_ref(gateway: &Gateway) -> Self {
                gateway.0.$field.clone()
            }
        }
    )+};
}

extract! {
    layout: Layout,
    principal_resolver: Arc<PrincipalResolver>,
    database: Arc<Database>,
    apps: Arc<Registry>,
    app_files: Arc<AppFiles>,
    quotas: Arc<Quotas>,
    bridge: Arc<Bridge>,
    changes: Arc<ChangeFeed>,
    kernel: Arc<Kernel>,
    dispatcher: Arc<Dispatcher>,
    writers: Arc<Writers>,
    upstreams: Arc<Upstreams>,
}
