//! The owner's coding agents: how their programs are started ([`adapters`]), dispatches and their queue ([`dispatch`]),
//! `svc-agent`, which runs one of them ([`runner`]), the limits of cost ([`budget`]) and the owner's settings
//! ([`owner_config`]).

pub mod adapters;
pub mod bridge_tokens;
pub mod budget;
pub mod dispatch;
pub mod kernel;
pub mod live_settings;
pub mod owner_config;
pub mod protocol;
pub mod runner;
