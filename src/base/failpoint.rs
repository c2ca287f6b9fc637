//! Fail points for tests: `FAILPOINTS="name=return(kill)"` kills the process at the fail point `name` with SIGKILL,
//! `name=2*off->return(kill)` kills it the third time, `name=sleep(500)` delays it by 500 ms, and `name=return(error)`
//! makes [`trigger`] return an error there. Each process counts separately.
//!
//! Dev builds contain fail points; `dist` builds do not.

/// The variable's name, for processes that pass only part of their environment to their children. `None` in a build
/// without fail points.
#[cfg(feature = "failpoints")]
pub const VARIABLE: Option<&str> = Some(crate::vars::FAILPOINTS.name);
#[cfg(not(feature = "failpoints"))]
pub const VARIABLE: Option<&str> = None;

/// Sets the fail points from `FAILPOINTS`; called once, when the process starts.
pub fn arm() {
    #[cfg(feature = "failpoints")]
    std::mem::forget(fail::FailScenario::setup());
}

/// Triggers the fail point if a test has set it.
///
/// # Errors
/// [`InjectedFailure`] if the test requested an error here.
pub fn trigger(name: &str) -> Result<(), InjectedFailure> {
    #[cfg(feature = "failpoints")]
    if let Some(injected) = fail::eval(name, |action| match action.as_deref() {
        Some("kill") => {
            // The process ends during this call; if the signal cannot be sent, it aborts.
            let _ = nix::sys::signal::kill(nix::unistd::Pid::this(), nix::sys::signal::Signal::SIGKILL);
            std::process::abort();
        }
        _ => InjectedFailure { name: name.to_owned() },
    }) {
        return Err(injected);
    }
    #[cfg(not(feature = "failpoints"))]
    let _ = name;
    Ok(())
}

/// A failure requested by a test.
#[derive(Debug, thiserror::Error)]
#[error("injected failure at {name}")]
pub struct InjectedFailure {
    pub name: String,
}
