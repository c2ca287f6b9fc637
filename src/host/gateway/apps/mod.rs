//! The owner's apps: their directories and manifests, their registration as schemas, their pages and icons.

mod bundled;
mod column;
mod ddl;
mod describe;
mod directory;
mod directory_watcher;
mod foreign_origin;
mod icon;
mod list;
mod manifest;
mod pages;
mod quota;
mod register;
mod registry;
mod supervise;

pub use bundled::run_install;
pub use column::{Column, ColumnOrigin, ColumnType};
#[cfg(feature = "fuzzing")]
pub use ddl::registration_sql;
pub use describe::{FRONT_PAGE, FRONT_PAGE_REDIRECT, ICON, LIST, PAGE, app_schema_json};
pub use icon::serve_icon;
pub use list::list_apps;
#[cfg(any(test, feature = "fuzzing"))]
pub use manifest::Manifest;
pub use manifest::Table;
#[cfg(feature = "fuzzing")]
pub use pages::path_in_app;
pub use pages::{AppFiles, serve_page};
pub use quota::{ChangedRows, InFlightWrite, Quotas, WriteSize, measure_periodically};
pub use registry::{App, Registry};
pub use supervise::{SupervisorContext, supervise};
