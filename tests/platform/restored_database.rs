//! The platform's database is restored from an older copy: operations that are open in the copy have since ended, or
//! later machines are missing from it. The store records which machine holds a slot.

use kit::pg::copy::DatabaseCopy;
use kit::provider::Power;
use kit::s3::{Fault, FaultRule};
use reqwest::Method;
use serde_json::{Value, json};
use tokio_postgres::Client;

use super::fake_host::{FakeHost, start_host};
use super::stack::{Process, SECRET, Stack, UserDataSettings, heartbeat_of, provision_body, registration};

/// A platform whose database can be reset to a saved copy.
pub(super) struct RestorablePlatform {
    pub stack: Stack,
    pub process: Option<Process>,
    client: Client,
    copy: DatabaseCopy,
    pub settings: Vec<(&'static str, &'static str)>,
}

impl RestorablePlatform {
    pub async fn start(settings: &[(&'static str, &'static str)]) -> Self {
        let stack = Stack::start().await;
        let client = stack.database.connect().await.unwrap();
        let copy = DatabaseCopy::new(&client).await.unwrap();
        let process = Some(stack.start_platform_with(settings));
        Self { stack, process, client, copy, settings: settings.to_vec() }
    }

    pub fn process(&self) -> &Process {
        self.process.as_ref().unwrap()
    }

    pub async fn save(&self) {
        self.copy.save(&self.client).await.unwrap();
    }

    /// Kills the platform process, if it is running.
    pub async fn stop(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill();
            process.wait_until_killed().await;
        }
    }

    /// Stops the platform, restores the copy and starts the platform with additional settings.
    pub async fn restore(&mut self, settings: &[(&'static str, &'static str)]) {
        self.stop().await;
        assert!(self.copy.restore(&self.client).await.unwrap());
        let settings = [self.settings.clone(), settings.to_vec()].concat();
        self.process = Some(self.stack.start_platform_with(&settings));
    }

    pub async fn fetch_record(&self, machine: &str) -> Value {
        self.stack.fetch_record(self.process(), machine).await
    }

    pub fn power_state(&self, machine: &str) -> Option<Power> {
        self.stack.power_state(machine)
    }

    pub async fn wait_for_status(&self, machine: &str, status: &str) -> Value {
        let has_status = || async {
            let record = self.fetch_record(machine).await;
            (record["status"] == status && record["retiredAt"].is_null() && record["deletedAt"].is_null())
                .then_some(record)
        };
        self.stack.eventually(status, has_status).await
    }

    pub async fn abandon(&self, operation_path: &str) {
        let request = self.stack.request(self.process(), Method::POST, &format!("{operation_path}/abandon"));
        let abandoned = self.stack.send(request.bearer_auth(SECRET)).await;
        assert_eq!(abandoned.status, 200, "{abandoned:?}");
    }

    /// Waits until the operation needs a decision, and asserts the code of its question.
    pub async fn wait_for_question(&self, operation_path: &str, code: &str) {
        let is_waiting = || async {
            let current = self.stack.get(self.process(), operation_path).await.body;
            (!current["question"].is_null()).then_some(current)
        };
        let waiting = self.stack.eventually("the operation is waiting", is_waiting).await;
        assert_eq!(waiting["question"]["code"], code, "{waiting}");
    }

    pub async fn wait_for_fence(&self, epoch: u64) {
        let has_fence = || async { (self.stack.pointer("user_1")["fenceEpoch"] == epoch).then_some(()) };
        self.stack.eventually("the fence has the epoch", has_fence).await;
    }

    pub async fn send_heartbeat(
        &self,
        host_settings: &UserDataSettings,
        epoch: u64,
        registration: Value,
    ) -> Value {
        let mut beat = heartbeat_of(host_settings);
        beat["epoch"] = json!(epoch);
        if !registration.is_null() {
            beat["registration"] = registration;
        }
        self.stack.send_heartbeat(self.process(), host_settings, &beat).await.body
    }

    pub async fn send_heartbeats_until_running(&self, host_settings: &UserDataSettings, epoch: u64) {
        self.stack.send_heartbeats_until_running(self.process(), host_settings, epoch).await;
    }

    pub async fn wait_until_fleet_shows(&self, text: &str) {
        let is_shown = || async {
            let fleet = self.stack.get(self.process(), "/vps/fleet").await.body.to_string();
            fleet.contains(text).then_some(())
        };
        self.stack.eventually(text, is_shown).await;
    }
}

pub(super) fn string_field(response: &Value, name: &str) -> String {
    response[name].as_str().unwrap_or_else(|| panic!("no {name}: {response}")).to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn recovery_abandoned_after_the_copy_changes_nothing() {
    let mut platform = RestorablePlatform::start(&[("LAST_BACKUP_STALL_SECONDS", "60")]).await;
    let old = start_host(&platform.stack, platform.process()).await;
    let machine = old.settings.machine.clone();
    platform.stack.store_snapshot("user_1");
    let recovery =
        platform.stack.post(platform.process(), "/vps/recover", &json!({"idpUserId": "user_1"})).await.body;
    old.wait_for_backup_request(&platform.stack).await;
    platform.save().await;
    platform.abandon(&format!("/vps/operations/{}", string_field(&recovery, "operationId"))).await;
    platform.wait_for_fence(3).await;
    platform.wait_for_status(&machine, "running").await;
    platform.send_heartbeat(&old.settings, 3, Value::Null).await;

    platform.restore(&[]).await;
    // With this final backup, the copy's operation would continue and power the server off.
    old.store_backup(&platform.stack, "user_1");
    let record = platform.wait_for_status(&machine, "running").await;
    assert_eq!(record["epoch"], 3, "{record}");
    let failed = platform.fetch_record(&string_field(&recovery, "machineId")).await;
    assert_eq!(failed["failure"]["cause"], "fenced", "{failed}");
    assert!(failed["failure"]["message"].as_str().unwrap().contains("older than the store"), "{failed}");
    assert_eq!(platform.power_state(&machine), Some(Power::Running));
    for path in ["/shutdown", "/poweroff"] {
        assert_eq!(platform.stack.provider.call_count("POST", path), 0, "{path}");
    }
    platform.stack.assert_only_server(&machine);
    platform.wait_until_fleet_shows("database_behind_store").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn registration_for_a_failed_recovery_is_rejected() {
    let mut platform = RestorablePlatform::start(&[]).await;
    let old = platform.stack.start_machine(platform.process(), "user_1").await;
    platform.stack.store_snapshot("user_1");
    let recovery =
        platform.stack.post(platform.process(), "/vps/recover", &json!({"idpUserId": "user_1"})).await.body;
    let new = platform
        .stack
        .wait_for_host_settings(platform.process(), &string_field(&recovery, "machineId"))
        .await;
    platform.save().await;
    platform.stack.report_boot_failure(platform.process(), &new).await;
    platform.wait_for_fence(3).await;
    platform.restore(&[]).await;
    let refused = platform.stack.register(platform.process(), &new).await;
    assert!(matches!(refused.status, 401 | 409), "{refused:?}");
    platform.wait_for_status(&old.machine, "failed").await;
    assert_eq!(platform.fetch_record(&old.machine).await["failure"]["cause"], "reinstating");
    platform.wait_for_fence(3).await;
    platform.send_heartbeats_until_running(&old, 3).await;
}

/// Starts a deletion, saves a copy, undoes the deletion, and restores the copy, in which the deletion is still open.
/// Waits until that deletion needs a decision. Returns the path of its operation as the last value.
async fn start_undone_deletion(query: &str) -> (RestorablePlatform, FakeHost, String) {
    let mut platform = RestorablePlatform::start(&[("LAST_BACKUP_STALL_SECONDS", "60")]).await;
    let old = start_host(&platform.stack, platform.process()).await;
    let machine = old.settings.machine.clone();
    let deleted = platform.stack.delete(platform.process(), &format!("/vps/{machine}{query}")).await.body;
    old.wait_for_backup_request(&platform.stack).await;
    platform.save().await;
    let undone =
        platform.stack.post(platform.process(), &format!("/vps/{machine}/undelete"), &json!({})).await;
    assert_eq!(undone.status, 202, "{undone:?}");
    platform.wait_for_fence(2).await;
    platform.restore(&[]).await;
    let operation_path = format!("/vps/operations/{}", string_field(&deleted, "operationId"));
    platform.wait_for_question(&operation_path, "database_behind_store").await;
    (platform, old, operation_path)
}

#[tokio::test(flavor = "multi_thread")]
async fn deletion_undone_after_the_copy_waits_for_operator() {
    let (platform, old, operation_path) = start_undone_deletion("").await;
    let machine = old.settings.machine.clone();
    assert_eq!(platform.power_state(&machine), Some(Power::Running));
    // A host that the fence in the store names is not reported as superseded.
    assert_eq!(platform.send_heartbeat(&old.settings, 2, Value::Null).await["superseded"], false);
    platform.abandon(&operation_path).await;
    platform.send_heartbeats_until_running(&old.settings, 2).await;
}

/// A loss that was accepted before the copy was saved applies to an earlier state, so it must be accepted again.
#[tokio::test(flavor = "multi_thread")]
async fn deletion_undone_after_the_copy_continues_when_confirmed() {
    let (platform, old, operation_path) = start_undone_deletion("?acceptLoss=true").await;
    let machine = old.settings.machine.clone();
    // Without `acceptLoss`, the operation only repeats the check.
    assert_eq!(
        platform
            .stack
            .post(platform.process(), &format!("{operation_path}/continue"), &json!({}))
            .await
            .status,
        200
    );
    platform.wait_for_question(&operation_path, "database_behind_store").await;
    let accepted = platform
        .stack
        .post(platform.process(), &format!("{operation_path}/continue"), &json!({"acceptLoss": true}))
        .await;
    assert_eq!(accepted.status, 200, "{accepted:?}");
    let is_off = || async {
        old.store_backup(&platform.stack, "user_1");
        (platform.power_state(&machine) == Some(Power::Off)).then_some(())
    };
    platform.stack.eventually("the server is off", is_off).await;
    assert_eq!(platform.fetch_record(&machine).await["epoch"], 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn server_of_a_deletion_undone_after_the_copy_is_kept() {
    let mut platform = RestorablePlatform::start(&[("DELETE_GRACE_SECONDS", "60")]).await;
    let old = platform.stack.start_machine(platform.process(), "user_1").await;
    platform.stack.store_snapshot("user_1");
    let deleted = platform.stack.delete(platform.process(), &format!("/vps/{}", old.machine)).await.body;
    platform.stack.wait_until_ended(platform.process(), &string_field(&deleted, "operationId")).await;
    // The state after a final backup.
    platform.client.execute("UPDATE user_machines SET unsaved_since = NULL", &[]).await.unwrap();
    platform.save().await;
    let undone =
        platform.stack.post(platform.process(), &format!("/vps/{}/undelete", old.machine), &json!({})).await;
    assert_eq!(undone.status, 202, "{undone:?}");
    platform.wait_for_fence(2).await;

    platform.restore(&[("DELETE_GRACE_SECONDS", "0")]).await;
    platform.wait_until_fleet_shows("database_behind_store").await;
    platform.wait_until_fleet_shows("unsaved_changes").await;
    assert!(platform.power_state(&old.machine).is_some());
    assert_eq!(platform.stack.provider.call_count("DELETE", "/servers/"), 0);
    // While the store is unreadable, the host is not reported as superseded.
    platform.stack.store.add_fault(FaultRule::new(Fault::Status(503)).key("latest").always());
    assert_eq!(platform.send_heartbeat(&old, 2, Value::Null).await["superseded"], false);
    platform.stack.store.heal();
    let undeleted =
        platform.stack.post(platform.process(), &format!("/vps/{}/undelete", old.machine), &json!({})).await;
    assert_eq!((undeleted.status, &undeleted.body["epoch"]), (202, &json!(2)), "{undeleted:?}");
    platform.send_heartbeats_until_running(&old, 2).await;
}

/// The discard was requested before the machine got its slot back.
#[tokio::test(flavor = "multi_thread")]
async fn discard_from_before_the_copy_must_be_repeated() {
    let mut platform = RestorablePlatform::start(&[("DELETE_GRACE_SECONDS", "60")]).await;
    let old = platform.stack.start_machine(platform.process(), "user_1").await;
    platform.stack.store_snapshot("user_1");
    let deleted = platform.stack.delete(platform.process(), &format!("/vps/{}", old.machine)).await.body;
    platform.stack.wait_until_ended(platform.process(), &string_field(&deleted, "operationId")).await;
    platform.save().await;
    let undone =
        platform.stack.post(platform.process(), &format!("/vps/{}/undelete", old.machine), &json!({})).await;
    assert_eq!(undone.status, 202, "{undone:?}");
    platform.wait_for_fence(2).await;
    let ordered = "UPDATE saved.user_machines SET discard_ordered_at = now(), unsaved_since = NULL";
    platform.client.execute(ordered, &[]).await.unwrap();

    platform.restore(&[]).await;
    platform.wait_until_fleet_shows("database_behind_store").await;
    platform.wait_until_fleet_shows("unsaved_changes").await;
    // Until the outdated removal has ended, a discard request counts as a repetition of the outdated one.
    let removal = platform.stack.wait_until_removal_ended(platform.process(), &old.machine).await;
    assert_eq!(removal["errorCode"], "database_behind_store", "{removal}");
    assert!(platform.power_state(&old.machine).is_some());
    let discarded = platform
        .stack
        .post(platform.process(), &format!("/vps/{}/discard", old.machine), &json!({"acceptLoss": true}))
        .await;
    assert_eq!(discarded.status, 202, "{discarded:?}");
    platform.stack.assert_no_server();
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_adopts_the_later_signed_epoch() {
    let mut platform = RestorablePlatform::start(&[("LAST_BACKUP_STALL_SECONDS", "60")]).await;
    let old = start_host(&platform.stack, platform.process()).await;
    platform.stack.store_snapshot("user_1");
    platform.save().await;
    let recovery =
        platform.stack.post(platform.process(), "/vps/recover", &json!({"idpUserId": "user_1"})).await.body;
    old.wait_for_backup_request(&platform.stack).await;
    platform.abandon(&format!("/vps/operations/{}", string_field(&recovery, "operationId"))).await;
    platform.wait_for_fence(3).await;

    platform.restore(&[]).await;
    // An epoch that a host invented is not trusted.
    assert_eq!(platform.send_heartbeat(&old.settings, 7, Value::Null).await["epoch"], 1);
    platform.send_heartbeat(&old.settings, 3, Value::Null).await;
    assert_eq!(platform.fetch_record(&old.settings.machine).await["epoch"], 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn heartbeat_restores_a_lost_registration() {
    let mut platform = RestorablePlatform::start(&[]).await;
    let provisioned = platform.stack.provision(platform.process(), "user_1").await;
    let host_settings = platform
        .stack
        .wait_for_host_settings(platform.process(), &string_field(&provisioned, "machineId"))
        .await;
    platform.save().await;
    assert_eq!(platform.stack.register(platform.process(), &host_settings).await.status, 200);
    platform.restore(&[]).await;
    assert_eq!(platform.stack.status(platform.process(), &host_settings.machine).await, "provisioning");
    platform.send_heartbeat(&host_settings, 1, registration(&host_settings.machine, 1)).await;
    let record = platform.fetch_record(&host_settings.machine).await;
    assert_eq!(record["status"], "running", "{record}");
    let operation =
        platform.stack.wait_until_ended(platform.process(), &string_field(&provisioned, "operationId")).await;
    assert_eq!(operation["state"], "succeeded", "{operation}");
}

#[tokio::test(flavor = "multi_thread")]
async fn registration_of_another_machine_is_ignored() {
    let platform =
        RestorablePlatform::start(&[("DELETE_GRACE_SECONDS", "0"), ("SERVER_GONE_SILENCE_SECONDS", "1")])
            .await;
    let provisioned = platform.stack.provision(platform.process(), "user_1").await;
    let host_settings = platform
        .stack
        .wait_for_host_settings(platform.process(), &string_field(&provisioned, "machineId"))
        .await;
    let foreign = registration("00000000-0000-7000-8000-000000000000", 1);
    assert_eq!(platform.send_heartbeat(&host_settings, 1, foreign).await["superseded"], false);
    assert_eq!(platform.fetch_record(&host_settings.machine).await["status"], "provisioning");
    platform.stack.delete(platform.process(), &format!("/vps/{}", host_settings.machine)).await;
    platform.stack.assert_no_server();
}

/// The host can no longer be registered, but its data must not be deleted with its machine.
#[tokio::test(flavor = "multi_thread")]
async fn serving_host_of_a_failed_machine_is_kept() {
    let mut platform =
        RestorablePlatform::start(&[("PREDECESSOR_KEEP_SECONDS", "0"), ("DELETE_GRACE_SECONDS", "0")]).await;
    let provisioned = platform.stack.provision(platform.process(), "user_1").await;
    let host_settings = platform
        .stack
        .wait_for_host_settings(platform.process(), &string_field(&provisioned, "machineId"))
        .await;
    platform
        .client
        .execute("UPDATE user_machines SET status = 'failed', failure_cause = 'operator'", &[])
        .await
        .unwrap();
    platform.save().await;
    platform.restore(&[]).await;
    platform.send_heartbeat(&host_settings, 1, registration(&host_settings.machine, 1)).await;
    let response =
        platform.stack.delete(platform.process(), &format!("/vps/{}", host_settings.machine)).await;
    platform.stack.wait_until_ended(platform.process(), &string_field(&response.body, "operationId")).await;
    tokio::time::sleep(std::time::Duration::from_secs(4)).await;
    assert!(platform.power_state(&host_settings.machine).is_some(), "{}", platform.stack.log());
    platform.wait_until_fleet_shows("unsaved_changes").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slot_of_machine_lost_in_restore_needs_accepted_loss() {
    let mut platform = RestorablePlatform::start(&[]).await;
    platform.stack.start_machine(platform.process(), "user_1").await;
    platform.stack.store_snapshot("user_1");
    platform.save().await;
    let body = json!({"idpUserId": "user_1"});
    let recovery = platform.stack.post(platform.process(), "/vps/recover", &body).await.body;
    let lost_machine = string_field(&recovery, "machineId");
    platform.stack.wait_until_ended(platform.process(), &string_field(&recovery, "operationId")).await;
    platform.restore(&[]).await;
    let refused = platform.stack.post(platform.process(), "/vps/recover", &body).await;
    refused.assert_problem(409, "invalid_state");
    assert!(refused.body["detail"].as_str().unwrap().contains(&lost_machine), "{refused:?}");
    let accepted = platform
        .stack
        .post(platform.process(), "/vps/recover", &json!({"idpUserId": "user_1", "acceptLoss": true}))
        .await;
    assert_eq!((accepted.status, &accepted.body["epoch"]), (202, &json!(3)), "{accepted:?}");
    assert!(platform.power_state(&lost_machine).is_some());
    platform.wait_for_fence(3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slot_of_machine_lost_in_restore_starts_empty_only_on_request() {
    let mut platform = RestorablePlatform::start(&[]).await;
    platform.stack.subscribe(platform.process(), "user_1").await;
    platform.save().await;
    let lost_machine = platform.stack.start_machine(platform.process(), "user_1").await;
    platform.restore(&[]).await;
    let mut body = provision_body("user_1");
    for accepted in [json!(false), json!(true)] {
        body["acceptLoss"] = accepted;
        platform
            .stack
            .post(platform.process(), "/vps/provision", &body)
            .await
            .assert_problem(409, "invalid_state");
    }
    body["allowEmpty"] = json!(true);
    let provisioned = platform.stack.post(platform.process(), "/vps/provision", &body).await;
    assert_eq!((provisioned.status, &provisioned.body["epoch"]), (202, &json!(2)), "{provisioned:?}");
    assert!(platform.power_state(&lost_machine.machine).is_some());
}

/// The copy contains the deletion, but not the machine that was created after the deletion.
#[tokio::test(flavor = "multi_thread")]
async fn undelete_is_refused_if_a_later_machine_holds_the_slot() {
    let mut platform = RestorablePlatform::start(&[("DELETE_GRACE_SECONDS", "600")]).await;
    let old = platform.stack.start_machine(platform.process(), "user_1").await;
    platform.stack.store_snapshot("user_1");
    let deleted = platform.stack.delete(platform.process(), &format!("/vps/{}", old.machine)).await.body;
    platform.stack.wait_until_ended(platform.process(), &string_field(&deleted, "operationId")).await;
    platform.save().await;
    let provisioned =
        platform.stack.post(platform.process(), "/vps/provision", &provision_body("user_1")).await;
    assert_eq!(provisioned.status, 202, "{provisioned:?}");
    platform.wait_for_fence(2).await;
    platform.restore(&[]).await;
    let path = format!("/vps/{}/undelete", old.machine);
    let refused = platform.stack.post(platform.process(), &path, &json!({})).await;
    refused.assert_problem(409, "invalid_state");
    let detail = refused.body["detail"].as_str().unwrap();
    assert!(
        detail.contains(&string_field(&provisioned.body, "machineId")) && detail.contains("svcctl provision"),
        "{detail}"
    );
    assert!(platform.fetch_record(&old.machine).await["deletedAt"].is_string());
}

/// In the copy, the machine has not been replaced yet.
#[tokio::test(flavor = "multi_thread")]
async fn replaced_machine_is_neither_powered_on_nor_resized() {
    let mut platform = RestorablePlatform::start(&[]).await;
    let old = platform.stack.start_machine(platform.process(), "user_1").await;
    platform.stack.store_snapshot("user_1");
    platform.save().await;
    let recovery =
        platform.stack.post(platform.process(), "/vps/recover", &json!({"idpUserId": "user_1"})).await.body;
    platform.stack.wait_until_ended(platform.process(), &string_field(&recovery, "operationId")).await;
    assert_eq!(platform.power_state(&old.machine), Some(Power::Off));
    platform.restore(&[]).await;
    let path = format!("/vps/{}/power", old.machine);
    let accepted = platform.stack.post(platform.process(), &path, &json!({"action": "on"})).await;
    assert_eq!(accepted.status, 202, "{accepted:?}");
    let operation = platform
        .stack
        .wait_until_ended(platform.process(), &string_field(&accepted.body, "operationId"))
        .await;
    assert_eq!(
        (&operation["state"], &operation["errorCode"]),
        (&json!("failed"), &json!("database_behind_store"))
    );
    assert_eq!(platform.power_state(&old.machine), Some(Power::Off));
    let (path, body) = (format!("/vps/{}/resize", old.machine), json!({"serverType": "cpx32"}));
    let refused = platform.stack.post(platform.process(), &path, &body).await;
    refused.assert_problem(409, "invalid_state");
    let holder = string_field(&recovery, "machineId");
    assert!(refused.body["detail"].as_str().unwrap().contains(&holder), "{refused:?}");
}

/// An earlier release parsed an epoch above `u32::MAX` as 0, which no machine has.
#[tokio::test(flavor = "multi_thread")]
async fn heartbeat_with_an_impossible_epoch_is_rejected() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    for epoch in [u64::from(u32::MAX) + 1, u64::from(u32::MAX), 1 << 60] {
        let mut beat = heartbeat_of(&host_settings);
        beat["epoch"] = json!(epoch);
        stack.send_heartbeat(&process, &host_settings, &beat).await.assert_problem(400, "invalid_request");
    }
    assert_eq!(
        stack.send_heartbeat(&process, &host_settings, &heartbeat_of(&host_settings)).await.status,
        200
    );
}
