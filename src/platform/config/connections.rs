//! How many connections to the database a platform process opens, by what they are for.

use crate::config::Env;

/// The most connections to the database that one process opens, by what they are for.
#[derive(Debug, Clone, Copy)]
pub struct Connections {
    /// Operators' changes, operations, the reconciler.
    pub control: usize,
    /// What hosts send.
    pub hosts: usize,
    /// What operators read of the fleet.
    pub reports: usize,
    /// Sessions of the router.
    pub router: usize,
}

impl Connections {
    pub(super) fn read(env: &mut Env) -> Self {
        let mut most = |name, default: usize| env.or(name, default).max(1);
        Self {
            control: most("DATABASE_CONTROL_CONNECTIONS", 10),
            hosts: most("DATABASE_HOST_CONNECTIONS", 8),
            reports: most("DATABASE_REPORT_CONNECTIONS", 4),
            router: most("DATABASE_ROUTER_CONNECTIONS", 10),
        }
    }
}
