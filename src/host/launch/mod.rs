//! The owner's user interface, except for the apps: the shell and code-server. Both run as the owner's user and listen
//! on Unix sockets. Only the gateway connects to these, after it has authenticated the request.

pub mod code;
pub mod shell;
mod site;
