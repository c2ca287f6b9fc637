//! Reads the properties of a database's tables that determine how rows are copied.

use tokio_postgres::{Error, GenericClient};

use super::plan::Column;

/// Session settings for reading and copying: the owner's settings must not change the result, and no statement or
/// idle timeout applies.
pub const SESSION_SETTINGS: &str = "SET search_path = pg_catalog; SET row_security = off; SET statement_timeout = 0; \
     SET idle_in_transaction_session_timeout = 0; SET idle_session_timeout = 0; SET client_encoding = 'UTF8'; \
     SET datestyle = 'ISO, YMD'; SET intervalstyle = 'postgres'; SET bytea_output = 'hex'; \
     SET extra_float_digits = 1; SET xmlbinary = 'base64'; \
     SET default_transaction_isolation = 'read committed'; SET default_transaction_read_only = off";

/// Returns whether an ordinary table exists. `table` is `schema.table`, quoted where needed, as in all functions here.
///
/// # Errors
/// If the query fails.
pub async fn is_table(client: &impl GenericClient, table: &str) -> Result<bool, Error> {
    let query = "SELECT EXISTS (SELECT FROM pg_class WHERE oid = to_regclass($1) AND relkind = 'r')";
    client.query_one(query, &[&table]).await?.try_get(0)
}

/// Reads the columns of a table, in the table's order.
///
/// # Errors
/// If the query fails.
pub async fn read_columns(client: &impl GenericClient, table: &str) -> Result<Vec<Column>, Error> {
    let query = "
        SELECT a.attname::text, format_type(a.atttypid, a.atttypmod),
               coalesce(a.attnum = ANY (k.conkey), false), a.attgenerated <> '', a.attidentity = 'a'
          FROM pg_attribute a
          LEFT JOIN pg_constraint k ON k.conrelid = a.attrelid AND k.contype = 'p'
         WHERE a.attrelid = to_regclass($1) AND a.attnum > 0 AND NOT a.attisdropped
         ORDER BY a.attnum";
    let column = |row: &tokio_postgres::Row| {
        Ok(Column {
            name: row.try_get(0)?,
            data_type: row.try_get(1)?,
            is_key: row.try_get(2)?,
            is_generated: row.try_get(3)?,
            is_always_identity: row.try_get(4)?,
        })
    };
    client.query(query, &[&table]).await?.iter().map(column).collect()
}

/// A foreign key of the table `from` that refers to the table `to`.
pub struct ForeignKey {
    pub from: String,
    pub to: String,
    /// Whether deleting a row of `to` also deletes or changes the rows of `from` that refer to it.
    pub is_cascading: bool,
    /// The condition under which the row `o` of `from` refers to the row `t` of `to`.
    pub condition: String,
}

/// Reads the foreign keys that refer to one of these tables.
///
/// # Errors
/// If the query fails.
pub async fn read_foreign_keys(client: &impl GenericClient, to: &[&str]) -> Result<Vec<ForeignKey>, Error> {
    let query = "
        SELECT format('%I.%I', fn.nspname, f.relname), t.name, k.confdeltype IN ('c', 'n', 'd'),
               (SELECT string_agg(format('t.%I OPERATOR(%I.%s) o.%I', p.attname, n.nspname, q.oprname, c.attname)
                                  || CASE WHEN p.attcollation <> c.attcollation AND p.attcollation <> 0
                                          THEN format(' COLLATE %I.%I', ln.nspname, l.collname) ELSE '' END, ' AND ')
                  FROM unnest(k.confkey, k.conkey, k.conpfeqop) AS u (parent, child, equal)
                  JOIN pg_attribute p ON p.attrelid = k.confrelid AND p.attnum = u.parent
                  JOIN pg_attribute c ON c.attrelid = k.conrelid AND c.attnum = u.child
                  JOIN pg_operator q ON q.oid = u.equal JOIN pg_namespace n ON n.oid = q.oprnamespace
                  LEFT JOIN pg_collation l ON l.oid = p.attcollation
                  LEFT JOIN pg_namespace ln ON ln.oid = l.collnamespace)
          FROM unnest($1::text[]) AS t (name)
          JOIN pg_constraint k ON k.confrelid = to_regclass(t.name) AND k.contype = 'f'
          JOIN pg_class f ON f.oid = k.conrelid JOIN pg_namespace fn ON fn.oid = f.relnamespace";
    let foreign_key = |row: &tokio_postgres::Row| {
        let (from, to, is_cascading) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
        Ok(ForeignKey { from, to, is_cascading, condition: row.try_get(3)? })
    };
    client.query(query, &[&to]).await?.iter().map(foreign_key).collect()
}

/// Returns whether a table has a deferrable unique or exclusion constraint, which `ON CONFLICT` does not support.
///
/// # Errors
/// If the query fails.
pub async fn has_deferrable_unique(client: &impl GenericClient, table: &str) -> Result<bool, Error> {
    let query = "SELECT EXISTS (SELECT FROM pg_index WHERE indrelid = to_regclass($1) AND NOT indimmediate)";
    client.query_one(query, &[&table]).await?.try_get(0)
}

/// Builds statements that advance the sequences of a table's columns, so that they do not generate values that already
/// exist. Values beyond a sequence's bounds are ignored, because it cannot generate them. A sequence whose column is
/// not numeric is left out, because its value is only a part of the column's, as in `'A-' || nextval(…)`.
///
/// # Errors
/// If the query fails.
pub async fn build_sequence_updates(client: &impl GenericClient, table: &str) -> Result<Vec<String>, Error> {
    let query = "
        SELECT format('SELECT setval(%L, m) FROM %I.%I AS s,
                              (SELECT %s(%I)::bigint AS m FROM %s WHERE %I BETWEEN %L::bigint AND %L::bigint) AS t
                        WHERE m %s s.last_value OR (m = s.last_value AND NOT s.is_called)',
                      format('%I.%I', n.nspname, q.relname), n.nspname, q.relname,
                      CASE WHEN s.seqincrement > 0 THEN 'max' ELSE 'min' END, a.attname, $1::text,
                      a.attname, s.seqmin, s.seqmax, CASE WHEN s.seqincrement > 0 THEN '>' ELSE '<' END)
          FROM pg_depend d
          JOIN pg_sequence s ON s.seqrelid = d.objid
          JOIN pg_class q ON q.oid = s.seqrelid
          JOIN pg_namespace n ON n.oid = q.relnamespace
          JOIN pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
          JOIN pg_type t ON t.oid = a.atttypid
         WHERE d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_class'::regclass
           AND d.refobjid = to_regclass($1) AND d.deptype IN ('a', 'i')
           AND coalesce(nullif(t.typbasetype, 0), t.oid)
               IN ('int2'::regtype, 'int4'::regtype, 'int8'::regtype, 'numeric'::regtype)";
    client.query(query, &[&table]).await?.iter().map(|row| row.try_get(0)).collect()
}

/// Reads the name and the owner of a table's schema.
///
/// # Errors
/// If the query fails, or the table does not exist.
pub async fn read_schema(client: &impl GenericClient, table: &str) -> Result<(String, String), Error> {
    let query = "
        SELECT n.nspname::text, r.rolname::text FROM pg_class c
          JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_roles r ON r.oid = n.nspowner
         WHERE c.oid = to_regclass($1)";
    let row = client.query_one(query, &[&table]).await?;
    Ok((row.try_get(0)?, row.try_get(1)?))
}
