//! Limits on a platform process's database connections, by purpose.

use crate::vars;
use svc_base::config::Env;

/// Maximum number of database connections for one process, by purpose.
#[derive(Debug, Clone, Copy)]
pub struct ConnectionLimits {
    /// For operators' changes, operations and the reconciler.
    pub control: usize,
    /// For requests from hosts.
    pub hosts: usize,
    /// For operators' reports on the fleet.
    pub reports: usize,
    /// For the router's sessions. The router's polls use one more connection.
    pub router: usize,
}

impl ConnectionLimits {
    pub(super) fn read(env: &mut Env) -> Self {
        let mut limit = |variable| env.or_default::<usize>(variable).max(1);
        Self {
            control: limit(&vars::DATABASE_CONTROL_CONNECTIONS),
            hosts: limit(&vars::DATABASE_HOST_CONNECTIONS),
            reports: limit(&vars::DATABASE_REPORT_CONNECTIONS),
            router: limit(&vars::DATABASE_ROUTER_CONNECTIONS),
        }
    }
}
