//! The provider connection of one process, which may be killed before or after each call.

use std::sync::Arc;

use async_trait::async_trait;
use svc::machine::name::{Location, ServerType};
use svc::provider::{
    Action, ActionId, CreatedServer, DeleteOutcome, Provider, ProviderError, Server, ServerId, ServerOrder,
    ServerPrices, ServerTypeInfo,
};

use super::kill_switch::KillSwitch;
use super::plan::KillPoint;

pub struct ProcessProvider {
    pub provider: Arc<dyn Provider>,
    pub switch: Arc<KillSwitch>,
}

impl ProcessProvider {
    async fn call<T>(&self, exchange: impl Future<Output = T>) -> T {
        self.switch.reach(KillPoint::BeforeProvider).await;
        let response = exchange.await;
        self.switch.reach(KillPoint::AfterProvider).await;
        response
    }
}

#[async_trait]
impl Provider for ProcessProvider {
    async fn create(&self, order: &ServerOrder) -> Result<CreatedServer, ProviderError> {
        self.call(self.provider.create(order)).await
    }

    async fn find(&self, name: &str) -> Result<Option<Server>, ProviderError> {
        self.call(self.provider.find(name)).await
    }

    async fn list_by_label(&self, selector: &str) -> Result<Vec<Server>, ProviderError> {
        self.call(self.provider.list_by_label(selector)).await
    }

    async fn get(&self, id: ServerId) -> Result<Option<Server>, ProviderError> {
        self.call(self.provider.get(id)).await
    }

    async fn delete(&self, id: ServerId) -> Result<DeleteOutcome, ProviderError> {
        self.call(self.provider.delete(id)).await
    }

    async fn get_action(&self, id: ActionId) -> Result<Action, ProviderError> {
        self.call(self.provider.get_action(id)).await
    }

    async fn power_on(&self, id: ServerId) -> Result<Action, ProviderError> {
        self.call(self.provider.power_on(id)).await
    }

    async fn power_off(&self, id: ServerId) -> Result<Action, ProviderError> {
        self.call(self.provider.power_off(id)).await
    }

    async fn shutdown(&self, id: ServerId) -> Result<Action, ProviderError> {
        self.call(self.provider.shutdown(id)).await
    }

    async fn reboot(&self, id: ServerId) -> Result<Action, ProviderError> {
        self.call(self.provider.reboot(id)).await
    }

    async fn change_type(&self, id: ServerId, to: &ServerType) -> Result<Action, ProviderError> {
        self.call(self.provider.change_type(id, to)).await
    }

    async fn has_location(&self, name: &Location) -> Result<bool, ProviderError> {
        self.call(self.provider.has_location(name)).await
    }

    async fn get_server_type(&self, name: &ServerType) -> Result<Option<ServerTypeInfo>, ProviderError> {
        self.call(self.provider.get_server_type(name)).await
    }

    async fn get_prices(&self, name: &ServerType) -> Result<ServerPrices, ProviderError> {
        self.call(self.provider.get_prices(name)).await
    }

    async fn count_servers(&self) -> Result<u64, ProviderError> {
        self.call(self.provider.count_servers()).await
    }
}
