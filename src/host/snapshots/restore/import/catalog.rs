//! Scans the catalog of a newly loaded database for forbidden objects, before the database is used.
//!
//! Rejects code of any kind, grants, and expressions that call volatile functions (except a few harmless ones), because
//! later superuser sessions (a backup, a restore, the gateway) evaluate the checks, defaults and indexes of these
//! tables. The dump's own TOC isn't trusted.

use std::fmt::Write as _;

use tokio_postgres::{Client, Error};

/// Harmless volatile functions of PostgreSQL, uuid-ossp and pgcrypto that expressions may call. Comparing names is
/// sufficient, because [`FORBIDDEN_OBJECTS`] leaves only built-in and extension functions.
const ALLOWED_VOLATILE_FUNCTIONS: &str = "'nextval', 'currval', 'lastval', 'random', 'random_normal', \
     'gen_random_uuid', 'clock_timestamp', 'timeofday', \
     'uuid_generate_v1', 'uuid_generate_v1mc', 'uuid_generate_v4', \
     'gen_random_bytes', 'gen_salt', \
     'pgp_sym_encrypt', 'pgp_sym_encrypt_bytea', 'pgp_pub_encrypt', 'pgp_pub_encrypt_bytea'";

/// Forbidden object types, as (label, catalog, name column, condition). Only oids from 16384 are checked, since initdb
/// assigns the lower ones. Large objects are checked separately.
const FORBIDDEN_OBJECTS: [(&str, &str, &str, &str); 23] = [
    ("function", "pg_proc", "proname", ""),
    ("operator", "pg_operator", "oprname", ""),
    ("operator class", "pg_opclass", "opcname", ""),
    ("operator family", "pg_opfamily", "opfname", ""),
    ("access method", "pg_am", "amname", ""),
    ("cast", "pg_cast", "oid", ""),
    ("conversion", "pg_conversion", "conname", ""),
    ("language", "pg_language", "lanname", ""),
    ("transform", "pg_transform", "oid", ""),
    ("foreign-data wrapper", "pg_foreign_data_wrapper", "fdwname", ""),
    ("foreign server", "pg_foreign_server", "srvname", ""),
    ("event trigger", "pg_event_trigger", "evtname", ""),
    ("publication", "pg_publication", "pubname", ""),
    ("row security policy", "pg_policy", "polname", ""),
    ("default privilege", "pg_default_acl", "oid", ""),
    ("text search parser", "pg_ts_parser", "prsname", ""),
    ("text search template", "pg_ts_template", "tmplname", ""),
    ("text search dictionary", "pg_ts_dict", "dictname", ""),
    ("text search configuration", "pg_ts_config", "cfgname", ""),
    ("trigger", "pg_trigger", "tgname", "NOT o.tgisinternal"),
    ("rule or view", "pg_rewrite", "rulename", ""),
    // Allowed: composite types, enum types, domains, and array types.
    (
        "type",
        "pg_type",
        "typname",
        "o.typtype NOT IN ('c', 'e', 'd') AND NOT (o.typtype = 'b' AND o.typcategory = 'A')",
    ),
    // Allowed: tables, sequences, indexes, composite types and TOAST tables; in the gateway's schema, only ordinary
    // tables, sequences and indexes.
    (
        "relation",
        "pg_class",
        "relname",
        "(o.relkind NOT IN ('r', 'p', 'S', 'i', 'I', 'c', 't') \
          OR o.relnamespace = to_regnamespace('svc') AND o.relkind NOT IN ('r', 'S', 'i'))",
    ),
];

/// Catalog columns that hold expressions, as (catalog, object name, column).
const EXPRESSION_COLUMNS: [(&str, &str, &str); 7] = [
    ("pg_attrdef", "adrelid::regclass", "adbin"),
    ("pg_constraint", "conname", "conbin"),
    ("pg_index", "indexrelid::regclass", "indexprs"),
    ("pg_index", "indexrelid::regclass", "indpred"),
    ("pg_partitioned_table", "partrelid::regclass", "partexprs"),
    ("pg_statistic_ext", "stxname", "stxexprs"),
    ("pg_type", "typname", "typdefaultbin"),
];

/// ACLs, as (catalog, owner, ACL column, name, condition). The archive's ACL entries aren't loaded, so privileges of
/// any role but the owner were granted by other SQL in the archive.
const ACL_COLUMNS: [(&str, &str, &str, &str, &str); 5] = [
    ("pg_database", "o.datdba", "o.datacl", "'database'", "o.datname = current_database()"),
    ("pg_class", "o.relowner", "o.relacl", "o.relname", "o.oid >= 16384"),
    ("pg_type", "o.typowner", "o.typacl", "o.typname", "o.oid >= 16384"),
    (
        "pg_namespace",
        "o.nspowner",
        "o.nspacl",
        "o.nspname",
        "(o.oid >= 16384 OR o.nspname = 'public') \
         AND NOT (o.nspname = 'public' AND a.grantee = 0 AND a.privilege_type = 'USAGE')",
    ),
    (
        "pg_attribute",
        "(SELECT relowner FROM pg_class WHERE oid = o.attrelid)",
        "o.attacl",
        "o.attname",
        "o.attrelid >= 16384",
    ),
];

/// Returns a description of one forbidden object, such as `function f`, if any.
///
/// # Errors
/// If a query fails.
pub async fn find_forbidden_object(client: &Client) -> Result<Option<String>, Error> {
    // Objects from the archive must not shadow built-in names.
    client.batch_execute("SET search_path = pg_catalog").await?;
    let row = client.query_opt(&build_forbidden_query(), &[]).await?;
    row.map(|row| row.try_get(0)).transpose()
}

fn build_forbidden_query() -> String {
    let mut sql = "WITH member AS (SELECT classid, objid FROM pg_depend WHERE deptype = 'e')".to_owned();
    let mut parts = Vec::new();
    for (label, catalog, name, condition) in FORBIDDEN_OBJECTS {
        let condition = if condition.is_empty() { "true" } else { condition };
        parts.push(format!(
            "SELECT '{label} ' || quote_ident(o.{name}::text) FROM {catalog} o WHERE o.oid >= 16384 AND {condition} \
                AND NOT EXISTS (SELECT FROM member m WHERE m.classid = '{catalog}'::regclass AND m.objid = o.oid)"
        ));
    }
    // `lo_create` accepts any oid, even one below 16384, and a new database has no large objects.
    parts.push("SELECT 'large object ' || oid FROM pg_largeobject_metadata".to_owned());
    parts.push(
        "SELECT 'extension ' || quote_ident(extname) FROM pg_extension \
          WHERE extowner <> (SELECT oid FROM pg_roles WHERE rolname = current_user)"
            .to_owned(),
    );
    for (catalog, owner, acl, name, condition) in ACL_COLUMNS {
        parts.push(format!(
            "SELECT 'grant on ' || quote_ident({name}) FROM {catalog} o CROSS JOIN aclexplode({acl}) a \
              WHERE a.grantee <> {owner} AND {condition}{}",
            if catalog == "pg_attribute" {
                String::new()
            } else {
                format!(
                    " AND NOT EXISTS (SELECT FROM member m WHERE m.classid = '{catalog}'::regclass AND m.objid = o.oid)"
                )
            }
        ));
    }
    for (catalog, name, column) in EXPRESSION_COLUMNS {
        parts.push(format!(
            "SELECT 'expression of ' || {name}::text || ' that calls ' || p.proname \
               FROM {catalog} o \
               CROSS JOIN regexp_matches(o.{column}::text, \
                    ':(?:funcid|opfuncid|aggfnoid|winfnoid|hashfuncid|negfuncid) ([0-9]+)', 'g') f \
               JOIN pg_proc p ON p.oid = f[1]::oid \
              WHERE p.provolatile = 'v' AND p.proname NOT IN ({ALLOWED_VOLATILE_FUNCTIONS})"
        ));
    }
    let _ = write!(sql, " SELECT * FROM ({}) found LIMIT 1", parts.join(" UNION ALL "));
    sql
}
