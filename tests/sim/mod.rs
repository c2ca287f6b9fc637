//! Tests the control plane under concurrent faults: several platform processes on one database, old and new hosts,
//! faults in the provider, the store and the database, crashes, duplicate requests and clock advances, all chosen by
//! seeds.
//!
//! The platform runs its production code: routes, lifecycle, runner, reconciler, router, database. A seed
//! determines its plan: the actions, their order and delays, and the calls that fail. It does not determine how tasks
//! and the database interleave, so a failing seed may need several attempts to fail again.
//!
//! | file | content |
//! |---|---|
//! | `plan`, `rng` | a seed's plan |
//! | `simulation`, `run_database`, `process`, `kill_switch` | a run's simulated processes, and their database |
//! | `memory_provider`, `process_provider`, `run_provider` | the provider, in memory or over HTTP |
//! | `store`, `host` | the object store, and its writers other than the platform |
//! | `rows` | acknowledged rows and their locations |
//! | `action`, `ledger` | actions, and their responses |
//! | `database_state`, `check`, `violation` | the invariants |
//! | `run`, `runs`, `broken_rules` | runs of seeds, and runs with deliberately broken rules |
//! | `regressions` | handwritten plans |
//! | `campaign` | real processes under repeated kills |
//! | `fail_points` | checks that every fail point has a kill test |

mod action;
mod broken_rules;
mod campaign;
mod check;
mod database_state;
mod fail_points;
mod host;
mod kill_switch;
mod ledger;
mod memory_provider;
mod plan;
mod process;
mod process_provider;
mod regressions;
pub mod rng;
mod rows;
mod run;
mod run_database;
mod run_provider;
mod runs;
mod simulation;
mod store;
mod violation;
