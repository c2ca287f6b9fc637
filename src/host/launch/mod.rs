//! What the owner sees beside the apps: the shell, and the code server. Both run as the owner's user and answer on unix
//! sockets that the gateway alone connects to; who asks was settled there.

pub mod code;
pub mod shell;
mod site;
