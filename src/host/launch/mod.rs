//! The owner's user interface, except for the apps: the shell and code-server. Both run as the owner's user and listen
//! on Unix sockets. They do not authenticate requests; the gateway does so before it forwards one.

pub mod code;
pub mod shell;
mod site;
