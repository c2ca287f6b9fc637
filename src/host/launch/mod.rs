//! The owner's user interface besides the apps: the shell and the code server. Both run as the owner's user and
//! listen on unix sockets that only the gateway connects to, after it has authenticated the request.

pub mod code;
pub mod shell;
mod site;
