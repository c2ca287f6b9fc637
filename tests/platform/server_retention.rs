//! For every combination of the retention rule's inputs, the displayed time and the actual deletion of a server match
//! this test's own definition of the rule.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use jiff::Timestamp;
use kit::pg::test_database_from;
use svc::machine::name::{IdpUserId, Slot};
use svc::platform::db::Db;
use svc::platform::db::kept_servers::{self, ServerRetention};
use uuid::Uuid;

const RETENTION: Duration = Duration::from_secs(600);
/// A time longer ago than the retention period.
const OLD: &str = "now() - interval '1200 seconds'";
/// A time within the retention period.
const RECENT: &str = "now() - interval '10 seconds'";
const NULL: &str = "NULL";

/// When a server's retention ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum RetentionEnd {
    Past,
    Future,
    Never,
}

/// How the machine left its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Departure {
    Replaced,
    Deleted,
    ReplacedThenDeleted,
}

/// A later machine in the slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LaterMachine {
    Absent,
    Unregistered,
    Unproven,
    Proven {
        is_old: bool,
    },
    /// Proven long ago and deleted; its server still exists.
    DeletedServerRemains,
    DeletedServerDeleted {
        is_old: bool,
    },
    /// Proven long ago; the provider has lost its server.
    ServerLost,
    /// Proven long ago; the provider has lost its server, and the machine has been deleted since.
    ServerLostThenDeleted {
        is_old: bool,
    },
    /// Replaced in turn; its server has been deleted.
    ReplacedServerDeleted,
}

const LATER_MACHINES: [LaterMachine; 12] = [
    LaterMachine::Absent,
    LaterMachine::Unregistered,
    LaterMachine::Unproven,
    LaterMachine::Proven { is_old: true },
    LaterMachine::Proven { is_old: false },
    LaterMachine::DeletedServerRemains,
    LaterMachine::DeletedServerDeleted { is_old: true },
    LaterMachine::DeletedServerDeleted { is_old: false },
    LaterMachine::ServerLost,
    LaterMachine::ServerLostThenDeleted { is_old: true },
    LaterMachine::ServerLostThenDeleted { is_old: false },
    LaterMachine::ReplacedServerDeleted,
];

#[derive(Debug, Clone, Copy)]
struct Case {
    departure: Departure,
    is_departure_old: bool,
    is_registered: bool,
    is_unsaved: bool,
    is_discard_requested: bool,
    is_removal_abandoned: bool,
    has_running_operation: bool,
    later: LaterMachine,
}

impl Case {
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for departure in [Departure::Replaced, Departure::Deleted, Departure::ReplacedThenDeleted] {
            for later in LATER_MACHINES {
                for bits in 0..64_u32 {
                    let bit = |n: u32| bits & (1 << n) != 0;
                    all.push(Self {
                        departure,
                        is_departure_old: bit(0),
                        is_registered: bit(1),
                        is_unsaved: bit(2),
                        is_discard_requested: bit(3),
                        is_removal_abandoned: bit(4),
                        has_running_operation: bit(5),
                        later,
                    });
                }
            }
        }
        all
    }

    fn expected(&self) -> RetentionEnd {
        let retention_end = |is_old: bool| if is_old { RetentionEnd::Past } else { RetentionEnd::Future };
        if self.is_removal_abandoned {
            return RetentionEnd::Never;
        }
        if self.is_discard_requested {
            return RetentionEnd::Past;
        }
        if self.is_unsaved {
            return RetentionEnd::Never;
        }
        let unregistered =
            if self.is_registered { RetentionEnd::Never } else { retention_end(self.is_departure_old) };
        let departure = match (self.departure, self.later) {
            (Departure::Deleted | Departure::ReplacedThenDeleted, _) => retention_end(self.is_departure_old),
            (
                Departure::Replaced,
                LaterMachine::Proven { is_old }
                | LaterMachine::DeletedServerDeleted { is_old }
                | LaterMachine::ServerLostThenDeleted { is_old },
            ) => retention_end(is_old),
            (Departure::Replaced, LaterMachine::DeletedServerRemains) => RetentionEnd::Past,
            (
                Departure::Replaced,
                LaterMachine::Absent
                | LaterMachine::Unregistered
                | LaterMachine::Unproven
                | LaterMachine::ServerLost
                | LaterMachine::ReplacedServerDeleted,
            ) => RetentionEnd::Never,
        };
        unregistered.min(departure)
    }

    fn departed_at(&self) -> &'static str {
        if self.is_departure_old { OLD } else { RECENT }
    }
}

/// The varying columns of a row, as SQL.
struct Columns {
    epoch: u32,
    registered: &'static str,
    retired: &'static str,
    deleted: &'static str,
    server_deleted: &'static str,
    proven: &'static str,
    unsaved: &'static str,
    discard: &'static str,
    abandoned: &'static str,
    failure: &'static str,
}

impl Columns {
    fn from_case(case: &Case) -> Self {
        let time_if = |is_set: bool, time: &'static str| if is_set { time } else { NULL };
        Self {
            epoch: 1,
            registered: time_if(case.is_registered, OLD),
            retired: time_if(case.departure != Departure::Deleted, case.departed_at()),
            deleted: time_if(case.departure != Departure::Replaced, case.departed_at()),
            server_deleted: NULL,
            proven: time_if(case.is_registered, OLD),
            unsaved: time_if(case.is_unsaved, OLD),
            discard: time_if(case.is_discard_requested, RECENT),
            abandoned: time_if(case.is_removal_abandoned, RECENT),
            failure: NULL,
        }
    }

    fn from_later(later: LaterMachine) -> Option<Self> {
        let running = Self {
            epoch: 2,
            registered: OLD,
            retired: NULL,
            deleted: NULL,
            server_deleted: NULL,
            proven: OLD,
            unsaved: NULL,
            discard: NULL,
            abandoned: NULL,
            failure: NULL,
        };
        let age = |is_old: bool| if is_old { OLD } else { RECENT };
        Some(match later {
            LaterMachine::Absent => return None,
            LaterMachine::Unregistered => Self { registered: NULL, proven: NULL, ..running },
            LaterMachine::Unproven => Self { proven: NULL, ..running },
            LaterMachine::Proven { is_old } => Self { proven: age(is_old), ..running },
            LaterMachine::DeletedServerRemains => Self { deleted: OLD, ..running },
            LaterMachine::DeletedServerDeleted { is_old } => {
                Self { deleted: OLD, server_deleted: age(is_old), ..running }
            }
            LaterMachine::ServerLost => Self { failure: "'server_gone'", ..running },
            LaterMachine::ServerLostThenDeleted { is_old } => {
                Self { failure: "'server_gone'", deleted: age(is_old), ..running }
            }
            LaterMachine::ReplacedServerDeleted => Self { retired: OLD, server_deleted: OLD, ..running },
        })
    }

    fn insert_sql(&self, id: Uuid, slot: &str) -> String {
        let Self { epoch, registered, retired, deleted, server_deleted, proven, unsaved, .. } = self;
        let Self { discard, abandoned, failure, .. } = self;
        // A replaced machine's row contains its successor's id; the value does not matter here.
        let replaced_by = if *retired == NULL { NULL.to_owned() } else { format!("'{id}'") };
        format!(
            "INSERT INTO user_machines (machine_id, idp_user_id, slot, handle, kind, status, epoch, restore_mode, \
             server_type, location, image_version, bundle_sha256, provider_server_id, https_port, \
             registration_token_hash, upgrade_token_hash, replaced_by, registered_at, retired_at, deleted_at, \
             server_deleted_at, proven_at, unsaved_since, discard_ordered_at, removal_abandoned_at, failure_cause) VALUES \
             ('{id}', 'user_1', '{slot}', 'ada', 'customer', 'running', {epoch}, 'empty', 'cpx22', 'nbg1', 'v1', '', 1, \
             443, '', '', {replaced_by}, {registered}, {retired}, {deleted}, {server_deleted}, {proven}, {unsaved}, \
             {discard}, {abandoned}, {failure});"
        )
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn displayed_time_and_deletion_follow_the_same_rule() {
    svc::http::tls::install_provider();
    let database =
        test_database_from(
            "platform",
            |url| async move { svc::platform::db::migrate::run(&url.parse()?).await },
        );
    let database = database.await.unwrap();
    let client = database.connect().await.unwrap();
    client.execute("INSERT INTO handles (handle, idp_user_id) VALUES ('ada', 'user_1')", &[]).await.unwrap();
    let (cases, mut case_indexes) = (Case::all(), HashMap::new());
    let mut sql = String::new();
    for (n, case) in cases.iter().enumerate() {
        let (id, slot) = (Uuid::now_v7(), format!("s{n}"));
        sql.push_str(&Columns::from_case(case).insert_sql(id, &slot));
        if let Some(later) = Columns::from_later(case.later) {
            sql.push_str(&later.insert_sql(Uuid::now_v7(), &slot));
        }
        if case.has_running_operation {
            sql.push_str(&format!(
                "INSERT INTO operations (operation_id, machine_id, kind, state, step) \
                 VALUES ('{}', '{id}', 'recover', 'running', 'fence');",
                Uuid::now_v7()
            ));
        }
        case_indexes.insert(id, n);
    }
    client.batch_execute(&sql).await.unwrap();

    let db = Db::new(&database.url().parse().unwrap(), 2).unwrap();
    let session = db.session().await.unwrap();
    let retention = ServerRetention { replaced: RETENTION, deleted: RETENTION, unregistered: RETENTION };
    let user: IdpUserId = "user_1".parse().unwrap();
    for (n, case) in cases.iter().enumerate() {
        let slot: Slot = format!("s{n}").parse().unwrap();
        let kept_machines = kept_servers::list_in_slot(&session, &user, &slot, &retention).await.unwrap();
        let subject = kept_machines.iter().find(|row| case_indexes.get(&row.machine.0) == Some(&n));
        let until = subject.map(|row| match row.until {
            None => RetentionEnd::Never,
            Some(until) if until <= Timestamp::now() => RetentionEnd::Past,
            Some(_) => RetentionEnd::Future,
        });
        let holds_data = case.is_registered || case.is_unsaved;
        assert_eq!(until, holds_data.then(|| case.expected()), "{case:?}");
    }

    // The machines are listed in pages; a machine with a running operation is not listed.
    let mut removable = HashSet::new();
    loop {
        let page = kept_servers::list_removable(&session, &retention).await.unwrap();
        if page.is_empty() {
            break;
        }
        for machine in page {
            assert!(removable.insert(machine.0));
            let sql = "INSERT INTO operations (operation_id, machine_id, kind, state, step) \
                       VALUES (gen_random_uuid(), $1, 'remove_server', 'running', 'remove_server')";
            client.execute(sql, &[&machine.0]).await.unwrap();
        }
    }
    for (id, n) in &case_indexes {
        let case = cases[*n];
        let expected = case.expected() == RetentionEnd::Past && !case.has_running_operation;
        assert_eq!(removable.contains(id), expected, "{case:?}");
    }
}
