//! A server as a test sees it, and what a test does to it behind the API's back.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::book::Power;
use super::cloud::Cloud;

/// A server that the provider has.
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

impl Cloud {
    pub(super) fn views(&self) -> Vec<ServerView> {
        let book = self.book();
        let view = |record: &super::book::Record| ServerView {
            id: record.id,
            name: record.name.clone(),
            status: record.power,
            server_type: record.server_type.name.to_owned(),
            disk_gb: record.disk_gb,
            labels: record.labels.clone(),
            ipv4: record.ipv4,
            image: record.image.clone(),
            location: record.location.clone(),
            user_data: record.user_data.clone(),
        };
        book.servers.values().map(view).collect()
    }

    pub(super) async fn kill(&self, name: &str) -> Result<()> {
        let id = self.id_of(name)?;
        self.guests.cut(name).await;
        self.set_power(id, Power::Off);
        Ok(())
    }

    pub(super) async fn vanish(&self, name: &str) -> Result<()> {
        let id = self.id_of(name)?;
        self.book().remove(id);
        self.guests.cut(name).await;
        Ok(())
    }

    fn id_of(&self, name: &str) -> Result<i64> {
        let book = self.book();
        let record = book.servers.values().find(|record| record.name == name);
        record.map(|record| record.id).with_context(|| format!("the provider has no server {name}"))
    }
}
