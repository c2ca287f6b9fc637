//! Services shared by the applets on a machine: files and settings, PostgreSQL and its tools, systemd, the object
//! store, and what the platform assigned to this host.

pub mod activity;
pub mod app_sizes;
pub mod backoff;
pub mod blocking;
pub mod boot_progress;
pub mod certificate;
pub mod config;
pub mod disk_space;
pub mod epoch;
pub mod heartbeat_failure;
pub mod layout;
pub mod lock;
pub mod platform_response;
pub mod postgres;
pub mod postgres_tools;
pub mod probe;
pub mod process_stat;
pub mod progress;
pub mod quiesce;
pub mod registration;
pub mod release;
pub mod root_settings;
pub mod socket_service;
pub mod store;
pub mod store_credentials;
pub mod systemd;
pub mod tar_reader;
pub mod unix_socket;
pub mod upgrade_token;
pub mod user;
pub mod vars;
