//! Each app has one login role. The gateway generates the role's password at each start, keeps it only in memory, and
//! sends only the password's SCRAM verifier in SQL: neither statement logs nor dumps contain the password.

use std::time::Duration;

use postgres_protocol::password::scram_sha_256;
use ring::rand::{SecureRandom, SystemRandom};
use secrecy::{ExposeSecret, SecretString};
use tokio_postgres::GenericClient;

use crate::name::SqlIdentifier;
use svc_host::snapshots::roles;

/// Generates a password.
///
/// # Errors
/// The system's random number generator fails.
pub fn generate_password() -> Result<SecretString, ring::error::Unspecified> {
    let mut bytes = [0_u8; 32];
    SystemRandom::new().fill(&mut bytes)?;
    Ok(SecretString::from(hex::encode(bytes)))
}

/// Creates the role if it is missing, and enables its login with `password`, because a restore creates the role without
/// login. A temporary role, created for a drill or the side database, becomes permanent. Errors in the role's sessions
/// are not written to the server's log, because their text contains row values; the gateway logs them without that
/// text.
///
/// # Errors
/// The database is unreachable or rejects a statement.
pub async fn enable_login(
    client: &impl GenericClient,
    role: &SqlIdentifier,
    password: &SecretString,
    statement_timeout: Duration,
) -> Result<(), tokio_postgres::Error> {
    let name = role.quoted();
    let mut sql = String::new();
    match roles::is_temporary(client, role.as_str()).await? {
        None => sql.push_str(&format!("CREATE ROLE {name};")),
        Some(true) => sql.push_str(&format!("COMMENT ON ROLE {name} IS NULL;")),
        Some(false) => {}
    }
    let verifier = scram_sha_256(password.expose_secret().as_bytes());
    sql.push_str(&format!(
        "ALTER ROLE {name} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOINHERIT NOREPLICATION NOBYPASSRLS \
           PASSWORD '{verifier}';
         ALTER ROLE {name} SET search_path = {name};
         ALTER ROLE {name} SET timezone = 'UTC';
         ALTER ROLE {name} SET datestyle = 'ISO, YMD';
         ALTER ROLE {name} SET extra_float_digits = 1;
         ALTER ROLE {name} SET bytea_output = 'hex';
         ALTER ROLE {name} SET client_min_messages = 'error';
         ALTER ROLE {name} SET log_min_messages = 'fatal';
         ALTER ROLE {name} SET log_error_verbosity = 'terse';
         ALTER ROLE {name} SET log_parameter_max_length = 0;
         ALTER ROLE {name} SET idle_in_transaction_session_timeout = '30s';
         ALTER ROLE {name} SET statement_timeout = {};",
        statement_timeout.as_millis()
    ));
    client.batch_execute(&sql).await
}
