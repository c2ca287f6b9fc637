//! Reads the state of machines, their servers and their operations, and waits for it to change.

use kit::provider::Power;
use serde_json::{Value, json};

use super::stack::{Process, Stack, UserDataSettings, heartbeat_of};

impl Stack {
    pub async fn fetch_record(&self, process: &Process, machine: &str) -> Value {
        self.get(process, &format!("/vps/{machine}")).await.body
    }

    pub async fn status(&self, process: &Process, machine: &str) -> Value {
        self.fetch_record(process, machine).await["status"].clone()
    }

    /// Returns the power state of the machine's server, if the provider has it.
    pub fn power_state(&self, machine: &str) -> Option<Power> {
        self.provider.server_by_name(&format!("svc-{machine}")).map(|server| server.status)
    }

    pub async fn wait_for_server_deletion(&self, machine: &str) {
        let is_deleted = || async { self.power_state(machine).is_none().then_some(()) };
        self.eventually("the server is deleted", is_deleted).await;
    }

    /// Waits until the operation that removes the machine's server has ended. Returns the operation.
    pub async fn wait_until_removal_ended(&self, process: &Process, machine: &str) -> Value {
        let find_ended = || async {
            let record = self.fetch_record(process, machine).await;
            let operations = record["operations"].as_array()?;
            let removal = operations.iter().find(|operation| operation["kind"] == "remove_server")?;
            (removal["state"] != "running").then(|| removal.clone())
        };
        self.eventually("the removal ends", find_ended).await
    }

    /// Sends heartbeats with this epoch while the machine's server is on, until the machine is running.
    pub async fn send_heartbeats_until_running(
        &self,
        process: &Process,
        host_settings: &UserDataSettings,
        epoch: u64,
    ) {
        let mut body = heartbeat_of(host_settings);
        body["epoch"] = json!(epoch);
        let is_running = || async {
            if self.power_state(&host_settings.machine) == Some(Power::Running) {
                self.send_heartbeat(process, host_settings, &body).await;
            }
            (self.status(process, &host_settings.machine).await == "running").then_some(())
        };
        self.eventually("the machine is running", is_running).await;
    }

    /// Registers the hosts of all running servers, and sends their heartbeats, until the operation has ended or needs a
    /// decision. Returns the operation.
    pub async fn wait_until_ended(&self, process: &Process, operation: &str) -> Value {
        let act_as_hosts = || async {
            for server in self.provider.servers().iter().filter(|server| server.status == Power::Running) {
                let host_settings = UserDataSettings::from_server(server);
                if self.register(process, &host_settings).await.status == 200 {
                    self.send_heartbeat(process, &host_settings, &heartbeat_of(&host_settings)).await;
                }
            }
        };
        self.wait_while_running(process, operation, act_as_hosts).await
    }

    /// Sends heartbeats from the hosts of all running servers, without registering the hosts, until the operation has
    /// ended or needs a decision. Returns the operation.
    pub async fn wait_until_ended_without_registrations(&self, process: &Process, operation: &str) -> Value {
        let send_heartbeats = || async {
            for server in self.provider.servers().iter().filter(|server| server.status == Power::Running) {
                let host_settings = UserDataSettings::from_server(server);
                self.send_heartbeat(process, &host_settings, &heartbeat_of(&host_settings)).await;
            }
        };
        self.wait_while_running(process, operation, send_heartbeats).await
    }

    /// Waits, without requests from hosts, until the operation has ended or needs a decision. Returns the operation.
    pub async fn wait_until_ended_without_hosts(&self, process: &Process, operation: &str) -> Value {
        self.wait_while_running(process, operation, || std::future::ready(())).await
    }

    async fn wait_while_running<F: Future<Output = ()>>(
        &self,
        process: &Process,
        operation: &str,
        mut act_as_hosts: impl FnMut() -> F,
    ) -> Value {
        let path = &format!("/vps/operations/{operation}");
        let check = || {
            let requests = act_as_hosts();
            async move {
                let current = self.get(process, path).await.body;
                if current["state"] != "running" {
                    return Some(current);
                }
                requests.await;
                None
            }
        };
        self.eventually("the operation ends", check).await
    }
}
