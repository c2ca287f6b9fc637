//! The gateway's services, from which each handler extracts the ones it needs.

use std::sync::Arc;

use axum::extract::{FromRef, FromRequestParts};
use http::request::Parts;

use super::apps::{AppFiles, Quotas, Registry};
use super::auth::{AuthFailure, Caller, Ingress, PrincipalResolver};
use super::bridge::{Bridge, ChangeFeed, EventIdSecret, InsertBatcher, StreamLimits};
use super::config::Config;
use super::database::Database;
use super::endpoint::PathParameter;
use super::proxy::Upstreams;
use super::writers::Writers;
use svc_base::metrics::MetricsHandle;
use svc_host::agents::bridge_tokens::BridgeTokens;
use svc_host::agents::dispatch::Dispatcher;
use svc_host::agents::kernel::Kernel;
use svc_host::system::layout::Layout;
use svc_http::files::percent_decode;
use svc_http::path_params;
use svc_http::problem::Problem;
use svc_http::server::ListenerLimits;

/// Services of a running gateway.
pub struct Services {
    pub layout: Layout,
    pub metrics: MetricsHandle,
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
    /// If the JWKS client or a thread cannot be created, or the writers' state cannot be read.
    pub fn new(
        config: &Config,
        event_id_secret: EventIdSecret,
        metrics: MetricsHandle,
    ) -> anyhow::Result<Self> {
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
            inserts: InsertBatcher::new(config.statement_timeout),
            statement_timeout: config.statement_timeout,
        });
        Ok(Self {
            principal_resolver: Arc::new(PrincipalResolver::new(config, bridge_tokens)?),
            app_files: Arc::new(AppFiles::new(apps.clone(), layout.home())),
            upstreams: Arc::new(Upstreams::new(&layout)),
            layout,
            metrics,
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

/// Handler state: the services and the request context.
#[derive(Clone)]
pub struct RequestState {
    pub services: Arc<Services>,
    pub ingress: Ingress,
    /// `None` on unauthenticated routes.
    pub caller: Option<Caller>,
    /// The first path parameter, still percent-encoded.
    pub path_parameter: Option<Box<str>>,
}

impl FromRequestParts<RequestState> for Caller {
    type Rejection = AuthFailure;

    async fn from_request_parts(_: &mut Parts, state: &RequestState) -> Result<Self, AuthFailure> {
        state.caller.clone().ok_or(AuthFailure::Missing)
    }
}

impl FromRequestParts<RequestState> for PathParameter {
    type Rejection = Problem;

    async fn from_request_parts(_: &mut Parts, state: &RequestState) -> Result<Self, Problem> {
        let value = state.path_parameter.as_deref();
        let value =
            value.ok_or_else(|| Problem::internal(&std::io::Error::other("route has no path parameter")))?;
        percent_decode(value).map(Self).ok_or_else(path_params::invalid_path)
    }
}

impl FromRef<RequestState> for Ingress {
    fn from_ref(state: &RequestState) -> Self {
        state.ingress
    }
}

macro_rules! extract {
    ($($field:ident: $service:ty),+ $(,)?) => {$(
        impl FromRef<RequestState> for $service {
            fn from_ref(state: &RequestState) -> Self {
                state.services.$field.clone()
            }
        }
    )+};
}

extract! {
    layout: Layout,
    metrics: MetricsHandle,
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
