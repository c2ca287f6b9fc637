//! The platform's database is restored from an older copy: its open operations have been decided since, as the store
//! shows.

use kit::pg::copy::TablesCopy;
use kit::provider::Power;
use kit::s3::{Fault, Rule};
use reqwest::Method;
use serde_json::{Value, json};
use tokio_postgres::Client;

use super::internal_host::{Host, host};
use super::stack::{Guest, Process, SECRET, Stack, heartbeat_of, provision_body, registration};

const BACKUP: &str = "/_svc/internal/backup";

/// A stack whose database can be reset to a saved copy.
pub(super) struct Restorable {
    pub stack: Stack,
    pub process: Option<Process>,
    client: Client,
    copy: TablesCopy,
    pub settings: Vec<(&'static str, &'static str)>,
}

impl Restorable {
    pub async fn start(settings: &[(&'static str, &'static str)]) -> Self {
        let stack = Stack::start().await;
        let client = stack.database.connect().await.unwrap();
        let copy = TablesCopy::new(&client).await.unwrap();
        let process = Some(stack.start_platform_with(settings));
        Self { stack, process, client, copy, settings: settings.to_vec() }
    }

    pub fn process(&self) -> &Process {
        self.process.as_ref().unwrap()
    }

    pub async fn save(&self) {
        self.copy.save(&self.client).await.unwrap();
    }

    /// Stops the platform, restores the copy and starts the platform with additional settings.
    pub async fn restore(&mut self, settings: &[(&'static str, &'static str)]) {
        if let Some(mut process) = self.process.take() {
            process.kill();
            process.wait_until_killed().await;
        }
        assert!(self.copy.restore(&self.client).await.unwrap());
        let settings = [self.settings.clone(), settings.to_vec()].concat();
        self.process = Some(self.stack.start_platform_with(&settings));
    }

    pub async fn record(&self, machine: &str) -> Value {
        self.stack.get(self.process(), &format!("/vps/{machine}")).await.body
    }

    pub fn power(&self, machine: &str) -> Option<Power> {
        self.stack.provider.server_by_name(&format!("svc-{machine}")).map(|server| server.status)
    }

    pub async fn until_status(&self, machine: &str, status: &str) -> Value {
        let is = || async {
            let found = self.record(machine).await;
            (found["status"] == status && found["retiredAt"].is_null() && found["deletedAt"].is_null())
                .then_some(found)
        };
        self.stack.eventually(status, is).await
    }

    pub async fn abandon(&self, operation: &str) {
        let request = self.stack.request(self.process(), Method::POST, &format!("{operation}/abandon"));
        let abandoned = self.stack.send(request.bearer_auth(SECRET)).await;
        assert_eq!(abandoned.status, 200, "{abandoned:?}");
    }

    /// Waits until a deletion needs a decision because the database is older than the store.
    pub async fn until_asking(&self, operation: &str) {
        let waiting = || async {
            let found = self.stack.get(self.process(), operation).await.body;
            (!found["question"].is_null()).then_some(found)
        };
        let waiting = self.stack.eventually("the deletion waits", waiting).await;
        assert_eq!(waiting["question"]["code"], "database_behind_store", "{waiting}");
    }

    pub async fn until_backup_requested(&self, host: &Host) {
        let is_requested = || async { (host.calls("POST", BACKUP) > 0).then_some(()) };
        self.stack.eventually("the final backup is requested", is_requested).await;
    }

    pub async fn until_fenced_at(&self, epoch: u64) {
        let fenced = || async { (self.stack.pointer("user_1")["fenceEpoch"] == epoch).then_some(()) };
        self.stack.eventually("the fence", fenced).await;
    }

    pub async fn send_heartbeat(&self, guest: &Guest, epoch: u64, more: Value) -> Value {
        let mut beat = heartbeat_of(guest);
        beat["epoch"] = json!(epoch);
        if !more.is_null() {
            beat["registration"] = more;
        }
        self.stack.send_heartbeat(self.process(), guest, &beat).await.body
    }

    /// Sends heartbeats under this epoch until the machine runs.
    pub async fn beat_until_running(&self, guest: &Guest, epoch: u64) {
        let runs = || async {
            self.send_heartbeat(guest, epoch, Value::Null).await;
            (self.stack.status(self.process(), &guest.machine).await == "running").then_some(())
        };
        self.stack.eventually("it runs", runs).await;
    }

    pub async fn until_in_fleet(&self, what: &str) {
        let shown = || async {
            let fleet = self.stack.get(self.process(), "/vps/fleet").await.body.to_string();
            fleet.contains(what).then_some(())
        };
        self.stack.eventually(what, shown).await;
    }
}

pub(super) fn id(response: &Value, name: &str) -> String {
    response[name].as_str().unwrap_or_else(|| panic!("no {name}: {response}")).to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn recovery_abandoned_after_the_copy_changes_nothing() {
    let mut it = Restorable::start(&[("LAST_BACKUP_STALL_SECONDS", "60")]).await;
    let old = host(&it.stack, it.process()).await;
    let machine = old.guest.machine.clone();
    it.stack.snapshot("user_1");
    let recovery = it.stack.post(it.process(), "/vps/recover", &json!({"idpUserId": "user_1"})).await.body;
    it.until_backup_requested(&old).await;
    it.save().await;
    it.abandon(&format!("/vps/operations/{}", id(&recovery, "operationId"))).await;
    it.until_fenced_at(3).await;
    it.until_status(&machine, "running").await;
    it.send_heartbeat(&old.guest, 3, Value::Null).await;

    it.restore(&[]).await;
    // The copy's operation would request a final backup at once.
    old.store_backup(&it.stack, "user_1");
    let back = it.until_status(&machine, "running").await;
    assert_eq!(back["epoch"], 3, "{back}");
    let failed = it.record(&id(&recovery, "machineId")).await;
    assert_eq!(failed["failure"]["cause"], "fenced", "{failed}");
    assert!(failed["failure"]["message"].as_str().unwrap().contains("older than the store"), "{failed}");
    assert_eq!(it.power(&machine), Some(Power::Running));
    for path in ["/shutdown", "/poweroff"] {
        assert_eq!(it.stack.provider.call_count("POST", path), 0, "{path}");
    }
    it.stack.assert_only_server(&machine);
    it.until_in_fleet("database_behind_store").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn registration_of_a_recovery_failed_since_is_refused() {
    let mut it = Restorable::start(&[]).await;
    let old = it.stack.start_machine(it.process(), "user_1").await;
    it.stack.snapshot("user_1");
    let recovery = it.stack.post(it.process(), "/vps/recover", &json!({"idpUserId": "user_1"})).await.body;
    let new = it.stack.wait_for_guest(it.process(), &id(&recovery, "machineId")).await;
    it.save().await;
    let path = format!("/vps/{}/boot-failure", new.machine);
    let report = it.stack.request(it.process(), Method::POST, &path).bearer_auth(&new.registration_token);
    let report = it.stack.send(report.json(&json!({"stage": "restore", "message": "damaged"}))).await;
    assert_eq!(report.status, 202, "{report:?}");
    it.until_fenced_at(3).await;
    it.restore(&[]).await;
    let refused = it.stack.register(it.process(), &new).await;
    assert!(matches!(refused.status, 401 | 409), "{refused:?}");
    it.until_status(&old.machine, "failed").await;
    assert_eq!(it.record(&old.machine).await["failure"]["cause"], "reinstating");
    it.until_fenced_at(3).await;
    it.beat_until_running(&old, 3).await;
}

/// A deletion that was undone after the copy and waits for a decision under the restored copy; returns the path of its operation.
async fn undone_deletion(query: &str) -> (Restorable, Host, String) {
    let mut it = Restorable::start(&[("LAST_BACKUP_STALL_SECONDS", "60")]).await;
    let old = host(&it.stack, it.process()).await;
    let machine = old.guest.machine.clone();
    let deleted = it.stack.delete(it.process(), &format!("/vps/{machine}{query}")).await.body;
    it.until_backup_requested(&old).await;
    it.save().await;
    let undone = it.stack.post(it.process(), &format!("/vps/{machine}/undelete"), &json!({})).await;
    assert_eq!(undone.status, 202, "{undone:?}");
    it.until_fenced_at(2).await;
    it.restore(&[]).await;
    let operation = format!("/vps/operations/{}", id(&deleted, "operationId"));
    it.until_asking(&operation).await;
    (it, old, operation)
}

#[tokio::test(flavor = "multi_thread")]
async fn deletion_undone_after_the_copy_waits_for_operator() {
    let (it, old, operation) = undone_deletion("").await;
    let machine = old.guest.machine.clone();
    assert_eq!(it.power(&machine), Some(Power::Running));
    // A host that the fence in the store names is not reported as superseded.
    assert_eq!(it.send_heartbeat(&old.guest, 2, Value::Null).await["superseded"], false);
    it.abandon(&operation).await;
    it.beat_until_running(&old.guest, 2).await;
}

/// An operator's acceptance from before the copy concerned an earlier state.
#[tokio::test(flavor = "multi_thread")]
async fn deletion_undone_after_the_copy_continues_when_confirmed() {
    let (it, old, operation) = undone_deletion("?acceptLoss=true").await;
    let machine = old.guest.machine.clone();
    // A new check is not a confirmation.
    assert_eq!(it.stack.post(it.process(), &format!("{operation}/continue"), &json!({})).await.status, 200);
    it.until_asking(&operation).await;
    let accepted =
        it.stack.post(it.process(), &format!("{operation}/continue"), &json!({"acceptLoss": true})).await;
    assert_eq!(accepted.status, 200, "{accepted:?}");
    let off = || async {
        old.store_backup(&it.stack, "user_1");
        (it.power(&machine) == Some(Power::Off)).then_some(())
    };
    it.stack.eventually("its server is off", off).await;
    assert_eq!(it.record(&machine).await["epoch"], 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn server_of_a_deletion_undone_after_the_copy_is_kept() {
    let mut it = Restorable::start(&[("DELETE_GRACE_SECONDS", "60")]).await;
    let old = it.stack.start_machine(it.process(), "user_1").await;
    it.stack.snapshot("user_1");
    let deleted = it.stack.delete(it.process(), &format!("/vps/{}", old.machine)).await.body;
    it.stack.wait_until_ended(it.process(), &id(&deleted, "operationId")).await;
    // As after its final backup.
    it.client.execute("UPDATE user_machines SET unsaved_since = NULL", &[]).await.unwrap();
    it.save().await;
    let undone = it.stack.post(it.process(), &format!("/vps/{}/undelete", old.machine), &json!({})).await;
    assert_eq!(undone.status, 202, "{undone:?}");
    it.until_fenced_at(2).await;

    it.restore(&[("DELETE_GRACE_SECONDS", "0")]).await;
    it.until_in_fleet("database_behind_store").await;
    it.until_in_fleet("unsaved_changes").await;
    assert!(it.power(&old.machine).is_some());
    assert_eq!(it.stack.provider.call_count("DELETE", "/servers/"), 0);
    // While the store is unreadable, the host is not reported as superseded.
    it.stack.store.fault(Rule::new(Fault::Status(503)).key("latest").always());
    assert_eq!(it.send_heartbeat(&old, 2, Value::Null).await["superseded"], false);
    it.stack.store.heal();
    let back = it.stack.post(it.process(), &format!("/vps/{}/undelete", old.machine), &json!({})).await;
    assert_eq!((back.status, &back.body["epoch"]), (202, &json!(2)), "{back:?}");
    it.beat_until_running(&old, 2).await;
}

/// The discard was ordered before the machine got its slot back.
#[tokio::test(flavor = "multi_thread")]
async fn discard_from_before_the_copy_must_be_repeated() {
    let mut it = Restorable::start(&[("DELETE_GRACE_SECONDS", "60")]).await;
    let old = it.stack.start_machine(it.process(), "user_1").await;
    it.stack.snapshot("user_1");
    let deleted = it.stack.delete(it.process(), &format!("/vps/{}", old.machine)).await.body;
    it.stack.wait_until_ended(it.process(), &id(&deleted, "operationId")).await;
    it.save().await;
    let undone = it.stack.post(it.process(), &format!("/vps/{}/undelete", old.machine), &json!({})).await;
    assert_eq!(undone.status, 202, "{undone:?}");
    it.until_fenced_at(2).await;
    let ordered = "UPDATE saved.user_machines SET discard_ordered_at = now(), unsaved_since = NULL";
    it.client.execute(ordered, &[]).await.unwrap();

    it.restore(&[]).await;
    it.until_in_fleet("database_behind_store").await;
    it.until_in_fleet("unsaved_changes").await;
    assert!(it.power(&old.machine).is_some());
    let discarded = it
        .stack
        .post(it.process(), &format!("/vps/{}/discard", old.machine), &json!({"acceptLoss": true}))
        .await;
    assert_eq!(discarded.status, 202, "{discarded:?}");
    it.stack.assert_no_server();
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_adopts_the_later_signed_epoch() {
    let mut it = Restorable::start(&[("LAST_BACKUP_STALL_SECONDS", "60")]).await;
    let old = host(&it.stack, it.process()).await;
    it.stack.snapshot("user_1");
    it.save().await;
    let recovery = it.stack.post(it.process(), "/vps/recover", &json!({"idpUserId": "user_1"})).await.body;
    it.until_backup_requested(&old).await;
    it.abandon(&format!("/vps/operations/{}", id(&recovery, "operationId"))).await;
    it.until_fenced_at(3).await;

    it.restore(&[]).await;
    // An invented epoch of a host is not trusted.
    assert_eq!(it.send_heartbeat(&old.guest, 7, Value::Null).await["epoch"], 1);
    it.send_heartbeat(&old.guest, 3, Value::Null).await;
    assert_eq!(it.record(&old.guest.machine).await["epoch"], 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn heartbeat_repeats_a_forgotten_registration() {
    let mut it = Restorable::start(&[]).await;
    let provisioned = it.stack.provision(it.process(), "user_1").await;
    let guest = it.stack.wait_for_guest(it.process(), &id(&provisioned, "machineId")).await;
    it.save().await;
    assert_eq!(it.stack.register(it.process(), &guest).await.status, 200);
    it.restore(&[]).await;
    assert_eq!(it.stack.status(it.process(), &guest.machine).await, "provisioning");
    it.send_heartbeat(&guest, 1, registration(&guest.machine, 1)).await;
    let runs = it.record(&guest.machine).await;
    assert_eq!(runs["status"], "running", "{runs}");
    let operation = it.stack.wait_until_ended(it.process(), &id(&provisioned, "operationId")).await;
    assert_eq!(operation["state"], "succeeded", "{operation}");
}

#[tokio::test(flavor = "multi_thread")]
async fn registration_of_another_machine_is_ignored() {
    let it = Restorable::start(&[("DELETE_GRACE_SECONDS", "0"), ("SERVER_GONE_SILENCE_SECONDS", "1")]).await;
    let provisioned = it.stack.provision(it.process(), "user_1").await;
    let guest = it.stack.wait_for_guest(it.process(), &id(&provisioned, "machineId")).await;
    let other = registration("00000000-0000-7000-8000-000000000000", 1);
    it.send_heartbeat(&guest, 1, other).await;
    assert_eq!(it.record(&guest.machine).await["status"], "provisioning");
    it.stack.delete(it.process(), &format!("/vps/{}", guest.machine)).await;
    it.stack.assert_no_server();
}

/// If it can no longer be registered, its data is not deleted with it.
#[tokio::test(flavor = "multi_thread")]
async fn serving_host_of_a_failed_machine_is_kept() {
    let mut it = Restorable::start(&[("PREDECESSOR_KEEP_SECONDS", "0"), ("DELETE_GRACE_SECONDS", "0")]).await;
    let provisioned = it.stack.provision(it.process(), "user_1").await;
    let guest = it.stack.wait_for_guest(it.process(), &id(&provisioned, "machineId")).await;
    it.client
        .execute("UPDATE user_machines SET status = 'failed', failure_cause = 'operator'", &[])
        .await
        .unwrap();
    it.save().await;
    it.restore(&[]).await;
    it.send_heartbeat(&guest, 1, registration(&guest.machine, 1)).await;
    let response = it.stack.delete(it.process(), &format!("/vps/{}", guest.machine)).await;
    it.stack.wait_until_ended(it.process(), &id(&response.body, "operationId")).await;
    tokio::time::sleep(std::time::Duration::from_secs(4)).await;
    assert!(it.power(&guest.machine).is_some(), "{}", it.stack.log());
    it.until_in_fleet("unsaved_changes").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slot_of_a_forgotten_machine_requires_an_accepted_loss() {
    let mut it = Restorable::start(&[]).await;
    it.stack.start_machine(it.process(), "user_1").await;
    it.stack.snapshot("user_1");
    it.save().await;
    let body = json!({"idpUserId": "user_1"});
    let recovery = it.stack.post(it.process(), "/vps/recover", &body).await.body;
    let forgotten = id(&recovery, "machineId");
    it.stack.wait_until_ended(it.process(), &id(&recovery, "operationId")).await;
    it.restore(&[]).await;
    let refused = it.stack.post(it.process(), "/vps/recover", &body).await;
    refused.assert_problem(409, "invalid_state");
    assert!(refused.body["detail"].as_str().unwrap().contains(&forgotten), "{refused:?}");
    let taken = it
        .stack
        .post(it.process(), "/vps/recover", &json!({"idpUserId": "user_1", "acceptLoss": true}))
        .await;
    assert_eq!((taken.status, &taken.body["epoch"]), (202, &json!(3)), "{taken:?}");
    assert!(it.power(&forgotten).is_some());
    it.until_fenced_at(3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slot_of_a_forgotten_machine_starts_empty_only_on_request() {
    let mut it = Restorable::start(&[]).await;
    it.stack.subscribe(it.process(), "user_1").await;
    it.save().await;
    let forgotten = it.stack.start_machine(it.process(), "user_1").await;
    it.restore(&[]).await;
    let mut body = provision_body("user_1");
    for accepted in [json!(false), json!(true)] {
        body["acceptLoss"] = accepted;
        it.stack.post(it.process(), "/vps/provision", &body).await.assert_problem(409, "invalid_state");
    }
    body["allowEmpty"] = json!(true);
    let provisioned = it.stack.post(it.process(), "/vps/provision", &body).await;
    assert_eq!((provisioned.status, &provisioned.body["epoch"]), (202, &json!(2)), "{provisioned:?}");
    assert!(it.power(&forgotten.machine).is_some());
}

/// The copy still has the deletion, but not the machine that was created after it.
#[tokio::test(flavor = "multi_thread")]
async fn undelete_is_refused_if_a_later_machine_holds_the_slot() {
    let mut it = Restorable::start(&[("DELETE_GRACE_SECONDS", "600")]).await;
    let old = it.stack.start_machine(it.process(), "user_1").await;
    it.stack.snapshot("user_1");
    let deleted = it.stack.delete(it.process(), &format!("/vps/{}", old.machine)).await.body;
    it.stack.wait_until_ended(it.process(), &id(&deleted, "operationId")).await;
    it.save().await;
    let provisioned = it.stack.post(it.process(), "/vps/provision", &provision_body("user_1")).await;
    assert_eq!(provisioned.status, 202, "{provisioned:?}");
    it.until_fenced_at(2).await;
    it.restore(&[]).await;
    let path = format!("/vps/{}/undelete", old.machine);
    let refused = it.stack.post(it.process(), &path, &json!({})).await;
    refused.assert_problem(409, "invalid_state");
    let detail = refused.body["detail"].as_str().unwrap();
    assert!(
        detail.contains(&id(&provisioned.body, "machineId")) && detail.contains("svcctl provision"),
        "{detail}"
    );
    assert!(it.record(&old.machine).await["deletedAt"].is_string());
}

/// The copy still has the machine that was replaced since.
#[tokio::test(flavor = "multi_thread")]
async fn replaced_machine_is_neither_switched_on_nor_resized() {
    let mut it = Restorable::start(&[]).await;
    let old = it.stack.start_machine(it.process(), "user_1").await;
    it.stack.snapshot("user_1");
    it.save().await;
    let recovery = it.stack.post(it.process(), "/vps/recover", &json!({"idpUserId": "user_1"})).await.body;
    it.stack.wait_until_ended(it.process(), &id(&recovery, "operationId")).await;
    assert_eq!(it.power(&old.machine), Some(Power::Off));
    it.restore(&[]).await;
    let path = format!("/vps/{}/power", old.machine);
    let on = it.stack.post(it.process(), &path, &json!({"action": "on"})).await;
    assert_eq!(on.status, 202, "{on:?}");
    let operation = it.stack.wait_until_ended(it.process(), &id(&on.body, "operationId")).await;
    assert_eq!(
        (&operation["state"], &operation["errorCode"]),
        (&json!("failed"), &json!("database_behind_store"))
    );
    assert_eq!(it.power(&old.machine), Some(Power::Off));
    let (path, to) = (format!("/vps/{}/resize", old.machine), json!({"serverType": "cpx32"}));
    let refused = it.stack.post(it.process(), &path, &to).await;
    refused.assert_problem(409, "invalid_state");
    let holder = id(&recovery, "machineId");
    assert!(refused.body["detail"].as_str().unwrap().contains(&holder), "{refused:?}");
}

/// It was parsed as epoch 0, which no machine has.
#[tokio::test(flavor = "multi_thread")]
async fn heartbeat_with_an_impossible_epoch_is_refused() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let guest = stack.start_machine(&process, "user_1").await;
    for epoch in [u64::from(u32::MAX) + 1, u64::from(u32::MAX), 1 << 60] {
        let mut beat = heartbeat_of(&guest);
        beat["epoch"] = json!(epoch);
        stack.send_heartbeat(&process, &guest, &beat).await.assert_problem(400, "invalid_request");
    }
    assert_eq!(stack.send_heartbeat(&process, &guest, &heartbeat_of(&guest)).await.status, 200);
}
