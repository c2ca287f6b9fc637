//! Places where a test can stop the process: `FAILPOINTS="name=return(kill)"` kills it there with SIGKILL,
//! `name=1*return(kill)` once, `name=sleep(500)` delays, `name=return(error)` makes a step fail where it asks.
//!
//! Dev builds carry them, `dist` builds do not.

/// The variable, for processes that pass on a part of their environment.
#[cfg(feature = "failpoints")]
pub const VARIABLE: Option<&str> = Some("FAILPOINTS");
#[cfg(not(feature = "failpoints"))]
pub const VARIABLE: Option<&str> = None;

/// Reads `FAILPOINTS` once, at the start of the process.
pub fn arm() {
    #[cfg(feature = "failpoints")]
    std::mem::forget(fail::FailScenario::setup());
}

/// Passes a named place.
///
/// # Errors
/// [`Injected`] when the test asked for an error here.
pub fn pass(name: &str) -> Result<(), Injected> {
    #[cfg(feature = "failpoints")]
    if let Some(injected) = fail::eval(name, |action| match action.as_deref() {
        Some("kill") => {
            // The process ends in this call; there is nobody to tell if it does not.
            let _ = nix::sys::signal::kill(nix::unistd::Pid::this(), nix::sys::signal::Signal::SIGKILL);
            std::process::abort();
        }
        _ => Injected { name: name.to_owned() },
    }) {
        return Err(injected);
    }
    #[cfg(not(feature = "failpoints"))]
    let _ = name;
    Ok(())
}

/// A failure that a test asked for.
#[derive(Debug, thiserror::Error)]
#[error("injected failure at {name}")]
pub struct Injected {
    pub name: String,
}
