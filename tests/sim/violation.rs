//! The violations of invariants, and the rules that tests break on purpose to see them detected.

/// One for each invariant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Violation {
    TwoServersOfOneMachine,
    TwoActiveMachinesOfOneSlot,
    RoutedWhileNotRunning,
    RunningUnregistered,
    /// Two hosts with different keys were both accepted as one machine.
    RegisteredTwice,
    EpochDidNotGrow,
    /// A retired or deleted machine changed again.
    CameBack,
    /// A server exists although its machine's epoch is above the slot's fence.
    ServerBeforeFence,
    /// `seq`, the fence or the epoch of the named snapshot decreased.
    PointerWentBack,
    PointerMovedByFencedHost,
    PointerNamesUnverified,
    SnapshotRemoved,
    /// A state that waits for an operation, without an open operation.
    Stuck,
    OperationNeverEnds,
    /// An operation from a response does not exist.
    AcceptedAndForgotten,
    Orphan,
    /// After settling, a running machine has no server.
    RunsWithoutServer,
    AuditIncomplete,
    /// The same key and body got a different response.
    ReplayDiffers,
    /// A replaced host is not notified, or a current host is told that it is superseded.
    HostNotTold,
    /// An acknowledged row is on no server and in no snapshot, and no operator accepted its loss.
    LostRows,
    /// The platform responded with an internal error.
    InternalError,
}

/// A rule broken from outside: by the provider, the store, a host, or directly in the database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BrokenRule {
    /// The provider accepts a name twice, and finds no server by name.
    NamesRepeat,
    /// The provider reports a deletion without deleting.
    NothingIsDeleted,
    /// The store ignores the conditions of writes.
    Unconditional,
    /// The store reports that it wrote a fence, but did not.
    FenceIsNotWritten,
    /// The store keeps one snapshot for each slot.
    StorePrunes,
    /// A host moves the pointer regardless of the fence.
    HostIgnoresFence,
    /// A host moves the pointer before the side record exists.
    HostDoesNotVerify,
    /// SQL that runs on the database before the run.
    Sql(&'static str),
}

impl BrokenRule {
    /// Each machine of a slot creates a second one, which no response names.
    pub const SLOTS_ARE_SHARED: Self = Self::Sql(
        "DROP INDEX user_machines_active;
         CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF NEW.epoch = 1 THEN
                NEW.machine_id := gen_random_uuid(); NEW.epoch := 2; NEW.status := 'failed';
                INSERT INTO user_machines SELECT NEW.*;
            END IF; RETURN NULL; END $$;
         CREATE TRIGGER broken AFTER INSERT ON user_machines FOR EACH ROW EXECUTE FUNCTION broken();",
    );
    /// Routers are notified only of machines that start to run.
    pub const CHANGES_ARE_SILENT: Self = Self::Sql(
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
    /// A machine runs as soon as it has a server.
    pub const RUNS_AT_ONCE: Self = Self::Sql(
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            NEW.status := 'running'; RETURN NEW; END $$;
         CREATE TRIGGER broken BEFORE UPDATE OF provider_server_id ON user_machines
            FOR EACH ROW WHEN (NEW.status IN ('provisioning', 'recovering')) EXECUTE FUNCTION broken();",
    );
    pub const EPOCH_STAYS: Self = Self::Sql(
        "ALTER TABLE user_machines DROP CONSTRAINT user_machines_idp_user_id_slot_epoch_key;
         CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            NEW.epoch := 1; RETURN NEW; END $$;
         CREATE TRIGGER broken BEFORE INSERT ON user_machines FOR EACH ROW EXECUTE FUNCTION broken();",
    );
    /// A machine whose server is deleted can come back.
    pub const COMES_BACK: Self = Self::Sql(
        "DROP INDEX user_machines_active;
         CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            NEW.deleted_at := NULL; NEW.status := 'failed'; NEW.failure_cause := 'operator'; RETURN NEW; END $$;
         CREATE TRIGGER broken BEFORE UPDATE OF server_deleted_at ON user_machines
            FOR EACH ROW WHEN (OLD.deleted_at IS NOT NULL) EXECUTE FUNCTION broken();",
    );
    /// An ended operation continues.
    pub const NOTHING_ENDS: Self = Self::Sql(
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            NEW.state := 'running'; NEW.ended_at := NULL; RETURN NEW; END $$;
         CREATE TRIGGER broken BEFORE UPDATE OF state ON operations FOR EACH ROW EXECUTE FUNCTION broken();",
    );
    /// The work for a new machine ends before it is done.
    pub const WORK_IS_DROPPED: Self = Self::Sql(
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            NEW.state := 'succeeded'; NEW.ended_at := now(); RETURN NEW; END $$;
         CREATE TRIGGER broken BEFORE UPDATE OF step ON operations
            FOR EACH ROW WHEN (NEW.step = 'await_registration') EXECUTE FUNCTION broken();",
    );
    /// A request's operation is not stored.
    pub const OPERATIONS_ARE_LOST: Self = Self::Sql(
        "ALTER TABLE operation_log DROP CONSTRAINT operation_log_operation_id_fkey;
         CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
         CREATE TRIGGER broken BEFORE INSERT ON operations
            FOR EACH ROW WHEN (NEW.kind = 'delete') EXECUTE FUNCTION broken();",
    );
    /// The time since a server is missing is always reset.
    pub const NOTHING_IS_MISSED: Self = Self::Sql(
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            NEW.server_missing_since := clock_timestamp(); RETURN NEW; END $$;
         CREATE TRIGGER broken BEFORE UPDATE OF server_missing_since ON user_machines
            FOR EACH ROW EXECUTE FUNCTION broken();",
    );
    pub const AUDIT_IS_LOST: Self = Self::Sql(
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
         CREATE TRIGGER broken BEFORE INSERT ON operator_audit
            FOR EACH ROW WHEN (NEW.action = 'register') EXECUTE FUNCTION broken();",
    );
    pub const KEYS_ARE_FORGOTTEN: Self = Self::Sql(
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
         CREATE TRIGGER broken BEFORE INSERT ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION broken();",
    );
    /// A replaced host's token is removed, so that it is never notified.
    pub const OLD_TOKENS_END: Self = Self::Sql(
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            NEW.upgrade_token_hash := '\\x00'; RETURN NEW; END $$;
         CREATE TRIGGER broken BEFORE UPDATE OF retired_at ON user_machines
            FOR EACH ROW WHEN (NEW.retired_at IS NOT NULL OR NEW.deleted_at IS NOT NULL)
            EXECUTE FUNCTION broken();",
    );
    /// The platform forgets the body of a registration.
    pub const REGISTRATION_IS_FORGOTTEN: Self = Self::Sql(
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            NEW.registration_body_hash := NULL;
            IF NEW.status = 'running' THEN NEW.status := 'provisioning'; END IF; RETURN NEW; END $$;
         CREATE TRIGGER broken BEFORE UPDATE OF registration_body_hash ON user_machines
            FOR EACH ROW EXECUTE FUNCTION broken();
         CREATE FUNCTION kept() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
         CREATE TRIGGER kept BEFORE UPDATE OF state ON operations
            FOR EACH ROW WHEN (NEW.state = 'succeeded') EXECUTE FUNCTION kept();",
    );
    /// The mark of unsaved changes is dropped.
    pub const UNSAVED_IS_FORGOTTEN: Self = Self::Sql(
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            NEW.unsaved_since := NULL; RETURN NEW; END $$;
         CREATE TRIGGER broken BEFORE UPDATE OF unsaved_since ON user_machines
            FOR EACH ROW EXECUTE FUNCTION broken();",
    );
    pub const RAISES: Self = Self::Sql(
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            RAISE EXCEPTION 'broken'; END $$;
         CREATE TRIGGER broken BEFORE INSERT ON operator_audit
            FOR EACH ROW WHEN (NEW.action = 'delete') EXECUTE FUNCTION broken();",
    );
}
