//! A restore keeps operators' changes to roles: attributes, settings, memberships. It reports those that it does not
//! keep.

use anyhow::Result;

use super::machine::{self, Machine};

const CREATE_CONTENT: &str = "
    CREATE ROLE app_notes LOGIN PASSWORD 'x' CONNECTION LIMIT 5 NOINHERIT;
    CREATE ROLE team NOLOGIN CREATEROLE;
    CREATE ROLE reporting LOGIN PASSWORD 'y' BYPASSRLS CONNECTION LIMIT 2 VALID UNTIL '2030-01-02 03:04:05+00';
    CREATE ROLE dba SUPERUSER LOGIN;
    GRANT team TO app_notes WITH ADMIN TRUE, INHERIT FALSE, SET TRUE; GRANT pg_monitor, app_notes TO reporting;
    ALTER ROLE app_notes SET statement_timeout = '7s'; ALTER ROLE app_notes SET search_path = app_notes, \"a, b\", public;
    ALTER ROLE reporting SET app.name = 'it''s \\ here'; ALTER ROLE CURRENT_USER SET work_mem = '9MB';
    ALTER DATABASE svc SET lock_timeout = '3s';
    CREATE TABLE t (id int); ALTER TABLE t OWNER TO app_notes; INSERT INTO t VALUES (1)";

/// Lists the attributes, settings for every database, and memberships of all added roles.
const LIST_ROLES: &str = "
    SELECT coalesce(string_agg(rolname || ' ' || rolinherit || rolcreatedb || rolcreaterole || rolbypassrls || rolreplication
               || rolconnlimit || coalesce(rolvaliduntil::text, '-') || ' ' || coalesce((SELECT string_agg(c, ' ; ' ORDER BY c)
                    FROM pg_db_role_setting g CROSS JOIN unnest(g.setconfig) c WHERE g.setrole = r.oid AND g.setdatabase = 0), '-')
               || ' ' || coalesce((SELECT string_agg(o.rolname || a.admin_option || a.inherit_option || a.set_option, ','
                    ORDER BY o.rolname) FROM pg_auth_members a JOIN pg_roles o ON o.oid = a.roleid WHERE a.member = r.oid), '-'),
               E'\\n' ORDER BY rolname), '')
      FROM pg_roles r WHERE rolname !~ '^pg_' AND rolname <> current_user";

async fn roles(machine: &Machine) -> Result<String> {
    Ok(machine.client().await?.query_one(LIST_ROLES, &[]).await?.get(0))
}

#[tokio::test]
async fn restore_keeps_roles_or_reports_differences() -> Result<()> {
    let store = machine::start_store()?;
    let old = Machine::in_use(&store, 1).await?;
    old.client().await?.batch_execute(CREATE_CONTENT).await?;
    old.run(&["svc-db-backup"])?.expect(0);

    let new = Machine::new(&store, 2).await?;
    new.run_with(&["svc-restore"], &[("FAILPOINTS", "restore.roles=return(kill)")])?.expect_killed();
    let result = new.run(&["svc-restore"])?.expect(0);
    assert_eq!(roles(&new).await?, roles(&old).await?);
    assert!(roles(&new).await?.contains("statement_timeout=7s"), "{}", roles(&new).await?);
    let timeout =
        "SELECT count(*) FROM pg_db_role_setting WHERE setrole = 0 AND 'lock_timeout=3s' = ANY (setconfig)";
    assert_eq!(new.client().await?.query_one(timeout, &[]).await?.get::<_, i64>(0), 1);

    // The sidecar contains no passwords, so these roles cannot log in. A restore makes no role a superuser.
    let logins = "SELECT count(*) FROM pg_roles WHERE rolname IN ('app_notes', 'reporting', 'dba') AND (rolcanlogin OR rolsuper)";
    assert_eq!(new.client().await?.query_one(logins, &[]).await?.get::<_, i64>(0), 0);
    let log = &result.stderr;
    assert!(log.contains("not restored from the snapshot"), "{log}");
    Ok(())
}

#[tokio::test]
async fn restore_adopts_roles_left_by_killed_drill() -> Result<()> {
    let store = machine::start_store()?;
    let old = Machine::in_use(&store, 1).await?;
    old.client().await?.batch_execute(CREATE_CONTENT).await?;
    old.run(&["svc-db-backup"])?.expect(0);

    let new = Machine::new(&store, 2).await?;
    for role in ["app_notes", "reporting"] {
        let create = format!(
            "CREATE ROLE {role} NOLOGIN; COMMENT ON ROLE {role} IS 'made for a drill of svc-db-backup'"
        );
        new.client().await?.batch_execute(&create).await?;
    }
    new.run(&["svc-restore"])?.expect(0);
    assert_eq!(roles(&new).await?, roles(&old).await?);
    let temporary =
        "SELECT count(*) FROM pg_roles WHERE shobj_description(oid, 'pg_authid') LIKE 'made for a drill%'";
    assert_eq!(new.client().await?.query_one(temporary, &[]).await?.get::<_, i64>(0), 0);
    Ok(())
}

#[tokio::test]
async fn restore_reports_role_attributes_it_does_not_keep() -> Result<()> {
    let store = machine::start_store()?;
    let old = Machine::in_use(&store, 1).await?;
    old.client().await?.batch_execute(CREATE_CONTENT).await?;
    // A running import uses a role with such a name.
    old.client().await?.batch_execute("CREATE ROLE svc_import_1 LOGIN").await?;
    old.run(&["svc-db-backup"])?.expect(0);
    let new = Machine::new(&store, 2).await?;
    // An operator created a role before the restore.
    new.client().await?.batch_execute("CREATE ROLE team NOLOGIN CONNECTION LIMIT 1").await?;
    let log = new.run(&["svc-restore"])?.expect(0).stderr;
    for expected in [
        "the SUPERUSER attribute of the role dba",
        "the LOGIN attribute and the password of the role reporting",
        "the setting work_mem of the role",
        "the attributes of the role team, which already existed",
    ] {
        assert!(log.contains(expected), "{expected}: {log}");
    }
    assert!(
        !log.contains("the LOGIN attribute and the password of the role app_notes"),
        "a login that the gateway enables must not be reported: {log}"
    );
    assert!(!log.contains("svc_import_1"), "{log}");
    let limit = "SELECT rolconnlimit FROM pg_roles WHERE rolname = 'team'";
    assert_eq!(new.client().await?.query_one(limit, &[]).await?.get::<_, i32>(0), 1);
    // A drill leaves no roles.
    let before = roles(&new).await?;
    assert!(!before.contains("svc_import_1"), "{before}");
    new.run(&["svc-db-backup", "run", "--accept-loss"])?.expect(0);
    new.run(&["svc-db-backup", "drill"])?.expect(0);
    assert_eq!(roles(&new).await?, before);
    Ok(())
}
