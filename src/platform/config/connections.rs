//! The numbers of database connections of a platform process, by purpose.

use svc_base::config::Env;

/// Maximum database connections of one process, by purpose.
#[derive(Debug, Clone, Copy)]
pub struct Connections {
    /// For operators' changes, operations and the reconciler.
    pub control: usize,
    /// For requests from hosts.
    pub hosts: usize,
    /// For operators' reports on the fleet.
    pub reports: usize,
    /// For sessions of the router.
    pub router: usize,
}

impl Connections {
    pub(super) fn read(env: &mut Env) -> Self {
        let mut limit = |name, default: usize| env.or(name, default).max(1);
        Self {
            control: limit("DATABASE_CONTROL_CONNECTIONS", 10),
            hosts: limit("DATABASE_HOST_CONNECTIONS", 8),
            reports: limit("DATABASE_REPORT_CONNECTIONS", 4),
            router: limit("DATABASE_ROUTER_CONNECTIONS", 10),
        }
    }
}
