//! What the gateway's handlers share.

use std::sync::Arc;

use super::apps::Registry;
use super::auth::Seam;
use super::config::Config;
use super::database::Database;

/// One running gateway.
pub struct Gateway {
    pub config: Config,
    pub seam: Seam,
    pub database: Arc<Database>,
    pub apps: Registry,
}

impl Gateway {
    pub fn new(config: Config) -> Arc<Self> {
        let seam = Seam::new(&config);
        let database = Arc::new(Database::new(&config));
        Arc::new(Self { config, seam, database, apps: Registry::default() })
    }
}
