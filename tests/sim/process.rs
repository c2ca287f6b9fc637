//! Runs a platform process inside the test: the production API, router, runner and reconciler over one context. The
//! process's switch kills it as kill -9 would: none of its tasks continue, its transactions are rolled back, and its
//! leases remain until they expire.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use http::Request;
use http_body_util::{BodyExt, Collected};
use secrecy::SecretString;
use serde_json::Value;
use svc::config::Env;
use svc::http::server::{ConnectionInfo, Respond, Scheme};
use svc::platform::api;
use svc::platform::config::PlatformConfig;
use svc::platform::context::Platform;
use svc::platform::keys::Seal;
use svc::platform::operations::{reconcile, runner};
use svc::platform::process_clock::ProcessClock;
use svc::platform::quote_cache::QuoteCache;
use svc::platform::rate_limits::ApiRateLimits;
use svc::platform::readiness::ReadinessProbe;
use svc::platform::server_lookup_limiter::ServerLookupLimiter;
use svc::platform::store_access_issuer::StoreAccessIssuer;
use svc::platform::tokens::TokenMint;
use svc::provider::Provider;
use svc::router::route_freshness::RouteFreshness;
use svc::router::{self, RouterContext, RouterResponder, UserDigests};
use svc::store::Bucket;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::kill_switch::KillSwitch;
use super::process_provider::ProcessProvider;
use super::run_database::RunDatabase;
use super::store::{Store, StoreConnection};

pub const SECRET: &str = "operator-secret-of-32-characters";

pub struct Process {
    pub switch: Arc<KillSwitch>,
    platform: Arc<Platform>,
    api: Router,
    public: RouterResponder,
    tasks: TaskTracker,
}

#[derive(Debug, Clone)]
pub struct ApiResponse {
    pub status: u16,
    pub body: Value,
}

/// Returns the configuration for a run, with shorter intervals and timeouts than in production.
pub fn build_config(database_url: &str) -> PlatformConfig {
    let key = "07".repeat(32);
    let env = Env::from_pairs([
        ("PLATFORM_DATABASE_URL", database_url),
        ("PLATFORM_KEY", &key),
        ("PLATFORM_SECRET", SECRET),
        // Time passes faster in a run than rate limits assume.
        ("PLATFORM_HOST_REQUESTS_PER_SECOND", "0"),
        ("PLATFORM_PUBLIC_URL", "http://platform.example"),
        ("APP_HOST", "app.test"),
        ("CODE_HOST", "code.test"),
        ("IDP_ISSUER", "https://idp.test"),
        ("IDP_AUDIENCE", "svc"),
        ("IDP_SIGN_IN_URL", "https://idp.test/sign-in"),
        ("PLATFORM_ROUTES_POLL_MS", "500"),
        ("SERVER_CHECK_SECONDS", "0"),
        ("CUSTOMER_VPS_ENABLED", "true"),
        ("CUSTOMER_VPS_IMAGE_VERSION", "v1"),
        // No host listens on this port, so calls fail immediately.
        ("CUSTOMER_VPS_HTTPS_PORT", "9"),
        ("PROVIDER_API_TOKEN", "token"),
        ("OBJECT_STORE_URL", "s3://fleet"),
        ("AWS_ACCESS_KEY_ID", "a"),
        ("AWS_SECRET_ACCESS_KEY", "s"),
        ("STORE_HOST_CREDENTIALS", "static"),
        ("REGISTRATION_TTL_SECONDS", "120"),
        ("PREDECESSOR_KEEP_SECONDS", "0"),
        ("DELETE_GRACE_SECONDS", "0"),
    ]);
    let mut config = PlatformConfig::read(env).unwrap_or_else(|error| panic!("{error}"));
    config.timing.poll_interval = Duration::from_millis(150);
    config.timing.lease_ttl = Duration::from_millis(800);
    config.timing.reconcile_interval = Duration::from_millis(400);
    config.timing.heartbeat_timeout = Duration::from_millis(400);
    config.timing.final_backup_unreachable_timeout = Duration::from_millis(300);
    config
}

impl Process {
    pub fn start(database: &RunDatabase, provider: Arc<dyn Provider>, store: &Arc<Store>) -> Self {
        let switch = Arc::new(KillSwitch::default());
        let config = build_config(&database.url());
        let connection = StoreConnection { store: Arc::clone(store), switch: Some(Arc::clone(&switch)) };
        let stop = CancellationToken::new();
        let freshness = Arc::new(RouteFreshness::new(config.routing.max_staleness));
        let router_context = RouterContext {
            pool: database.db.pool().clone(),
            database: config.database.clone(),
            config: config.routing.clone(),
            trust: config.trust.clone(),
            signing_keys: database.keys.clone(),
            user_digests: UserDigests::new(&config.keys.current, None),
            freshness: freshness.clone(),
            stop: switch.token(),
        };
        let platform = Arc::new(Platform {
            provider: Arc::new(ProcessProvider { provider, switch: Arc::clone(&switch) }),
            bucket: Bucket::new(Arc::new(connection)),
            store_access: StoreAccessIssuer::new(&config.store, &config.host_credentials)
                .expect("the store access settings are valid"),
            mint: TokenMint::new(&config.keys.current),
            seal: Seal::from_keys(&config.keys),
            process: svc::platform::platform_key_rotation::create_process_keys(
                config.keys.ids(),
                &config.timing,
            ),
            db: database.db.clone(),
            host_db: database.db.clone(),
            report_db: database.db.clone(),
            clock: Arc::new(ProcessClock::new(config.timing.max_clock_skew)),
            installation: database.installation,
            keys: database.keys.clone(),
            route_freshness: freshness,
            runner_wake: Notify::new(),
            reconciler_wake: Notify::new(),
            server_lookup_limiter: ServerLookupLimiter::new(config.timing.server_check_interval),
            rate_limits: ApiRateLimits::new(&config.rate_limits),
            quotes: QuoteCache::default(),
            readiness: ReadinessProbe::default(),
            stop,
            config,
        });
        let process = Self {
            api: api::routes(platform.clone()),
            public: router::start_router(router_context).expect("the router's settings are valid").responder,
            tasks: TaskTracker::new(),
            switch,
            platform,
        };
        process.spawn(runner::run(process.platform.clone()));
        process.spawn(reconcile::run(process.platform.clone()));
        process
    }

    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let switch = Arc::clone(&self.switch);
        self.tasks.spawn(async move {
            switch.run_while_alive(work).await;
        });
    }

    pub fn is_alive(&self) -> bool {
        !self.switch.is_dead() && !self.platform.stop.is_cancelled()
    }

    pub fn wake_workers(&self) {
        self.platform.runner_wake.notify_one();
        self.platform.reconciler_wake.notify_one();
    }

    /// Sends a request to the API. Returns `None` if the process dies before it responds.
    pub async fn send_api(&self, request: Request<Body>) -> Option<ApiResponse> {
        self.switch.run_while_alive(send(self.api.clone(), request)).await
    }

    /// Sends a request to the public listener. Returns `None` if the process dies before it responds.
    pub async fn send_public(&self, request: Request<Body>) -> Option<ApiResponse> {
        self.switch.run_while_alive(send(self.public.clone(), request)).await
    }

    /// Shuts down gracefully, as on SIGTERM: the current steps finish and leases are released.
    pub async fn stop(&self) {
        self.platform.stop.cancel();
        self.tasks.close();
        // A supervisor would also kill a process that hangs.
        let _ = tokio::time::timeout(Duration::from_secs(2), self.tasks.wait()).await;
        self.switch.kill();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.switch.kill();
    }
}

async fn send(responder: impl Respond, request: Request<Body>) -> ApiResponse {
    let connection = ConnectionInfo { peer: ([127, 0, 0, 1], 1).into(), scheme: Scheme::Http };
    let response = responder.respond(request, connection).await;
    let (parts, body) = response.into_parts();
    let bytes = body.collect().await.map(Collected::to_bytes).unwrap_or_default();
    ApiResponse { status: parts.status.as_u16(), body: serde_json::from_slice(&bytes).unwrap_or_default() }
}

/// Builds a request from an operator or a host. `id` links the request to its audit entry.
pub fn build_request(
    method: &str,
    path: &str,
    token: &SecretString,
    body: Option<&Value>,
    id: &str,
    key: Option<&str>,
) -> Request<Body> {
    use secrecy::ExposeSecret;
    let mut request = Request::builder()
        .method(method)
        .uri(path)
        .header("authorization", format!("Bearer {}", token.expose_secret()))
        .header("content-type", "application/json")
        .header("x-request-id", id);
    if let Some(key) = key {
        request = request.header("idempotency-key", key);
    }
    let body = body.map_or_else(Body::empty, |body| Body::from(body.to_string()));
    request.body(body).expect("the request is valid")
}
