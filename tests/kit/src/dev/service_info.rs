//! `dev.json`: addresses and credentials of all services, for programs.

use std::process;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::provider::Simulator;
use crate::scenario::first_machine::MachineRecord;
use crate::scenario::slot::BUCKET;
use crate::scenario::stack::{HANDLE, Stack, USER};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ServiceInfo {
    pub(crate) platform_url: String,
    /// A request to the router has this or `code_host` in its `Host` header.
    pub(crate) app_host: String,
    pub(crate) code_host: String,
    pub(crate) router_url: String,
    pub(crate) operator_token: String,
    pub(crate) idp: IdentityProvider,
    pub(crate) s3: Store,
    /// The provider's API; the simulator's control API is at `/_sim`.
    pub(crate) provider_url: String,
    pub(crate) provider_token: String,
    pub(crate) platform_database_url: String,
    pub(crate) owner: Owner,
    /// The directory with the disks and logs.
    pub(crate) dir: String,
    pub(crate) pid: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct IdentityProvider {
    pub(crate) issuer: String,
    /// The endpoint that returns a session JWT as plain text. Parameters: `sub=<user>`, `ttl=<seconds>` (default 300).
    pub(crate) mint_url: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Store {
    pub(crate) endpoint: String,
    pub(crate) access_key: String,
    pub(crate) secret_key: String,
    pub(crate) bucket: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Owner {
    pub(crate) idp_user_id: String,
    pub(crate) handle: String,
    pub(crate) machine_id: String,
    pub(crate) database_url: String,
    /// The owner's files on the machine's disk.
    pub(crate) home: String,
}

impl ServiceInfo {
    pub(crate) fn collect(stack: &Stack, machine: &MachineRecord) -> Result<Self> {
        let issuer = stack.issuer();
        Ok(Self {
            platform_url: stack.api.clone(),
            app_host: stack.transport.app_host().to_owned(),
            code_host: stack.transport.code_host().to_owned(),
            router_url: stack.router_url(),
            operator_token: stack.secret.clone(),
            idp: IdentityProvider { mint_url: format!("{issuer}/mint"), issuer },
            s3: Store {
                endpoint: stack.store.endpoint(),
                access_key: stack.store.access_key().to_owned(),
                secret_key: stack.store.secret_key().to_owned(),
                bucket: BUCKET.to_owned(),
            },
            provider_url: stack.provider.base_url(),
            provider_token: stack.provider.token().to_owned(),
            platform_database_url: stack.platform_database_url(),
            owner: Owner {
                idp_user_id: USER.to_owned(),
                handle: HANDLE.to_owned(),
                machine_id: machine.id.clone(),
                database_url: database_url(&stack.provider, machine)?,
                home: home(&stack.provider, machine)?,
            },
            dir: stack.dir.display().to_string(),
            pid: process::id(),
        })
    }
}

fn home(provider: &Simulator, machine: &MachineRecord) -> Result<String> {
    Ok(provider.disk(&machine.server)?.join("home/svc/home").display().to_string())
}

/// Returns the database URL that the machine's first boot wrote.
fn database_url(provider: &Simulator, machine: &MachineRecord) -> Result<String> {
    let env = provider.disk(&machine.server)?.join("opt/svc/env/host.env");
    let text = std::fs::read_to_string(&env).with_context(|| format!("cannot read {}", env.display()))?;
    let url = text.lines().find_map(|line| line.strip_prefix("DATABASE_URL="));
    Ok(url.context("no DATABASE_URL in host.env")?.trim_matches('"').to_owned())
}
