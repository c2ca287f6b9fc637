//! Obtains a certificate for the machine's key over ACME (RFC 8555), using the TLS-ALPN-01 challenge.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use http::Request;
use http::header::RETRY_AFTER;
use http_body_util::{BodyExt, Collected};
use instant_acme::{
    Account, AccountCredentials, AuthorizationStatus, BodyWrapper, BytesResponse, ChallengeType, Error,
    ExternalAccountKey, HttpClient, Identifier, NewAccount, NewOrder, Order, OrderStatus, RetryPolicy,
};
use secrecy::ExposeSecret;
use serde::{Deserialize, Serialize};

use svc_base::fsx;
use svc_host::system::layout::Layout;
use svc_http::body::read_response;
use svc_http::certificate::{CertificateResolver, ChallengeGuard, create_signing_request};
use svc_http::client::{self, Timeouts};
use svc_wire::heartbeat::{AcmeSettings, ExternalAccount};

const TIMEOUTS: Timeouts = Timeouts {
    connect: Duration::from_secs(5),
    total: Some(Duration::from_secs(30)),
    idle: Duration::from_secs(30),
};
const MAX_RESPONSE_BYTES: usize = 256 << 10;
/// Timeout for the whole issuance.
const ISSUE_TIMEOUT: Duration = Duration::from_secs(300);
const POLL_POLICY: RetryPolicy = RetryPolicy::new().timeout(Duration::from_secs(90));
/// Cap on the authority's `Retry-After`: longer than any certificate request takes.
const MAX_RETRY_AFTER_SECONDS: u64 = 3600;
/// Error types for an account that was deactivated or that the authority no longer has.
const ACCOUNT_ERRORS: [&str; 2] =
    ["urn:ietf:params:acme:error:accountDoesNotExist", "urn:ietf:params:acme:error:unauthorized"];

/// Obtains a certificate for the machine's host name.
pub struct CertificateIssuance<'a> {
    pub layout: &'a Layout,
    pub settings: &'a AcmeSettings,
    pub name: &'a str,
    pub key_pem: &'a str,
    pub resolver: &'a Arc<CertificateResolver>,
}

impl CertificateIssuance<'_> {
    /// Orders a certificate and returns its PEM chain, which the caller must check.
    ///
    /// # Errors
    /// The authority is unreachable, refuses a step, or doesn't issue a certificate within [`ISSUE_TIMEOUT`]; the
    /// account file can't be read, written or removed; or the configured external account key is invalid. Errors never
    /// contain secrets.
    pub async fn issue(&self) -> anyhow::Result<String> {
        let issuing = tokio::time::timeout(ISSUE_TIMEOUT, self.complete_order());
        issuing.await.map_err(|_| anyhow!("the authority did not issue a certificate within 5 minutes"))?
    }

    async fn complete_order(&self) -> anyhow::Result<String> {
        let mut order = match self.place_order().await {
            Err(error) if is_account_refused(&error) => {
                fsx::remove_if_exists(&self.layout.acme_account())?;
                self.place_order().await?
            }
            placed => placed?,
        };
        let challenges = self.start_challenges(&mut order).await?;
        let ready = order.poll_ready(&POLL_POLICY).await;
        drop(challenges);
        match ready {
            Ok(OrderStatus::Ready) => {}
            Ok(_) | Err(Error::Api(_)) => return Err(self.explain_refusal(&mut order, ready.err()).await),
            Err(error) => return Err(error).context("failed while waiting for name validation"),
        }
        let request = create_signing_request(self.name, self.key_pem)?;
        order
            .finalize_csr(&request.der)
            .await
            .context("the authority did not accept the certificate request")?;
        order.poll_certificate(&POLL_POLICY).await.context("failed while waiting for the certificate")
    }

    async fn place_order(&self) -> anyhow::Result<Order> {
        let identifiers = [Identifier::Dns(self.name.to_owned())];
        let account = self.open_account().await?;
        account
            .new_order(&NewOrder::new(&identifiers))
            .await
            .context("the authority did not accept the order")
    }

    async fn start_challenges(&self, order: &mut Order) -> anyhow::Result<Vec<ChallengeGuard>> {
        let (mut guards, mut start_error) = (Vec::new(), None);
        let mut authorizations = order.authorizations();
        while let Some(authorization) = authorizations.next().await {
            let mut authorization = authorization.context("cannot read the order's authorization")?;
            match authorization.status {
                AuthorizationStatus::Pending => {}
                AuthorizationStatus::Valid => continue,
                status => bail!("the order's authorization is {status:?}"),
            }
            let Some(mut challenge) = authorization.challenge(ChallengeType::TlsAlpn01) else {
                bail!("the authority does not offer the tls-alpn-01 challenge");
            };
            let digest = challenge.key_authorization().digest();
            guards.push(self.resolver.respond_to_challenge(self.name, digest.as_ref())?);
            if let Err(error) = challenge.set_ready().await {
                start_error = Some(error);
                break;
            }
        }
        match start_error {
            // Validation may already have run, and failed, before the authority responded.
            Some(error) => Err(self.explain_refusal(order, Some(error)).await),
            None => Ok(guards),
        }
    }

    /// Returns an error with the authority's reason, taken from the failed challenge if there is one: the order's own
    /// error lacks the detail.
    async fn explain_refusal(&self, order: &mut Order, error: Option<Error>) -> anyhow::Error {
        let mut authorizations = order.authorizations();
        while let Some(Ok(mut authorization)) = authorizations.next().await {
            let Ok(state) = authorization.refresh().await else { continue };
            let failed = state.challenges.iter().find_map(|challenge| challenge.error.as_ref());
            if let Some(problem) = failed {
                let detail = problem.detail.as_deref().unwrap_or("no reason given");
                return anyhow!("the authority could not validate {}: {detail}", self.name);
            }
        }
        match error {
            Some(error) => anyhow!(error).context(format!("the authority refused {}", self.name)),
            None => anyhow!("the authority refused {} and gave no reason", self.name),
        }
    }

    /// Opens the stored account and updates its contact. If there is none for these settings, creates one and persists
    /// it before use.
    async fn open_account(&self) -> anyhow::Result<Account> {
        let settings = self.settings;
        let contact: Vec<&str> = settings.contact.iter().map(String::as_str).collect();
        if let Some(mut stored) = StoredAccount::read(self.layout)?
            && stored.matches_settings(settings)
            && let Ok(credentials) = serde_json::from_value(stored.credentials.clone())
        {
            let account = Account::builder_with_http(http_client()?).from_credentials(credentials).await;
            let account = account.context("cannot reach the authority's directory")?;
            if stored.contact != settings.contact {
                let updated = account.update_contacts(&contact).await;
                updated.context("cannot update the ACME account's contact")?;
                stored.contact.clone_from(&settings.contact);
                stored.write(self.layout)?;
            }
            return Ok(account);
        }
        // The operator accepts the terms by configuring the authority.
        let new_account =
            NewAccount { contact: &contact, terms_of_service_agreed: true, only_return_existing: false };
        let external = settings.external_account.as_ref().map(external_account_key).transpose()?;
        let builder = Account::builder_with_http(http_client()?);
        let created = builder.create(&new_account, settings.directory_url.clone(), external.as_ref()).await;
        let (account, credentials) = created.context("cannot create an ACME account")?;
        StoredAccount::new(settings, &credentials)?.write(self.layout)?;
        Ok(account)
    }
}

fn is_account_refused(error: &anyhow::Error) -> bool {
    let error_type = match error.downcast_ref::<Error>() {
        Some(Error::Api(problem)) => problem.r#type.as_deref(),
        _ => None,
    };
    error_type.is_some_and(|error_type| ACCOUNT_ERRORS.contains(&error_type))
}

fn external_account_key(external: &ExternalAccount) -> anyhow::Result<ExternalAccountKey> {
    let key = external.hmac_key.expose_secret().trim_end_matches('=');
    let key = URL_SAFE_NO_PAD.decode(key).map_err(|_| anyhow!("ACME_EAB_HMAC_KEY is not valid base64url"))?;
    Ok(ExternalAccountKey::new(external.key_id.clone(), &key))
}

/// Contents of `acme-account.json`.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct StoredAccount {
    directory_url: String,
    external_key_id: Option<String>,
    contact: Option<String>,
    /// Includes the account's private key.
    credentials: serde_json::Value,
}

impl StoredAccount {
    fn new(settings: &AcmeSettings, credentials: &AccountCredentials) -> anyhow::Result<Self> {
        Ok(Self {
            directory_url: settings.directory_url.clone(),
            external_key_id: settings.external_account.as_ref().map(|external| external.key_id.clone()),
            contact: settings.contact.clone(),
            credentials: serde_json::to_value(credentials)?,
        })
    }

    /// Treats an unparsable file as missing: a new account costs nothing.
    fn read(layout: &Layout) -> anyhow::Result<Option<Self>> {
        Ok(fsx::read_if_exists(&layout.acme_account())?.and_then(|text| serde_json::from_slice(&text).ok()))
    }

    fn matches_settings(&self, settings: &AcmeSettings) -> bool {
        self.directory_url == settings.directory_url
            && self.external_key_id.as_ref()
                == settings.external_account.as_ref().map(|external| &external.key_id)
    }

    fn write(&self, layout: &Layout) -> anyhow::Result<()> {
        Ok(fsx::write_atomic(&layout.acme_account(), &serde_json::to_vec(self)?, 0o600)?)
    }
}

/// Adapts the HTTP client from [`client::build`] to the ACME library.
struct HttpAdapter(reqwest::Client);

fn http_client() -> anyhow::Result<Box<dyn HttpClient>> {
    Ok(Box::new(HttpAdapter(client::build(TIMEOUTS)?)))
}

impl HttpClient for HttpAdapter {
    fn request(
        &self,
        request: Request<BodyWrapper<Bytes>>,
    ) -> Pin<Box<dyn Future<Output = Result<BytesResponse, Error>> + Send>> {
        Box::pin(send(self.0.clone(), request))
    }
}

async fn send(client: reqwest::Client, request: Request<BodyWrapper<Bytes>>) -> Result<BytesResponse, Error> {
    let to_acme_error = |error: reqwest::Error| Error::Other(Box::new(error));
    let (parts, body) = request.into_parts();
    if parts.uri.scheme_str() != Some("https") {
        return Err(Error::Other("the authority returned a non-https URL".into()));
    }
    let Ok(body) = body.collect().await.map(Collected::to_bytes);
    let call = client.request(parts.method, parts.uri.to_string()).headers(parts.headers).body(body);
    let mut response = call.send().await.map_err(to_acme_error)?;
    let (mut head, ()) = http::Response::new(()).into_parts();
    head.status = response.status();
    head.headers = std::mem::take(response.headers_mut());
    // Cap the delay: the library adds it to the current time, which must not overflow.
    let retry_after =
        head.headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if retry_after.is_some_and(|seconds| seconds > MAX_RETRY_AFTER_SECONDS) {
        head.headers.insert(RETRY_AFTER, MAX_RETRY_AFTER_SECONDS.into());
    }
    let mut body = Vec::new();
    read_response(&mut response, MAX_RESPONSE_BYTES, &mut body)
        .await
        .map_err(|error| Error::Other(Box::new(error)))?;
    Ok(BytesResponse { parts: head, body: Box::new(Bytes::from(body)) })
}
