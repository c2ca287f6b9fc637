//! The control plane as a whole under everything at once: several platform processes on one database, hosts old and
//! new, faults of provider, store and database, crashes, duplicates, time that passes; decided by seeds.
//!
//! The platform's code is the production's: routes, lifecycle, runner, reconciler, router, database. What a seed
//! decides is its plan: the actions, their order and pauses, and which calls fail how. How tasks and the database
//! interleave is not decided by it, so that a seed may need a few tries to fail again.
//!
//! | file | what it owns |
//! |---|---|
//! | `plan`, `rng` | a seed's plan |
//! | `seat`, `process`, `world` | a database, platform processes in this process, a run's world |
//! | `cloud`, `line`, `sky` | the provider, at the port or over HTTP |
//! | `store`, `host` | the object store and who writes to it besides the platform |
//! | `rows` | acknowledged rows, and where each is stored |
//! | `act`, `ledger` | actions, and what callers were told |
//! | `look`, `check`, `violation` | the invariants |
//! | `run`, `runs`, `broken` | seeds that hold, and rules that are broken on purpose |
//! | `found` | plans written by hand |
//! | `campaign` | real processes, killed again and again |
//! | `points` | that every fail point has a test that kills there |

mod act;
mod broken;
mod campaign;
mod check;
mod cloud;
mod found;
mod host;
mod ledger;
mod line;
mod look;
mod plan;
mod points;
mod process;
pub mod rng;
mod rows;
mod run;
mod runs;
mod seat;
mod sky;
mod store;
mod switch;
mod violation;
mod world;
