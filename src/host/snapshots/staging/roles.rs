//! Creates the roles a snapshot needs before it's loaded, with their recorded attributes, settings and memberships.
//!
//! All roles are created in a single transaction, so none is ever visible without its attributes. Existing roles are
//! left unchanged and differences are reported. A restore treats temporary roles as new and makes them permanent. New
//! roles can't log in: the gateway enables logins when it sets passwords.

use std::collections::BTreeSet;

use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Transaction};

use super::database::ScratchPurpose;
use super::error::{LoadError, query_error};
use super::settings;
use crate::snapshots::roles;
use crate::snapshots::roles::TEMPORARY_ROLE_COMMENT;
use crate::system::postgres::{quote_ident, quote_literal};
use svc_store::role_facts::{Membership, RoleFacts};
use svc_store::snapshot::Sidecar;

/// App role prefix. The gateway sets these roles' passwords and enables their logins.
const APP_PREFIX: &str = "app_";

/// Creates missing roles and, for a restore, makes temporary ones permanent. Roles created for a check get no
/// attributes. Returns descriptions of recorded facts that weren't restored.
pub async fn create(
    client: &mut Client,
    sidecar: &Sidecar,
    purpose: ScratchPurpose,
) -> Result<Vec<String>, LoadError> {
    let facts = sidecar.database.iter().flat_map(|facts| facts.roles.iter().flatten());
    let facts: Vec<&RoleFacts> =
        facts.filter(|role| purpose == ScratchPurpose::Restore && !is_built_in(&role.name)).collect();
    let owners = sidecar.database.iter().flat_map(|facts| &facts.owner);
    let names = sidecar.roles.iter().chain(owners).chain(facts.iter().map(|role| &role.name));
    let names: BTreeSet<&str> = names.map(String::as_str).filter(|name| !is_built_in(name)).collect();

    let transaction = client.transaction().await.map_err(query_error("create roles"))?;
    let existing = roles::read_roles(&transaction).await.map_err(query_error("read the roles"))?;
    let mut created = BTreeSet::new();
    for name in names {
        let is_temporary = roles::is_temporary(&transaction, name).await;
        let is_temporary = is_temporary.map_err(query_error("check whether a role exists"))?;
        let role = quote_ident(name);
        let statement = match (is_temporary, purpose) {
            (None, ScratchPurpose::Restore) => format!("CREATE ROLE {role} NOLOGIN"),
            (None, ScratchPurpose::Check) => {
                format!("CREATE ROLE {role} NOLOGIN; COMMENT ON ROLE {role} IS '{TEMPORARY_ROLE_COMMENT}'")
            }
            // Created without attributes for a drill or the side database.
            (Some(true), ScratchPurpose::Restore) => format!("COMMENT ON ROLE {role} IS NULL"),
            (Some(_), _) => continue,
        };
        transaction
            .batch_execute(&statement)
            .await
            .map_err(query_error(format!("create the role {name}")))?;
        created.insert(name);
    }
    let mut setup = RoleSetup { transaction, not_restored: Vec::new() };
    for role in &facts {
        if created.contains(role.name.as_str()) {
            setup.set_attributes(role).await?;
        } else if let Some(live) = existing.iter().find(|live| live.name == role.name) {
            setup.report_differences(role, live);
        }
    }
    for role in facts.iter().filter(|role| created.contains(role.name.as_str())) {
        for membership in &role.member_of {
            setup.grant_membership(role, membership).await?;
        }
    }
    setup.transaction.commit().await.map_err(query_error("create roles"))?;
    Ok(setup.not_restored)
}

fn is_built_in(name: &str) -> bool {
    name.starts_with("pg_")
}

/// Applies recorded role facts and collects those that aren't restored.
struct RoleSetup<'a> {
    transaction: Transaction<'a>,
    not_restored: Vec<String>,
}

impl RoleSetup<'_> {
    async fn set_attributes(&mut self, role: &RoleFacts) -> Result<(), LoadError> {
        let option = |is_set: bool, name: &str| if is_set { name.to_owned() } else { format!("NO{name}") };
        let mut attributes = vec![
            option(role.inherit, "INHERIT"),
            option(role.create_database, "CREATEDB"),
            option(role.create_role, "CREATEROLE"),
            option(role.replication, "REPLICATION"),
            option(role.bypass_rls, "BYPASSRLS"),
            format!("CONNECTION LIMIT {}", role.connection_limit),
        ];
        attributes
            .extend(role.valid_until.as_ref().map(|until| format!("VALID UNTIL {}", quote_literal(until))));
        let alter = format!("ALTER ROLE {} WITH {}", quote_ident(&role.name), attributes.join(" "));
        self.attempt(&alter, || format!("the attributes of the role {}", role.name)).await?;
        for setting in &role.settings {
            let assignment = settings::format_assignment(&setting.name, &setting.value);
            let alter = format!("ALTER ROLE {} SET {assignment}", quote_ident(&role.name));
            self.attempt(&alter, || format!("the setting {} of the role {}", setting.name, role.name))
                .await?;
        }
        if role.superuser {
            self.not_restored.push(format!("the SUPERUSER attribute of the role {}", role.name));
        }
        if role.login && !role.name.starts_with(APP_PREFIX) {
            self.not_restored.push(format!("the LOGIN attribute and the password of the role {}", role.name));
        }
        Ok(())
    }

    async fn grant_membership(&mut self, role: &RoleFacts, membership: &Membership) -> Result<(), LoadError> {
        let grant = format!(
            "GRANT {} TO {} WITH ADMIN {}, INHERIT {}, SET {}",
            quote_ident(&membership.role),
            quote_ident(&role.name),
            membership.admin,
            membership.inherit,
            membership.set
        );
        let describe = || format!("the membership of the role {} in {}", role.name, membership.role);
        self.attempt(&grant, describe).await
    }

    /// Reports how an existing role differs from the recorded one. The role itself is left unchanged.
    fn report_differences(&mut self, recorded: &RoleFacts, live: &RoleFacts) {
        let attributes = |role: &RoleFacts| RoleFacts {
            settings: Vec::new(),
            member_of: Vec::new(),
            // The gateway manages logins, and passwords are never recorded.
            login: false,
            ..role.clone()
        };
        let role = &recorded.name;
        if attributes(recorded) != attributes(live) {
            self.not_restored.push(format!("the attributes of the role {role}, which already existed"));
        }
        for setting in recorded.settings.iter().filter(|setting| !live.settings.contains(setting)) {
            self.not_restored
                .push(format!("the setting {} of the role {role}, which already existed", setting.name));
        }
        for membership in recorded.member_of.iter().filter(|membership| !live.member_of.contains(membership))
        {
            let group = &membership.role;
            self.not_restored
                .push(format!("the membership of the role {role} in {group}; {role} already existed"));
        }
    }

    /// Runs a statement in a savepoint. If the server rejects it, adds the reason to `not_restored`.
    async fn attempt(&mut self, statement: &str, describe: impl FnOnce() -> String) -> Result<(), LoadError> {
        let savepoint = self.transaction.savepoint("role").await.map_err(query_error("set up roles"))?;
        let Err(error) = savepoint.batch_execute(statement).await else {
            return savepoint.commit().await.map_err(query_error("set up roles"));
        };
        match error.as_db_error() {
            Some(refusal) if error.code() != Some(&SqlState::ADMIN_SHUTDOWN) => {
                self.not_restored.push(format!("{}: {}", describe(), refusal.message()));
                Ok(())
            }
            _ => Err(query_error("set up roles")(error)),
        }
    }
}

/// Checks whether role `$1` has dependent objects other than the side database, scratch databases and their contents.
const HAS_OTHER_DEPENDENTS: &str = "
    SELECT EXISTS (
        SELECT FROM pg_shdepend d JOIN pg_roles r ON r.oid = d.refobjid
         WHERE d.refclassid = 'pg_authid'::regclass AND r.rolname = $1 AND NOT EXISTS (
            SELECT FROM pg_database b
             WHERE b.datname ~ '^svc_(side|(check|restore)_[0-9]+)$'
               AND (b.oid = d.dbid OR d.classid = 'pg_database'::regclass AND b.oid = d.objid)))";

/// Drops temporary roles. Call this after dropping the databases they were created for. Roles that have acquired other
/// objects belong to the owner and become permanent. Roles still used by the side database stay temporary.
pub async fn drop_temporary_roles(client: &Client) -> Result<(), LoadError> {
    let list = "SELECT rolname::text FROM pg_roles WHERE NOT rolcanlogin AND shobj_description(oid, 'pg_authid') = $1";
    let rows = client
        .query(list, &[&TEMPORARY_ROLE_COMMENT])
        .await
        .map_err(query_error("list the temporary roles"))?;
    for row in rows {
        let role: String = row.try_get(0).map_err(query_error("list the temporary roles"))?;
        match client.batch_execute(&format!("DROP ROLE IF EXISTS {}", quote_ident(&role))).await {
            Err(error) if error.code() == Some(&SqlState::DEPENDENT_OBJECTS_STILL_EXIST) => {
                let row = client.query_one(HAS_OTHER_DEPENDENTS, &[&role]).await;
                let has_other_dependents: bool = row
                    .and_then(|row| row.try_get(0))
                    .map_err(query_error(format!("read the dependents of the role {role}")))?;
                if !has_other_dependents {
                    continue;
                }
                let make_permanent = format!("COMMENT ON ROLE {} IS NULL", quote_ident(&role));
                client
                    .batch_execute(&make_permanent)
                    .await
                    .map_err(query_error(format!("make the role {role} permanent")))?;
            }
            result => result.map_err(query_error(format!("drop the role {role}")))?,
        }
    }
    Ok(())
}
