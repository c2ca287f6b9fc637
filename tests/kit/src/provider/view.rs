//! The servers as tests see them, and operations that bypass the API.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::Output;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use super::cloud::Cloud;
use super::host::BootState;
use super::inventory::{Power, ServerRecord};

/// A server at the provider.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServerView {
    pub id: i64,
    pub name: String,
    pub status: Power,
    pub server_type: String,
    pub disk_gb: u32,
    pub labels: BTreeMap<String, String>,
    pub ipv4: Ipv4Addr,
    pub image: String,
    pub location: String,
    pub user_data: String,
}

/// A host that consists of processes, whether or not the provider lists it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HostView {
    pub name: String,
    pub ipv4: Ipv4Addr,
    pub disk: PathBuf,
    /// Whether the provider lists its server.
    pub listed: bool,
    pub boot: BootState,
}

impl Cloud {
    pub(super) fn server_views(&self) -> Vec<ServerView> {
        let inventory = self.inventory();
        let view = |record: &ServerRecord| ServerView {
            id: record.id,
            name: record.name.clone(),
            status: record.power,
            server_type: record.server_type.name.to_owned(),
            disk_gb: record.disk_gb,
            labels: record.labels.clone(),
            ipv4: record.ipv4,
            image: record.image.name.to_owned(),
            location: record.location.name.to_owned(),
            user_data: record.user_data.clone(),
        };
        inventory.servers.values().map(view).collect()
    }

    pub(super) async fn kill_server(&self, name: &str) -> Result<()> {
        let id = self.find_id(name)?;
        self.guests.cut_power(name).await;
        self.set_power(id, Power::Off);
        Ok(())
    }

    pub(super) fn power_on(&self, name: &str) -> Result<()> {
        self.boot(self.find_id(name)?);
        Ok(())
    }

    pub(super) async fn lose_server(&self, name: &str) -> Result<()> {
        let id = self.find_id(name)?;
        self.inventory().remove(id);
        self.guests.cut_power(name).await;
        Ok(())
    }

    pub(super) fn set_obeys_shutdown(&self, name: &str, obeys: bool) -> Result<()> {
        let id = self.find_id(name)?;
        if let Some(record) = self.inventory().servers.get_mut(&id) {
            record.obeys_shutdown = obeys;
        }
        Ok(())
    }

    pub(super) fn host_views(&self) -> Result<Vec<HostView>> {
        let hosts = self.guests.hosts()?.all();
        let view = |host: Arc<super::host::ProcessHost>| HostView {
            listed: self.find_id(&host.name).is_ok(),
            name: host.name.clone(),
            ipv4: host.ipv4,
            disk: host.disk(),
            boot: host.boot_state(),
        };
        Ok(hosts.into_iter().map(view).collect())
    }

    pub(super) fn start_from_disk(&self, name: &str) -> Result<()> {
        let host = self.find_unlisted(name)?;
        ensure!(host.boot_state() == BootState::Off, "{name} is on");
        host.boot();
        Ok(())
    }

    pub(super) async fn stop_unlisted(&self, name: &str) -> Result<()> {
        self.find_unlisted(name)?.cut_power().await;
        Ok(())
    }

    pub(super) async fn start_database_only(&self, name: &str) -> Result<String> {
        let host = self.guests.hosts()?.host(name)?;
        crate::runtime::handle().spawn(async move { host.start_database_only().await }).await?
    }

    pub(super) async fn run_unit(
        &self,
        name: &str,
        unit: &str,
        args: &[String],
        env: &[(String, String)],
    ) -> Result<Output> {
        let host = self.guests.hosts()?.host(name)?;
        let (unit, args, env) = (unit.to_owned(), args.to_vec(), env.to_vec());
        crate::runtime::handle().spawn(async move { host.run_unit(&unit, &args, &env).await }).await?
    }

    /// Finds a host that the provider does not list. Only the test controls its power.
    fn find_unlisted(&self, name: &str) -> Result<Arc<super::host::ProcessHost>> {
        let host = self.guests.hosts()?.host(name)?;
        ensure!(self.find_id(name).is_err(), "the provider lists {name}: use its API");
        Ok(host)
    }

    fn find_id(&self, name: &str) -> Result<i64> {
        let inventory = self.inventory();
        let record = inventory.servers.values().find(|record| record.name == name);
        record.map(|record| record.id).with_context(|| format!("the provider has no server {name}"))
    }
}
