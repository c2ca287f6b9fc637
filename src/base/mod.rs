//! Code that the other packages share: clock, configuration, files, telemetry, metrics, fail points, and the applet
//! framework.

pub mod accounts;
pub mod applet;
pub mod beneath;
pub mod clock;
pub mod config;
pub mod diagnosis;
pub mod error_chain;
pub mod failpoint;
pub mod fsx;
pub mod log_line;
pub mod manual;
pub mod metrics;
pub mod partial_file;
pub mod quantity;
pub mod stdout;
pub mod telemetry;
pub mod untrusted_text;
pub mod variable;
pub mod vars;
