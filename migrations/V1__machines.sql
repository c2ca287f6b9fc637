-- Subscriptions, machines and the operations on them. Every rule that the database can hold, it holds.

CREATE TABLE slots (
    idp_user_id         text NOT NULL,
    slot                text NOT NULL,
    plan                text NOT NULL CHECK (plan IN ('starter', 'builder', 'max')),
    status              text NOT NULL CHECK (status IN ('active', 'inactive')),
    current_period_end  timestamptz,
    updated_at          timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (idp_user_id, slot)
);

-- A handle belongs to one user, for good.
CREATE TABLE handles (
    handle       text PRIMARY KEY,
    idp_user_id  text NOT NULL
);

-- Every change of a machine that routing must see takes the next number.
CREATE SEQUENCE machine_change_seq;

CREATE TABLE user_machines (
    machine_id               uuid PRIMARY KEY,
    idp_user_id              text NOT NULL,
    slot                     text NOT NULL,
    handle                   text NOT NULL REFERENCES handles (handle),
    kind                     text NOT NULL CHECK (kind IN ('customer', 'preview')),
    status                   text NOT NULL
        CHECK (status IN ('provisioning', 'running', 'recovering', 'resizing', 'failed')),
    failure_cause            text,
    failure_stage            text,
    failure_message          text,
    epoch                    integer NOT NULL CHECK (epoch > 0),
    restore_mode             text NOT NULL CHECK (restore_mode IN ('required', 'empty')),
    server_type              text NOT NULL,
    -- Set while resizing: the type that the change is to.
    resize_to                text,
    location                 text NOT NULL,
    image_version            text NOT NULL,
    bundle_sha256            text NOT NULL,
    provider_server_id       bigint,
    public_ipv4              text,
    https_port               integer NOT NULL,
    tls_spki_sha256          text,
    registration_token_hash  bytea NOT NULL,
    -- Runs from the accepted create.
    registration_expires_at  timestamptz,
    -- SHA-256 of the body that registered: the identical body gets the identical answer.
    registration_body_hash   bytea,
    registered_at            timestamptz,
    upgrade_token_hash       bytea NOT NULL,
    heartbeat_at             timestamptz,
    health                   jsonb,
    last_backup              jsonb,
    -- Proof keys that this host has acknowledged.
    proof_kids               text[] NOT NULL DEFAULT '{}',
    replaced_by              uuid REFERENCES user_machines (machine_id) DEFERRABLE INITIALLY DEFERRED,
    retired_at               timestamptz,
    deleted_at               timestamptz,
    change_seq               bigint NOT NULL DEFAULT nextval('machine_change_seq'),
    created_at               timestamptz NOT NULL DEFAULT now(),
    updated_at               timestamptz NOT NULL DEFAULT now(),
    UNIQUE (idp_user_id, slot, epoch),
    CHECK ((retired_at IS NULL) OR (replaced_by IS NOT NULL))
);

-- One active machine per slot.
CREATE UNIQUE INDEX user_machines_active ON user_machines (idp_user_id, slot)
    WHERE deleted_at IS NULL AND retired_at IS NULL;
CREATE INDEX user_machines_change ON user_machines (change_seq);

CREATE FUNCTION user_machines_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.updated_at := now();
    NEW.change_seq := nextval('machine_change_seq');
    PERFORM pg_notify('machine_changed', NEW.machine_id::text);
    RETURN NEW;
END $$;

-- A heartbeat changes nothing that routing looks at, so it takes no number.
CREATE TRIGGER user_machines_changed BEFORE UPDATE OF status, public_ipv4, https_port, tls_spki_sha256,
    retired_at, deleted_at, proof_kids ON user_machines FOR EACH ROW EXECUTE FUNCTION user_machines_changed();
CREATE TRIGGER user_machines_added BEFORE INSERT ON user_machines
    FOR EACH ROW EXECUTE FUNCTION user_machines_changed();

CREATE TABLE operations (
    operation_id   uuid PRIMARY KEY,
    machine_id     uuid NOT NULL REFERENCES user_machines (machine_id),
    kind           text NOT NULL,
    state          text NOT NULL CHECK (state IN ('running', 'succeeded', 'failed', 'cancelled')),
    -- The step that is next, or under way; what steps have found out is in `facts`.
    step           text NOT NULL,
    facts          jsonb NOT NULL DEFAULT '{}',
    attempts       integer NOT NULL DEFAULT 0,
    error_code     text,
    due_at         timestamptz NOT NULL DEFAULT now(),
    lease_owner    uuid,
    lease_until    timestamptz,
    created_at     timestamptz NOT NULL DEFAULT now(),
    updated_at     timestamptz NOT NULL DEFAULT now(),
    ended_at       timestamptz
);
CREATE INDEX operations_due ON operations (due_at) WHERE state = 'running';
CREATE INDEX operations_machine ON operations (machine_id);

-- What happened, step by step, for people.
CREATE TABLE operation_log (
    operation_id  uuid NOT NULL REFERENCES operations (operation_id),
    seq           bigint GENERATED ALWAYS AS IDENTITY,
    at            timestamptz NOT NULL DEFAULT now(),
    step          text NOT NULL,
    outcome       text NOT NULL,
    detail        text,
    PRIMARY KEY (operation_id, seq)
);

CREATE TABLE operator_audit (
    audit_id    uuid PRIMARY KEY,
    at          timestamptz NOT NULL DEFAULT now(),
    actor       text NOT NULL,
    action      text NOT NULL,
    target      text NOT NULL,
    before      jsonb,
    after       jsonb,
    request_id  text NOT NULL
);

CREATE TABLE idempotency_keys (
    actor       text NOT NULL,
    key         text NOT NULL,
    route       text NOT NULL,
    body_hash   bytea NOT NULL,
    status      integer NOT NULL,
    response    jsonb NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (actor, key)
);

-- Signing keys, sealed with PLATFORM_KEY, shared by all platform processes.
CREATE TABLE signing_keys (
    kid         text PRIMARY KEY,
    purpose     text NOT NULL CHECK (purpose IN ('proof', 'session', 'app')),
    public_key  text NOT NULL,
    sealed      bytea NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),
    retired_at  timestamptz
);
