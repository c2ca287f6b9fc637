//! The seam itself: from a request's head and its listener to a principal.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::ConnectInfo;
use http::request::Parts;
use http::{HeaderMap, header};
use jiff::Timestamp;
use secrecy::{ExposeSecret, SecretString};
use subtle::ConstantTimeEq;

use super::keyring::Keyring;
use super::peer::{Peer, Peers};
use super::replay::{Use, UsedIds};
use super::{Denied, Identified, Ingress, Principal};
use crate::host::agents::bridge_tokens::AgentTokens;
use crate::host::gateway::apps::Slug;
use crate::host::gateway::config::{Config, OwnerConfig};
use crate::host::system::config::Identity;
use crate::host::system::unix_socket::PeerCredentials;
use crate::http::client::{self, Deadlines};
use crate::http::jwt::{JwtError, Verifier};
use crate::http::proof::{self, Claims, LEEWAY_SECONDS, Route};
use crate::machine::name::IdpUserId;
use crate::metrics::PROOFS;

/// How many verified proofs are remembered; the platform reuses one for some seconds.
const REMEMBERED: usize = 4096;

/// Everything that resolving a principal needs.
pub struct Seam {
    owner: Owner,
    admin_token: Option<SecretString>,
    agent_tokens: Arc<AgentTokens>,
    peers: Peers,
    issuer: Option<Verifier>,
    used: Mutex<UsedIds>,
    verified: Mutex<Verified>,
}

enum Owner {
    Provisioned { identity: Identity, keyring: Keyring },
    DevDefault { sub: IdpUserId },
}

/// Proofs whose signature was checked, by their text; dropped whole when the keys change or it is full.
#[derive(Default)]
struct Verified {
    generation: u64,
    claims: HashMap<String, Claims>,
}

impl Seam {
    /// # Errors
    /// When the client for the identity provider's keys cannot be made.
    pub fn new(config: &Config, agent_tokens: Arc<AgentTokens>) -> anyhow::Result<Self> {
        let owner = match &config.owner {
            OwnerConfig::Provisioned { identity, first_keys } => Owner::Provisioned {
                identity: identity.clone(),
                keyring: Keyring::new(first_keys.clone(), config.layout.proof_keys()),
            },
            OwnerConfig::DevDefault => {
                Owner::DevDefault { sub: "dev".parse().expect("the dev user's name is well formed") }
            }
        };
        let issuer = match &config.issuer {
            Some(trust) => Some(Verifier::new(trust.clone(), client::build(Deadlines::CALL)?)),
            None => None,
        };
        let admin_token = config.admin_token.clone();
        let peers = Peers::new(config.layout.owner_sockets());
        Ok(Self {
            owner,
            admin_token,
            agent_tokens,
            peers,
            issuer,
            used: Mutex::default(),
            verified: Mutex::default(),
        })
    }

    /// Whose machine this is.
    pub fn owner(&self) -> &IdpUserId {
        match &self.owner {
            Owner::Provisioned { identity, .. } => &identity.user,
            Owner::DevDefault { sub } => sub,
        }
    }

    /// The principal of a request.
    ///
    /// # Errors
    /// [`Denied`]; a present token that is bad is always one of them.
    pub async fn resolve(
        &self,
        head: &Parts,
        ingress: Ingress,
        now: Timestamp,
    ) -> Result<Identified, Denied> {
        let resolved = self.identify(head, ingress, now).await;
        match &resolved {
            // Nothing was shown.
            Err(Denied::Missing) => {}
            Ok(_)
                if !head.headers.contains_key(proof::HEADER)
                    && !head.headers.contains_key(header::AUTHORIZATION) => {}
            Ok(_) => PROOFS.add_one(["verified"]),
            Err(_) => PROOFS.add_one(["refused"]),
        }
        resolved
    }

    async fn identify(&self, head: &Parts, ingress: Ingress, now: Timestamp) -> Result<Identified, Denied> {
        if ingress == Ingress::Agents {
            return self.agent(&head.headers);
        }
        let proved = match single(&head.headers, proof::HEADER)? {
            Some(token) => Some(self.proved(token, head, now)?),
            None => None,
        };
        match single(&head.headers, header::AUTHORIZATION.as_str())? {
            Some(credential) => self.bearer(credential, ingress, proved, now).await,
            None => proved.map_or_else(|| self.without_token(ingress, head), Ok),
        }
    }

    fn proved(&self, token: &str, head: &Parts, now: Timestamp) -> Result<Identified, Denied> {
        let Owner::Provisioned { identity, keyring } = &self.owner else { return Err(Denied::Bad) };
        let claims = self.verified(token, identity, keyring, now)?;
        if claims.sub != identity.user {
            return Err(Denied::AnotherUser);
        }
        let route = claims.route;
        let principal = match (route, claims.app.as_deref()) {
            (Route::Shell | Route::Code, None) => Principal::Owner { sub: claims.sub },
            (Route::App, Some(app)) if app.parse::<Slug>().is_ok() => Principal::App { slug: app.to_owned() },
            (Route::Internal, None) => {
                self.once(&claims, head, now)?;
                Principal::Platform
            }
            _ => return Err(Denied::Bad),
        };
        Ok(Identified { principal, route: Some(route) })
    }

    fn verified(
        &self,
        token: &str,
        identity: &Identity,
        keyring: &Keyring,
        now: Timestamp,
    ) -> Result<Claims, Denied> {
        let (keys, generation) = keyring.current();
        if let Some(claims) = self.remembered(token, generation, now) {
            return Ok(claims);
        }
        let claims = keys.verify(token, identity.machine, now).map_err(|why| {
            tracing::debug!(%why, "proof refused");
            Denied::Bad
        })?;
        if claims.route != Route::Internal {
            self.remember(token, generation, &claims);
        }
        Ok(claims)
    }

    fn remembered(&self, token: &str, generation: u64, now: Timestamp) -> Option<Claims> {
        let mut verified = self.verified.lock().unwrap_or_else(PoisonError::into_inner);
        if verified.generation != generation {
            verified.claims.clear();
            verified.generation = generation;
        }
        verified.claims.get(token).filter(|claims| now.as_second() <= claims.exp + LEEWAY_SECONDS).cloned()
    }

    fn remember(&self, token: &str, generation: u64, claims: &Claims) {
        let mut verified = self.verified.lock().unwrap_or_else(PoisonError::into_inner);
        if verified.claims.len() >= REMEMBERED {
            verified.claims.clear();
        }
        if verified.generation == generation {
            verified.claims.insert(token.to_owned(), claims.clone());
        }
    }

    /// An internal proof names its request, and counts once.
    fn once(&self, claims: &Claims, head: &Parts, now: Timestamp) -> Result<(), Denied> {
        let named = claims.method.as_deref() == Some(head.method.as_str())
            && claims.path.as_deref() == Some(head.uri.path());
        if !named {
            return Err(Denied::AnotherRequest);
        }
        let id = claims.jti.as_deref().ok_or(Denied::Bad)?;
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        match used.take(id, claims.exp + LEEWAY_SECONDS, now.as_second()) {
            Use::First => Ok(()),
            Use::Again => Err(Denied::Used),
            Use::Full => Err(Denied::Busy),
        }
    }

    /// A bearer is the admin token or a token of the issuer; anything else is refused, whatever came beside it. On the
    /// public port the admin token is no way in by itself: it needs a proof beside it.
    async fn bearer(
        &self,
        credential: &str,
        ingress: Ingress,
        proved: Option<Identified>,
        now: Timestamp,
    ) -> Result<Identified, Denied> {
        let token = strip_bearer(credential).ok_or(Denied::Bad)?;
        if self.is_admin(token) {
            if ingress == Ingress::Public && proved.is_none() {
                return Err(Denied::Bad);
            }
            let route = proved.and_then(|proved| proved.route);
            return Ok(Identified { principal: Principal::Admin, route });
        }
        let owner = self.issued(token, now).await?;
        Ok(proved.unwrap_or(owner))
    }

    async fn issued(&self, token: &str, now: Timestamp) -> Result<Identified, Denied> {
        let (Some(issuer), Owner::Provisioned { identity, .. }) = (&self.issuer, &self.owner) else {
            return Err(Denied::Bad);
        };
        let subject = issuer.verify(token, now).await.map_err(|why| match why {
            JwtError::NoKeys => Denied::Unverifiable,
            why => {
                tracing::debug!(%why, "token refused");
                Denied::Bad
            }
        })?;
        if subject.user != identity.user {
            return Err(Denied::AnotherUser);
        }
        Ok(Identified { principal: Principal::Owner { sub: subject.user }, route: None })
    }

    fn is_admin(&self, token: &str) -> bool {
        let Some(admin) = &self.admin_token else { return false };
        admin.expose_secret().as_bytes().ct_eq(token.as_bytes()).into()
    }

    /// On the agents' socket nothing but the token of one that runs is a credential.
    fn agent(&self, headers: &HeaderMap) -> Result<Identified, Denied> {
        let credential = single(headers, header::AUTHORIZATION.as_str())?.ok_or(Denied::AgentWithoutToken)?;
        let token = strip_bearer(credential).ok_or(Denied::Bad)?;
        let grant = self.agent_tokens.find(token).ok_or(Denied::Bad)?;
        let principal = Principal::Agent { dispatch: grant.dispatch, apps: grant.apps };
        Ok(Identified { principal, route: None })
    }

    fn without_token(&self, ingress: Ingress, head: &Parts) -> Result<Identified, Denied> {
        let owner = |sub: &IdpUserId| Principal::Owner { sub: sub.clone() };
        let principal = match (&self.owner, ingress) {
            (Owner::DevDefault { sub }, Ingress::Public) => owner(sub),
            (Owner::Provisioned { .. }, Ingress::Public) => return Err(Denied::Missing),
            (
                Owner::DevDefault { sub } | Owner::Provisioned { identity: Identity { user: sub, .. }, .. },
                _,
            ) => {
                let credentials = head.extensions.get::<ConnectInfo<PeerCredentials>>();
                match self.peers.judge(credentials.map(|ConnectInfo(credentials)| *credentials)) {
                    Peer::Machine => owner(sub),
                    Peer::OwnersProcess => Principal::OwnersProcess { sub: sub.clone() },
                    Peer::Agent => return Err(Denied::AgentWithoutToken),
                    Peer::Stranger => return Err(Denied::Stranger),
                }
            }
        };
        Ok(Identified { principal, route: None })
    }
}

/// The one value of a header; several, or one that is not text, is a forgery and not an absence.
fn single<'a>(headers: &'a HeaderMap, name: &str) -> Result<Option<&'a str>, Denied> {
    let mut values = headers.get_all(name).iter();
    let Some(first) = values.next() else { return Ok(None) };
    match (first.to_str(), values.next()) {
        (Ok(text), None) => Ok(Some(text)),
        _ => Err(Denied::Bad),
    }
}

fn strip_bearer(credential: &str) -> Option<&str> {
    let (scheme, token) = credential.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim()).filter(|token| !token.is_empty())
}
