//! Resolves the principal from a request's head and listener.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::ConnectInfo;
use http::request::Parts;
use http::{HeaderMap, header};
use jiff::Timestamp;
use secrecy::{ExposeSecret, SecretString};
use subtle::ConstantTimeEq;

use super::keyring::Keyring;
use super::peer::{Peer, PeerClassifier};
use super::replay::{ReplayCache, ReplayCheck};
use super::{AuthFailure, Authentication, Ingress, Principal};
use crate::config::{Config, ConfiguredOwner};
use crate::name::Slug;
use svc_base::metrics::PROOFS;
use svc_host::agents::bridge_tokens::BridgeTokens;
use svc_host::system::config::Identity;
use svc_host::system::unix_socket::PeerCredentials;
use svc_http::client::{self, Timeouts};
use svc_http::jwt::{JwtError, Verifier};
use svc_http::proof::{self, Claims, LEEWAY_SECONDS, Route};
use svc_machine::name::IdpUserId;

/// Maximum number of cached verified proofs. The platform reuses a proof for several seconds.
const MAX_VERIFIED_PROOFS: usize = 4096;

/// Resolves the principal of each request.
pub struct PrincipalResolver {
    owner: Owner,
    admin_token: Option<SecretString>,
    bridge_tokens: Arc<BridgeTokens>,
    peers: PeerClassifier,
    jwt_verifier: Option<Verifier>,
    replay: Mutex<ReplayCache>,
    verified_proofs: Mutex<VerifiedProofs>,
}

enum Owner {
    Provisioned { identity: Identity, keyring: Keyring },
    Development { sub: IdpUserId },
}

/// Claims from verified proofs, by token; cleared when the keys change or the cache is full.
#[derive(Default)]
struct VerifiedProofs {
    generation: u64,
    claims: HashMap<String, Arc<Claims>>,
}

impl PrincipalResolver {
    /// # Errors
    /// The HTTP client for the identity provider's keys can't be created.
    pub fn new(config: &Config, bridge_tokens: Arc<BridgeTokens>) -> anyhow::Result<Self> {
        let owner = match &config.owner {
            ConfiguredOwner::Provisioned { identity, proof_keys } => Owner::Provisioned {
                identity: identity.clone(),
                keyring: Keyring::new(proof_keys.clone(), config.layout.clone()),
            },
            ConfiguredOwner::Development => {
                Owner::Development { sub: "dev".parse().expect("the development user id is valid") }
            }
        };
        let jwt_verifier = match &config.issuer {
            Some(trust) => Some(Verifier::new(trust.clone(), client::build(Timeouts::CALL)?)),
            None => None,
        };
        let admin_token = config.admin_token.clone();
        let peers = PeerClassifier::new(config.layout.owner_sockets());
        Ok(Self {
            owner,
            admin_token,
            bridge_tokens,
            peers,
            jwt_verifier,
            replay: Mutex::default(),
            verified_proofs: Mutex::default(),
        })
    }

    /// The owner of this machine.
    pub fn owner(&self) -> &IdpUserId {
        match &self.owner {
            Owner::Provisioned { identity, .. } => &identity.user,
            Owner::Development { sub } => sub,
        }
    }

    /// Resolves a request's principal, counting verified credentials and all failures except [`AuthFailure::Missing`].
    ///
    /// # Errors
    /// See [`AuthFailure`]. An invalid token is always an error.
    pub async fn resolve(
        &self,
        head: &Parts,
        ingress: Ingress,
        now: Timestamp,
    ) -> Result<Authentication, AuthFailure> {
        let resolved = self.authenticate(head, ingress, now).await;
        match &resolved {
            // No credential was presented.
            Err(AuthFailure::Missing) => {}
            Ok(_)
                if !head.headers.contains_key(proof::HEADER)
                    && !head.headers.contains_key(header::AUTHORIZATION) => {}
            Ok(_) => PROOFS.add_one(["verified"]),
            Err(_) => PROOFS.add_one(["refused"]),
        }
        resolved
    }

    async fn authenticate(
        &self,
        head: &Parts,
        ingress: Ingress,
        now: Timestamp,
    ) -> Result<Authentication, AuthFailure> {
        if ingress == Ingress::Agents {
            return self.authenticate_agent(&head.headers);
        }
        let proof = match single_header(&head.headers, proof::HEADER)? {
            Some(token) => Some(self.authenticate_proof(token, head, now)?),
            None => None,
        };
        match single_header(&head.headers, header::AUTHORIZATION.as_str())? {
            Some(credential) => self.authenticate_bearer(credential, ingress, proof, now).await,
            None => proof.map_or_else(|| self.resolve_without_token(ingress, head), Ok),
        }
    }

    fn authenticate_proof(
        &self,
        token: &str,
        head: &Parts,
        now: Timestamp,
    ) -> Result<Authentication, AuthFailure> {
        let Owner::Provisioned { identity, keyring } = &self.owner else {
            return Err(AuthFailure::InvalidCredential);
        };
        let claims = self.verify_proof(token, identity, keyring, now)?;
        if claims.sub != identity.user {
            return Err(AuthFailure::WrongUser);
        }
        let route = claims.route;
        let principal = match (route, claims.app.as_deref()) {
            (Route::Shell | Route::Code, None) => Principal::Owner { sub: claims.sub.clone() },
            (Route::App, Some(app)) if app.parse::<Slug>().is_ok() => Principal::App { slug: app.to_owned() },
            (Route::Internal, None) => {
                self.consume_proof(&claims, head, now)?;
                Principal::Platform
            }
            _ => return Err(AuthFailure::InvalidCredential),
        };
        Ok(Authentication { principal, route: Some(route) })
    }

    fn verify_proof(
        &self,
        token: &str,
        identity: &Identity,
        keyring: &Keyring,
        now: Timestamp,
    ) -> Result<Arc<Claims>, AuthFailure> {
        let (keys, generation) = keyring.current();
        if let Some(claims) = self.cached_claims(token, generation, now) {
            return Ok(claims);
        }
        let claims = keys.verify(token, identity.machine, now).map_err(|error| {
            tracing::debug!(%error, "proof rejected");
            AuthFailure::InvalidCredential
        })?;
        let claims = Arc::new(claims);
        if claims.route != Route::Internal {
            self.cache_claims(token, generation, claims.clone());
        }
        Ok(claims)
    }

    fn cached_claims(&self, token: &str, generation: u64, now: Timestamp) -> Option<Arc<Claims>> {
        let mut verified = self.verified_proofs.lock().unwrap_or_else(PoisonError::into_inner);
        if verified.generation != generation {
            verified.claims.clear();
            verified.generation = generation;
        }
        verified.claims.get(token).filter(|claims| now.as_second() <= claims.exp + LEEWAY_SECONDS).cloned()
    }

    fn cache_claims(&self, token: &str, generation: u64, claims: Arc<Claims>) {
        let mut verified = self.verified_proofs.lock().unwrap_or_else(PoisonError::into_inner);
        if verified.claims.len() >= MAX_VERIFIED_PROOFS {
            verified.claims.clear();
        }
        if verified.generation == generation {
            verified.claims.insert(token.to_owned(), claims);
        }
    }

    /// Checks that an internal proof is for this request, and records it, since it's single-use.
    fn consume_proof(&self, claims: &Claims, head: &Parts, now: Timestamp) -> Result<(), AuthFailure> {
        let matches_request = claims.method.as_deref() == Some(head.method.as_str())
            && claims.path.as_deref() == Some(head.uri.path());
        if !matches_request {
            return Err(AuthFailure::RequestMismatch);
        }
        let id = claims.jti.as_deref().ok_or(AuthFailure::InvalidCredential)?;
        let mut replay = self.replay.lock().unwrap_or_else(PoisonError::into_inner);
        match replay.record(id, claims.exp + LEEWAY_SECONDS, now.as_second()) {
            ReplayCheck::Accepted => Ok(()),
            ReplayCheck::Replayed => Err(AuthFailure::Replayed),
            ReplayCheck::InvalidId => Err(AuthFailure::InvalidCredential),
            ReplayCheck::Full => Err(AuthFailure::ReplayCacheFull),
        }
    }

    /// Accepts the admin token or an issuer token; anything else is rejected, regardless of other credentials. On the
    /// public port, the admin token also requires a proof. If a request has both a proof and an issuer token, the proof
    /// determines the principal.
    async fn authenticate_bearer(
        &self,
        credential: &str,
        ingress: Ingress,
        proof: Option<Authentication>,
        now: Timestamp,
    ) -> Result<Authentication, AuthFailure> {
        let token = strip_bearer(credential).ok_or(AuthFailure::InvalidCredential)?;
        if self.is_admin(token) {
            if ingress == Ingress::Public && proof.is_none() {
                return Err(AuthFailure::InvalidCredential);
            }
            let route = proof.and_then(|proof| proof.route);
            return Ok(Authentication { principal: Principal::Admin, route });
        }
        let owner = self.authenticate_jwt(token, now).await?;
        Ok(proof.unwrap_or(owner))
    }

    async fn authenticate_jwt(&self, token: &str, now: Timestamp) -> Result<Authentication, AuthFailure> {
        let (Some(verifier), Owner::Provisioned { identity, .. }) = (&self.jwt_verifier, &self.owner) else {
            return Err(AuthFailure::InvalidCredential);
        };
        let subject = verifier.verify(token, now).await.map_err(|error| match error {
            JwtError::NoKeys => AuthFailure::KeysUnavailable,
            error => {
                tracing::debug!(%error, "token rejected");
                AuthFailure::InvalidCredential
            }
        })?;
        if subject.user != identity.user {
            return Err(AuthFailure::WrongUser);
        }
        Ok(Authentication { principal: Principal::Owner { sub: subject.user }, route: None })
    }

    fn is_admin(&self, token: &str) -> bool {
        let Some(admin) = &self.admin_token else { return false };
        admin.expose_secret().as_bytes().ct_eq(token.as_bytes()).into()
    }

    /// The agents' socket accepts only tokens of running agents.
    fn authenticate_agent(&self, headers: &HeaderMap) -> Result<Authentication, AuthFailure> {
        let credential =
            single_header(headers, header::AUTHORIZATION.as_str())?.ok_or(AuthFailure::AgentWithoutToken)?;
        let token = strip_bearer(credential).ok_or(AuthFailure::InvalidCredential)?;
        let grant = self.bridge_tokens.find(token).ok_or(AuthFailure::InvalidCredential)?;
        let principal = Principal::Agent { dispatch: grant.dispatch, apps: grant.apps };
        Ok(Authentication { principal, route: None })
    }

    fn resolve_without_token(&self, ingress: Ingress, head: &Parts) -> Result<Authentication, AuthFailure> {
        let owner = |sub: &IdpUserId| Principal::Owner { sub: sub.clone() };
        let principal = match (&self.owner, ingress) {
            (Owner::Development { sub }, Ingress::Public) => owner(sub),
            (Owner::Provisioned { .. }, Ingress::Public) => return Err(AuthFailure::Missing),
            (
                Owner::Development { sub } | Owner::Provisioned { identity: Identity { user: sub, .. }, .. },
                _,
            ) => {
                let credentials = head.extensions.get::<ConnectInfo<PeerCredentials>>();
                match self.peers.classify(credentials.map(|ConnectInfo(credentials)| *credentials)) {
                    Peer::Machine => owner(sub),
                    Peer::OwnerProcess => Principal::OwnerProcess { sub: sub.clone() },
                    Peer::Agent => return Err(AuthFailure::AgentWithoutToken),
                    Peer::Untrusted => return Err(AuthFailure::UntrustedPeer),
                }
            }
        };
        Ok(Authentication { principal, route: None })
    }
}

/// Returns a header's only value. Multiple or non-text values are rejected, not treated as absent.
fn single_header<'a>(headers: &'a HeaderMap, name: &str) -> Result<Option<&'a str>, AuthFailure> {
    let mut values = headers.get_all(name).iter();
    let Some(first) = values.next() else { return Ok(None) };
    match (first.to_str(), values.next()) {
        (Ok(text), None) => Ok(Some(text)),
        _ => Err(AuthFailure::InvalidCredential),
    }
}

fn strip_bearer(credential: &str) -> Option<&str> {
    let (scheme, token) = credential.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim()).filter(|token| !token.is_empty())
}
