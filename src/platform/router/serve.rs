//! One request: which host, who asks, which machine, and on.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::body::HttpBody;
use axum::extract::{ConnectInfo, Request, State};
use axum::response::{IntoResponse, Response};
use http::header::{CONTENT_LENGTH, HOST, LOCATION, SET_COOKIE, STRICT_TRANSPORT_SECURITY, UPGRADE};
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use super::app_token::{AppClaims, Minted};
use super::cookie::RouterCookie;
use super::directory::Found;
use super::door::Door;
use super::headers::{Onward, make_onward};
use super::identity::{Identity, Refusal};
use super::machine::{Machine, Way};
use super::page::{self, Absence};
use super::session::{LIFE_SECONDS, SessionError};
use super::{Site, account, app_door, app_token, cookie, frame, origin, own, sign_in};
use crate::http::problem::{Code, Problem, chain};
use crate::http::proof::{LEEWAY_SECONDS, Route};
use crate::http::proxy::{ProxyError, TimeLimit};
use crate::http::request_id;
use crate::http::server::Scheme;
use crate::metrics::UPSTREAM_FAILURES;

/// Of this host alone: what else has the operator's domain is not ours to decide.
const HTTPS_FOR_A_YEAR: &str = "max-age=31536000";

/// What a request is, apart from who asks.
pub(super) struct Visit {
    pub(super) door: Door,
    /// The name and port that it was sent to.
    pub(super) authority: String,
    pub(super) scheme: &'static str,
    /// Who is connected; `None` behind a proxy, whose address stands for all of its clients.
    pub(super) client: Option<IpAddr>,
    /// A person looks at the answer.
    pub(super) page: bool,
    pub(super) now: Timestamp,
}

/// In whose name a request goes on.
#[derive(Clone, Copy)]
pub(super) enum Caller<'a> {
    /// With the number of the user's last sign-out, as it was when they were known.
    Owner(&'a Identity, i64),
    App(&'a AppClaims),
}

pub(super) async fn serve(State(site): State<Arc<Site>>, request: Request) -> Response {
    let scheme = site.scheme(&request);
    let mut answer = site.serve(request).await.unwrap_or_else(IntoResponse::into_response);
    if scheme == Scheme::Https.as_str() {
        answer.headers_mut().insert(STRICT_TRANSPORT_SECURITY, HeaderValue::from_static(HTTPS_FOR_A_YEAR));
    }
    answer
}

impl Site {
    /// How browsers reach this router.
    fn scheme(&self, request: &Request) -> &'static str {
        let listener = request.extensions().get::<Scheme>().copied().unwrap_or(Scheme::Http);
        self.config.public_scheme.unwrap_or(listener.as_str())
    }

    fn client(&self, request: &Request) -> Option<IpAddr> {
        let ConnectInfo(peer) = request.extensions().get::<ConnectInfo<SocketAddr>>()?;
        let is_proxy = self.config.trusted_proxies.contain(peer.ip());
        let is_behind_proxy = is_proxy || self.config.public_scheme.is_some();
        (!is_behind_proxy).then(|| peer.ip())
    }

    async fn serve(&self, mut request: Request) -> Result<Response, Problem> {
        let visit = self.visit(&mut request)?;
        if request.method() == Method::CONNECT {
            return Err(Problem::new(Code::MethodNotAllowed, "This is not a forward proxy."));
        }
        // What most requests do not need stands in boxes: each request's future has room for the largest of its ways.
        if let Some(asked) = app_door::asked(&visit, &request) {
            return Ok(Box::pin(app_door::answer(self, &visit, asked, request)).await);
        }
        let upgrade = request.headers().contains_key(UPGRADE);
        if origin::matters(request.method(), upgrade)
            && origin::is_foreign(request.headers(), visit.scheme, &visit.authority)
        {
            return Err(Problem::new(Code::Forbidden, "The request comes from another origin."));
        }
        if own::is_ours(request.uri().path()) {
            return Box::pin(own::answer(self, &visit, request)).await;
        }
        let Some(identity) = self.identify(&visit, request.headers()).await? else {
            return sign_in::ask(self, &visit, request.uri());
        };
        if let Some(page) = account::unsettled(self, &visit, &identity, request.headers(), request.uri()) {
            return Ok(page);
        }
        self.users.check(identity.user()).map_err(too_many)?;
        let generation = self.sign_outs.generation(identity.user());
        let opened = match &identity {
            Identity::Cookie(_) if visit.page => Box::pin(self.open_session(&visit, &identity)).await,
            _ => None,
        };
        let mut answer = match self.directory.find(identity.user(), identity.slot()) {
            Found::Running(machine, way) => match self.framed(&visit, &machine, &identity, &request) {
                Some(frame) => frame,
                None => {
                    let caller = Caller::Owner(&identity, generation);
                    self.forward(&visit, &machine, &way, caller, request).await
                }
            },
            Found::Waiting(machine) => self.absent(&visit, Absence::of(&machine.row), request.uri()),
            Found::Nothing => self.absent(&visit, Absence::NoMachine, request.uri()),
            Found::Unknown => Absence::Unknown.answer(visit.page),
        };
        if let Some(set) = opened {
            answer.headers_mut().append(SET_COOKIE, set);
        }
        Ok(answer)
    }

    /// The host that was asked for is one of ours; an absolute target outranks `Host` (RFC 9112, section 3.2.2).
    fn visit(&self, request: &mut Request) -> Result<Visit, Problem> {
        if let Some(authority) = request.uri().authority() {
            let host = HeaderValue::from_str(authority.as_str());
            let host = host.map_err(|_| Problem::new(Code::InvalidRequest, "The target is not one."))?;
            request.headers_mut().insert(HOST, host);
        }
        let mut hosts = request.headers().get_all(HOST).iter();
        let unknown = || Problem::new(Code::NotFound, "This host is not served here.");
        let (Some(host), None) = (hosts.next(), hosts.next()) else { return Err(unknown()) };
        let authority = host.to_str().map_err(|_| unknown())?.to_owned();
        let door = self.config.door(&authority).ok_or_else(unknown)?;
        Ok(Visit {
            door,
            authority,
            scheme: self.scheme(request),
            client: self.client(request),
            page: page::is_wanted(request.method(), request.headers()),
            now: Timestamp::now(),
        })
    }

    /// Counts a credential that costs work to verify.
    pub(super) fn admit_check(&self, visit: &Visit) -> Result<(), Problem> {
        self.gate.admit_check(visit).map_err(refused)
    }

    pub(super) async fn identify(
        &self,
        visit: &Visit,
        headers: &HeaderMap,
    ) -> Result<Option<Identity>, Problem> {
        self.gate.identify(visit, headers).await.map_err(refused)
    }

    /// Opens a session after the provider's cookie, so that the browser is known when that one has expired. A failure
    /// costs only that.
    async fn open_session(&self, visit: &Visit, identity: &Identity) -> Option<HeaderValue> {
        match self.sessions.open(visit.door, identity.user(), None).await {
            Ok((token, _)) => Some(RouterCookie::Session(visit.door).set(&token, visit.scheme, LIFE_SECONDS)),
            Err(error) => {
                tracing::warn!(error = %chain(&error), "no session was opened");
                None
            }
        }
    }

    /// The frame around an app's page, for its owner.
    fn framed(
        &self,
        visit: &Visit,
        machine: &Machine,
        identity: &Identity,
        request: &Request,
    ) -> Option<Response> {
        if visit.door != Door::App || !visit.page {
            return None;
        }
        let uri = request.uri();
        let (app, rest) = frame::target(uri.path())?;
        let Some(minted) = self.mint(visit, machine, identity, app) else {
            // Asked again, the browser is led to sign in.
            return Some(redirect(StatusCode::FOUND, uri.path_and_query().map_or("/", |path| path.as_str())));
        };
        let origin = format!("{}://{}", visit.scheme, visit.authority);
        Some(frame::around(app, rest, uri, &origin, &minted))
    }

    /// A token for an app on this machine; `None` where the session has ended since the caller was known.
    pub(super) fn mint(
        &self,
        visit: &Visit,
        machine: &Machine,
        identity: &Identity,
        app: &str,
    ) -> Option<Minted> {
        let row = &machine.row;
        let generation = self.sign_outs.generation(&row.user);
        // After the number: a sign-out ends sessions first.
        if let Some(session) = identity.session()
            && !self.sessions.is_open(session)
        {
            return None;
        }
        let proof = self.proof.borrow();
        Some(app_token::mint(&proof.app.current, &row.user, row.id, app, generation, visit.now))
    }

    pub(super) async fn forward(
        &self,
        visit: &Visit,
        machine: &Machine,
        way: &Way,
        caller: Caller<'_>,
        mut request: Request,
    ) -> Response {
        let (route, app) = match caller {
            Caller::Owner(..) => (visit.door.route(), None),
            Caller::App(claims) => (Route::App, Some(claims.app.as_str())),
        };
        let proof = machine.proof(route, app, &self.proof.borrow(), visit.now);
        let peer = request.extensions().get::<ConnectInfo<SocketAddr>>().map(|ConnectInfo(peer)| *peer);
        let request_id = request_id::current();
        let onward = Onward { peer, scheme: visit.scheme, proof, request_id: &request_id };
        if make_onward(request.headers_mut(), onward)
            && let Some(until) = self.until(caller, visit.now)
        {
            request.extensions_mut().insert(until);
        }
        match way.proxy.forward(request).await {
            Ok(mut answer) => {
                cookie::drop_ours(answer.headers_mut());
                self.bound(caller, visit.now, answer)
            }
            Err(error) => {
                tracing::warn!(svc_machine_id = %machine.row.id, error = %chain(&error), "the machine did not answer");
                UPSTREAM_FAILURES.add_one([error.kind()]);
                match error {
                    ProxyError::Closed => Absence::JustLeft.answer(visit.page),
                    ProxyError::HeadTimeout => page::upstream_slow(visit.page),
                    ProxyError::Full => {
                        Problem::new(Code::Unavailable, "The machine has too many connections.")
                            .retry_after(page::REFRESH_SECONDS)
                            .into_response()
                    }
                    _ => page::upstream_down(visit.page),
                }
            }
        }
    }

    /// An answer whose length is not known may go on for hours: it ends with what it was asked by.
    fn bound(&self, caller: Caller<'_>, now: Timestamp, answer: Response) -> Response {
        if answer.body().size_hint().exact().is_some() || answer.headers().contains_key(CONTENT_LENGTH) {
            return answer;
        }
        match self.until(caller, now) {
            Some(until) => answer.map(|body| until.bound(body)),
            None => answer,
        }
    }

    /// When a stream of this caller has to end; `None` for one with a bearer token, which no sign-out takes back.
    fn until(&self, caller: Caller<'_>, now: Timestamp) -> Option<TimeLimit> {
        let (user, expires_at) = match caller {
            Caller::Owner(Identity::Bearer(_), _) => return None,
            // As a session would be that is opened now.
            Caller::Owner(Identity::Cookie(subject), _) => {
                (&subject.user, now.as_second() + LIFE_SECONDS.cast_signed())
            }
            Caller::Owner(Identity::Session(session) | Identity::Disputed(session, _), _) => {
                (&session.user, session.expires_at.as_second())
            }
            Caller::App(claims) => (&claims.sub, claims.exp + LEEWAY_SECONDS),
        };
        let closed = self.sign_outs.register(user);
        let is_valid = match caller {
            Caller::Owner(Identity::Session(session) | Identity::Disputed(session, _), _) => {
                self.sessions.is_open(session)
            }
            Caller::Owner(_, generation) => generation >= self.sign_outs.required(user),
            Caller::App(claims) => claims.generation >= self.sign_outs.required(user),
        };
        let closed = if is_valid { closed } else { ended() };
        let left = |at: i64| Duration::from_secs(u64::try_from(at - now.as_second()).unwrap_or_default());
        Some(TimeLimit { closed, at: tokio::time::Instant::now() + left(expires_at) })
    }

    fn absent(&self, visit: &Visit, absence: Absence, uri: &Uri) -> Response {
        match &self.config.legacy_fallback {
            Some(base) => {
                let path = uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str);
                redirect(
                    StatusCode::TEMPORARY_REDIRECT,
                    &format!("{}{path}", base.as_str().trim_end_matches('/')),
                )
            }
            None => absence.answer(visit.page),
        }
    }
}

/// Of what has ended since it was asked.
fn ended() -> Arc<CancellationToken> {
    let token = CancellationToken::new();
    token.cancel();
    Arc::new(token)
}

fn refused(refusal: Refusal) -> Problem {
    match refusal {
        Refusal::Bearer(error) => {
            tracing::debug!(%error, "bearer token refused");
            Problem::new(Code::Unauthorized, "The bearer token is not accepted.")
        }
        Refusal::NoKeys => Problem::new(Code::Unavailable, "The identity provider is unreachable right now.")
            .retry_after(page::REFRESH_SECONDS),
        Refusal::Sessions(error) => session_failure(&error),
        Refusal::TooMany(wait) => too_many(wait),
    }
}

pub(super) fn session_failure(error: &SessionError) -> Problem {
    if let SessionError::TooMany(wait) = error {
        return too_many(*wait);
    }
    if matches!(error, SessionError::ParentEnded) {
        return Problem::new(Code::Unauthorized, "The session has ended; sign in again.");
    }
    tracing::warn!(error = %chain(error), "sessions cannot be looked up");
    Problem::new(Code::DatabaseUnavailable, "Sessions cannot be looked up right now.")
        .retry_after(page::REFRESH_SECONDS)
}

pub(super) fn too_many(wait: Duration) -> Problem {
    Problem::new(Code::RateLimited, "Too many requests. Try again after the time that Retry-After gives.")
        .retry_after(wait.as_secs() + 1)
}

/// Never stored: where it leads depends on who asks.
pub(super) fn redirect(code: StatusCode, to: &str) -> Response {
    let mut response = code.into_response();
    match HeaderValue::from_str(to) {
        Ok(to) => {
            response.headers_mut().insert(LOCATION, to);
            response.headers_mut().insert(http::header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
            response
        }
        Err(_) => Problem::new(Code::InvalidRequest, "The target is not one.").into_response(),
    }
}
