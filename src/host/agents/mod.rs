//! The owner's coding agents: their programs ([`adapters`]), the dispatch queue ([`dispatch`]), `svc-agent`, which runs
//! one agent ([`runner`]), cost limits ([`budget`]) and the owner's settings ([`owner_config`]).

pub mod adapters;
pub mod bridge_tokens;
pub mod budget;
mod config_names;
pub mod dispatch;
pub mod kernel;
pub mod live_settings;
pub mod owner_config;
pub mod protocol;
pub mod runner;
