//! Server roles with their attributes, settings and memberships, read when taking a snapshot and compared when
//! restoring it.

use tokio_postgres::{Error, GenericClient};

use svc_store::role_facts::{Membership, RoleFacts, RoleSetting};

/// Comment on roles created for a drill or the side database.
pub const TEMPORARY_ROLE_COMMENT: &str = "made for a drill of svc-db-backup";

/// Excludes the import role, which only exists while an import runs (`restore/import/untrusted.rs`).
const ROLES_QUERY: &str = "
    SELECT rolname::text, rolsuper, rolcanlogin, rolinherit, rolcreatedb, rolcreaterole, rolreplication, rolbypassrls,
           rolconnlimit, CASE WHEN rolvaliduntil < 'infinity' THEN rolvaliduntil::text END
      FROM pg_roles
     WHERE rolname !~ '^(pg_|svc_import_[0-9]+$)'
       AND shobj_description(oid, 'pg_authid') IS DISTINCT FROM $1 ORDER BY 1";

const SETTINGS_QUERY: &str = "
    SELECT r.rolname::text, split_part(c, '=', 1), substr(c, strpos(c, '=') + 1)
      FROM pg_db_role_setting g JOIN pg_roles r ON r.oid = g.setrole CROSS JOIN unnest(g.setconfig) c
     WHERE g.setdatabase = 0 ORDER BY 1, 2";

/// A role may be granted by several grantors, so their options are combined.
const MEMBERSHIPS_QUERY: &str = "
    SELECT m.rolname::text, r.rolname::text, bool_or(a.admin_option), bool_or(a.inherit_option), bool_or(a.set_option)
      FROM pg_auth_members a JOIN pg_roles m ON m.oid = a.member JOIN pg_roles r ON r.oid = a.roleid
     GROUP BY 1, 2 ORDER BY 1, 2";

/// Returns all roles, sorted by name, except built-in ones and those created for drills, the side database or imports.
///
/// # Errors
/// If a query fails.
pub async fn read_roles(client: &impl GenericClient) -> Result<Vec<RoleFacts>, Error> {
    let mut roles = Vec::new();
    for row in client.query(ROLES_QUERY, &[&TEMPORARY_ROLE_COMMENT]).await? {
        roles.push(RoleFacts {
            name: row.try_get(0)?,
            superuser: row.try_get(1)?,
            login: row.try_get(2)?,
            inherit: row.try_get(3)?,
            create_database: row.try_get(4)?,
            create_role: row.try_get(5)?,
            replication: row.try_get(6)?,
            bypass_rls: row.try_get(7)?,
            connection_limit: row.try_get(8)?,
            valid_until: row.try_get(9)?,
            ..RoleFacts::default()
        });
    }
    for row in client.query(SETTINGS_QUERY, &[]).await? {
        let (name, setting) =
            (row.try_get(0)?, RoleSetting { name: row.try_get(1)?, value: row.try_get(2)? });
        if let Some(role) = find_role(&mut roles, name) {
            role.settings.push(setting);
        }
    }
    for row in client.query(MEMBERSHIPS_QUERY, &[]).await? {
        let membership = Membership {
            role: row.try_get(1)?,
            admin: row.try_get(2)?,
            inherit: row.try_get(3)?,
            set: row.try_get(4)?,
        };
        if let Some(role) = find_role(&mut roles, row.try_get(0)?) {
            role.member_of.push(membership);
        }
    }
    Ok(roles)
}

/// Returns whether the role was created for a drill or the side database, or `None` if it doesn't exist.
///
/// # Errors
/// If the query fails.
pub async fn is_temporary(client: &impl GenericClient, role: &str) -> Result<Option<bool>, Error> {
    let sql = "SELECT shobj_description(oid, 'pg_authid') IS NOT DISTINCT FROM $2 FROM pg_roles \
               WHERE rolname = $1";
    let row = client.query_opt(sql, &[&role, &TEMPORARY_ROLE_COMMENT]).await?;
    row.map(|row| row.try_get(0)).transpose()
}

fn find_role<'a>(roles: &'a mut [RoleFacts], name: &str) -> Option<&'a mut RoleFacts> {
    roles.iter_mut().find(|role| role.name == name)
}
