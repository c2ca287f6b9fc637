//! The adapter for the Hetzner Cloud API v1 (<https://docs.hetzner.cloud>): maps the methods of [`Provider`] to
//! requests.
//!
//! The adapter owns the wire format, timeouts, retries and the rate budget. It stores no provider data.

mod budget;
mod call;
mod pricing;
mod wire;

use std::sync::Arc;

use async_trait::async_trait;
use http::HeaderValue;
use secrecy::{ExposeSecret, SecretString};
use serde::Serialize;
use url::Url;

use self::budget::Budget;
pub use self::call::CallLimits;
use self::call::{Call, Connection, Idempotence};
use self::pricing::PricingResponse;
use self::wire::{
    ActionResponse, ChangeTypeRequest, CreateServerRequest, CreateServerResponse, LocationsResponse,
    ServerCountResponse, ServerResponse, ServerTypesResponse, ServersResponse,
};
use super::{
    Action, ActionId, Cause, CreatedServer, DeleteOutcome, ErrorKind, Provider, ProviderError, RateBudget,
    Server, ServerId, ServerOrder, ServerPrices, ServerTypeInfo,
};
use svc_machine::name::{Location, ServerType};

/// The provider's maximum page size.
const PER_PAGE: &str = "50";
/// Maximum number of pages to read. Only a broken provider returns more: a project cannot have 50,000 servers.
const MAX_PAGES: u32 = 1000;

/// The API token contains a character that is not allowed in a header.
#[derive(Debug, thiserror::Error)]
#[error("the provider's API token contains a character that is not allowed in an HTTP header")]
pub struct InvalidToken;

/// The adapter for the Hetzner Cloud API. Clones share the rate budget.
#[derive(Clone)]
pub struct Hetzner {
    connection: Connection,
}

impl Hetzner {
    /// Creates an adapter with a separate rate budget. `base` is the API's root, such as
    /// `https://api.hetzner.cloud/v1`.
    pub fn new(client: reqwest::Client, base: Url, token: &SecretString) -> Result<Self, InvalidToken> {
        Self::with_limits(client, base, token, CallLimits::default())
    }

    /// Creates an adapter that shares its rate limit with all users of this rate budget.
    pub fn with_rate_budget(
        client: reqwest::Client,
        base: Url,
        token: &SecretString,
        rate_budget: Arc<dyn RateBudget>,
    ) -> Result<Self, InvalidToken> {
        Self::build(client, base, token, CallLimits::default(), Some(rate_budget))
    }

    /// Creates an adapter with custom limits, and without a shared rate budget.
    pub fn with_limits(
        client: reqwest::Client,
        base: Url,
        token: &SecretString,
        limits: CallLimits,
    ) -> Result<Self, InvalidToken> {
        Self::build(client, base, token, limits, None)
    }

    fn build(
        client: reqwest::Client,
        base: Url,
        token: &SecretString,
        limits: CallLimits,
        rate_budget: Option<Arc<dyn RateBudget>>,
    ) -> Result<Self, InvalidToken> {
        let mut authorization =
            HeaderValue::from_str(&format!("Bearer {}", token.expose_secret())).map_err(|_| InvalidToken)?;
        authorization.set_sensitive(true);
        let budget = Budget::new(limits.max_rate_wait, rate_budget);
        Ok(Self { connection: Connection { client, base, authorization, budget, limits } })
    }

    async fn list_servers(
        &self,
        name: &'static str,
        filter: (&str, &str),
    ) -> Result<Vec<Server>, ProviderError> {
        let mut servers = Vec::new();
        let mut next = Some(1);
        while let Some(page) = next.filter(|page| *page <= MAX_PAGES) {
            let page = page.to_string();
            let query = [filter, ("page", page.as_str()), ("per_page", PER_PAGE)];
            let response: ServersResponse =
                self.connection.request_json(Call::get(name, "/servers", &query)).await?;
            servers.extend(response.servers.into_iter().map(Server::from));
            next = response.meta.pagination.next_page;
        }
        Ok(servers)
    }

    async fn start_action(
        &self,
        name: &'static str,
        id: ServerId,
        body: &impl Serialize,
        idempotence: Idempotence,
    ) -> Result<Action, ProviderError> {
        let path = format!("/servers/{id}/actions/{name}");
        let response: ActionResponse =
            self.connection.request_json(Call::post(name, &path, encode_json(body), idempotence)).await?;
        Ok(response.action.into())
    }
}

#[async_trait]
impl Provider for Hetzner {
    async fn create(&self, order: &ServerOrder) -> Result<CreatedServer, ProviderError> {
        let body = encode_json(&CreateServerRequest::new(order, order.user_data.expose_secret()));
        let response: CreateServerResponse = self
            .connection
            .request_json(Call::post("create server", "/servers", body, Idempotence::NotIdempotent))
            .await?;
        Ok(response.into())
    }

    async fn find(&self, name: &str) -> Result<Option<Server>, ProviderError> {
        let servers = self.list_servers("find server", ("name", name)).await?;
        Ok(servers.into_iter().find(|server| server.name == name))
    }

    async fn list_by_label(&self, selector: &str) -> Result<Vec<Server>, ProviderError> {
        self.list_servers("list servers", ("label_selector", selector)).await
    }

    async fn get(&self, id: ServerId) -> Result<Option<Server>, ProviderError> {
        let response =
            self.connection.request_json(Call::get("get server", &format!("/servers/{id}"), &[])).await;
        Ok(none_if_not_found(response)?.map(|response: ServerResponse| response.server.into()))
    }

    async fn delete(&self, id: ServerId) -> Result<DeleteOutcome, ProviderError> {
        let response =
            self.connection.request_json(Call::delete("delete server", &format!("/servers/{id}"))).await;
        Ok(match none_if_not_found::<ActionResponse>(response)? {
            Some(_) => DeleteOutcome::Done,
            None => DeleteOutcome::WasAbsent,
        })
    }

    async fn get_action(&self, id: ActionId) -> Result<Action, ProviderError> {
        let response: ActionResponse =
            self.connection.request_json(Call::get("get action", &format!("/actions/{id}"), &[])).await?;
        Ok(response.action.into())
    }

    async fn power_on(&self, id: ServerId) -> Result<Action, ProviderError> {
        self.start_action("poweron", id, &EmptyBody {}, Idempotence::Idempotent).await
    }

    async fn power_off(&self, id: ServerId) -> Result<Action, ProviderError> {
        self.start_action("poweroff", id, &EmptyBody {}, Idempotence::Idempotent).await
    }

    async fn shutdown(&self, id: ServerId) -> Result<Action, ProviderError> {
        self.start_action("shutdown", id, &EmptyBody {}, Idempotence::Idempotent).await
    }

    async fn reboot(&self, id: ServerId) -> Result<Action, ProviderError> {
        self.start_action("reboot", id, &EmptyBody {}, Idempotence::NotIdempotent).await
    }

    async fn change_type(&self, id: ServerId, to: &ServerType) -> Result<Action, ProviderError> {
        self.start_action("change_type", id, &ChangeTypeRequest::new(to), Idempotence::NotIdempotent).await
    }

    async fn has_location(&self, name: &Location) -> Result<bool, ProviderError> {
        let query = [("name", name.as_str())];
        let response: LocationsResponse =
            self.connection.request_json(Call::get("get location", "/locations", &query)).await?;
        Ok(response.locations.iter().any(|location| location.name == name.as_str()))
    }

    async fn get_server_type(&self, name: &ServerType) -> Result<Option<ServerTypeInfo>, ProviderError> {
        let query = [("name", name.as_str())];
        let response: ServerTypesResponse =
            self.connection.request_json(Call::get("get server type", "/server_types", &query)).await?;
        Ok(response.server_types.into_iter().map(ServerTypeInfo::from).find(|info| info.name == *name))
    }

    async fn get_prices(&self, name: &ServerType) -> Result<ServerPrices, ProviderError> {
        let call = "get prices";
        let response: PricingResponse =
            self.connection.request_json(Call::get(call, "/pricing", &[])).await?;
        response.into_prices(name).map_err(|source| {
            ProviderError::new(call, ErrorKind::Transient, Cause::InvalidResponse { status: 200, source })
        })
    }

    async fn count_servers(&self) -> Result<u64, ProviderError> {
        let query = [("page", "1"), ("per_page", "1")];
        let response: ServerCountResponse =
            self.connection.request_json(Call::get("count servers", "/servers", &query)).await?;
        Ok(response.meta.pagination.total_entries)
    }
}

#[derive(Serialize)]
struct EmptyBody {}

fn encode_json(body: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(body).expect("strings, numbers and maps with string keys can be serialized")
}

fn none_if_not_found<A>(response: Result<A, ProviderError>) -> Result<Option<A>, ProviderError> {
    match response {
        Ok(response) => Ok(Some(response)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
