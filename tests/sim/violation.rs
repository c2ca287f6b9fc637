//! Invariant violations, and the rules that tests deliberately break to check that violations are detected.

/// A violated invariant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Violation {
    DuplicateServer,
    DuplicateActiveMachine,
    RoutedWhileNotRunning,
    RunningUnregistered,
    /// Two hosts with different keys were both accepted as one machine.
    RegisteredTwice,
    EpochDidNotIncrease,
    /// A retired or deleted machine became active again, or changed.
    BecameActiveAgain,
    /// A new machine has a server, although the machine's epoch is above the slot's fence.
    ServerCreatedBeforeFence,
    /// `seq` did not increase, or the fence or the named snapshot's epoch decreased.
    PointerMovedBackward,
    PointerMovedByFencedHost,
    PointerToUnverifiedSnapshot,
    SnapshotRemoved,
    /// A machine's state requires an operation, but none is running.
    MissingOperation,
    UnfinishedOperation,
    /// An operation that a response named does not exist.
    AcceptedOperationLost,
    OrphanedServer,
    /// After settling, a running machine has no server.
    RunningWithoutServer,
    AuditIncomplete,
    /// Two requests with the same key and body got different successful responses.
    ReplayDiffers,
    /// The host of a replaced or deleted machine is not notified that it is superseded, or a current host is.
    HostNotNotified,
    /// An acknowledged row is on no server and in no snapshot, although no operator accepted its loss and the provider
    /// did not lose its disk.
    LostRows,
    /// The platform responded with an internal error.
    InternalError,
}

/// A rule that a test breaks from outside the platform: in the provider, the store, a host, or directly in the
/// database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BrokenRule {
    /// The provider accepts a name more than once, finds no server by name or label, and loses the responses to some
    /// creations.
    ProviderAcceptsDuplicateNames,
    /// The provider reports a deletion without deleting, and finds no server by name or label.
    ProviderDeletesNothing,
    /// The store ignores write conditions.
    StoreIgnoresConditions,
    /// The store reports that it wrote a fence, but did not.
    StoreLosesFences,
    /// The store keeps only one snapshot per slot.
    StoreRemovesSnapshots,
    /// A host moves the pointer regardless of the fence.
    HostIgnoresFence,
    /// A host moves the pointer before the sidecar exists.
    HostDoesNotVerify,
    /// SQL executed on the database before the run.
    Sql(&'static str),
}

impl BrokenRule {
    /// Inserting a slot's first machine also inserts a second machine, which no response names.
    pub const DUPLICATES_MACHINES: Self = Self::Sql(
        "DROP INDEX user_machines_active;
         CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF NEW.epoch = 1 THEN
                NEW.machine_id := gen_random_uuid(); NEW.epoch := 2; NEW.status := 'failed';
                INSERT INTO user_machines SELECT NEW.*;
            END IF; RETURN NULL; END $$;
         CREATE TRIGGER broken AFTER INSERT ON user_machines FOR EACH ROW EXECUTE FUNCTION broken();",
    );
    /// Routers are notified only of machines that start running.
    pub const HIDES_CHANGES_FROM_ROUTERS: Self = Self::Sql(
        "DROP TRIGGER user_machines_changed ON user_machines;
         CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF NEW.status = 'running' AND OLD.status <> 'running' THEN
                NEW.change_seq := nextval('machine_change_seq');
            END IF; RETURN NEW; END $$;
         CREATE TRIGGER broken BEFORE UPDATE ON user_machines FOR EACH ROW EXECUTE FUNCTION broken();
         CREATE FUNCTION inherited() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            NEW.change_seq := coalesce((SELECT change_seq FROM user_machines WHERE slot = NEW.slot
                AND idp_user_id = NEW.idp_user_id ORDER BY epoch DESC LIMIT 1), NEW.change_seq);
            RETURN NEW; END $$;
         CREATE TRIGGER user_machines_inherited BEFORE INSERT ON user_machines
            FOR EACH ROW EXECUTE FUNCTION inherited();",
    );
    /// A machine is running as soon as it has a server.
    pub const RUNS_UNREGISTERED: Self = Self::Sql(
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            NEW.status := 'running'; RETURN NEW; END $$;
         CREATE TRIGGER broken BEFORE UPDATE OF provider_server_id ON user_machines
            FOR EACH ROW WHEN (NEW.status IN ('provisioning', 'recovering')) EXECUTE FUNCTION broken();",
    );
    pub const REUSES_EPOCHS: Self = Self::Sql(
        "ALTER TABLE user_machines DROP CONSTRAINT user_machines_idp_user_id_slot_epoch_key;
         CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            NEW.epoch := 1; RETURN NEW; END $$;
         CREATE TRIGGER broken BEFORE INSERT ON user_machines FOR EACH ROW EXECUTE FUNCTION broken();",
    );
    /// A deleted machine becomes active again once its server is deleted.
    pub const REACTIVATES_DELETED_MACHINES: Self = Self::Sql(
        "DROP INDEX user_machines_active;
         CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            NEW.deleted_at := NULL; NEW.status := 'failed'; NEW.failure_cause := 'operator'; RETURN NEW; END $$;
         CREATE TRIGGER broken BEFORE UPDATE OF server_deleted_at ON user_machines
            FOR EACH ROW WHEN (OLD.deleted_at IS NOT NULL) EXECUTE FUNCTION broken();",
    );
    /// An operation never ends.
    pub const NEVER_ENDS_OPERATIONS: Self = Self::Sql(
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            NEW.state := 'running'; NEW.ended_at := NULL; RETURN NEW; END $$;
         CREATE TRIGGER broken BEFORE UPDATE OF state ON operations FOR EACH ROW EXECUTE FUNCTION broken();",
    );
    /// A new machine's operation ends before its work is done.
    pub const ENDS_OPERATIONS_EARLY: Self = Self::Sql(
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            NEW.state := 'succeeded'; NEW.ended_at := now(); RETURN NEW; END $$;
         CREATE TRIGGER broken BEFORE UPDATE OF step ON operations
            FOR EACH ROW WHEN (NEW.step = 'await_registration') EXECUTE FUNCTION broken();",
    );
    /// Delete operations are not stored.
    pub const LOSES_OPERATIONS: Self = Self::Sql(
        "ALTER TABLE operation_log DROP CONSTRAINT operation_log_operation_id_fkey;
         CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
         CREATE TRIGGER broken BEFORE INSERT ON operations
            FOR EACH ROW WHEN (NEW.kind = 'delete') EXECUTE FUNCTION broken();",
    );
    /// The time when a server was first missing is reset by every update.
    pub const RESETS_MISSING_SINCE: Self = Self::Sql(
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            NEW.server_missing_since := clock_timestamp(); RETURN NEW; END $$;
         CREATE TRIGGER broken BEFORE UPDATE OF server_missing_since ON user_machines
            FOR EACH ROW EXECUTE FUNCTION broken();",
    );
    pub const LOSES_AUDIT_ROWS: Self = Self::Sql(
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
         CREATE TRIGGER broken BEFORE INSERT ON operator_audit
            FOR EACH ROW WHEN (NEW.action = 'register') EXECUTE FUNCTION broken();",
    );
    pub const LOSES_IDEMPOTENCY_KEYS: Self = Self::Sql(
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
         CREATE TRIGGER broken BEFORE INSERT ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION broken();",
    );
    /// The token of a replaced or deleted machine is overwritten, so its host is never notified.
    pub const REVOKES_OLD_TOKENS: Self = Self::Sql(
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            NEW.upgrade_token_hash := '\\x00'; RETURN NEW; END $$;
         CREATE TRIGGER broken BEFORE UPDATE OF retired_at ON user_machines
            FOR EACH ROW WHEN (NEW.retired_at IS NOT NULL OR NEW.deleted_at IS NOT NULL)
            EXECUTE FUNCTION broken();",
    );
    /// A registration is not recorded: neither the hash of its body nor the status `running` is stored.
    pub const LOSES_REGISTRATIONS: Self = Self::Sql(
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            NEW.registration_body_hash := NULL;
            IF NEW.status = 'running' THEN NEW.status := 'provisioning'; END IF; RETURN NEW; END $$;
         CREATE TRIGGER broken BEFORE UPDATE OF registration_body_hash ON user_machines
            FOR EACH ROW EXECUTE FUNCTION broken();
         CREATE FUNCTION kept() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
         CREATE TRIGGER kept BEFORE UPDATE OF state ON operations
            FOR EACH ROW WHEN (NEW.state = 'succeeded') EXECUTE FUNCTION kept();",
    );
    /// The time of the oldest unsaved change is not stored.
    pub const LOSES_UNSAVED_SINCE: Self = Self::Sql(
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            NEW.unsaved_since := NULL; RETURN NEW; END $$;
         CREATE TRIGGER broken BEFORE UPDATE OF unsaved_since ON user_machines
            FOR EACH ROW EXECUTE FUNCTION broken();",
    );
    pub const RAISES_ERRORS: Self = Self::Sql(
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            RAISE EXCEPTION 'broken'; END $$;
         CREATE TRIGGER broken BEFORE INSERT ON operator_audit
            FOR EACH ROW WHEN (NEW.action = 'delete') EXECUTE FUNCTION broken();",
    );
}
