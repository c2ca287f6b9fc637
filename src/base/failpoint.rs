//! Fail points for tests. `FAILPOINTS="name=return(kill)"` kills the process with SIGKILL at fail point `name`,
//! `name=2*off->return(kill)` kills it on the third hit, `name=sleep(500)` delays it by 500 ms, and
//! `name=return(error)` makes [`trigger`] return an error. Hits are counted per process.
//!
//! Enabled in dev builds, compiled out of `dist` builds.

/// Variable name, for processes that pass a filtered environment to their children. `None` in builds without fail
/// points.
#[cfg(feature = "failpoints")]
pub const VARIABLE: Option<&str> = Some(crate::vars::FAILPOINTS.name);
#[cfg(not(feature = "failpoints"))]
pub const VARIABLE: Option<&str> = None;

/// Arms the fail points in `FAILPOINTS`. Called once, at process startup.
pub fn arm() {
    #[cfg(feature = "failpoints")]
    std::mem::forget(fail::FailScenario::setup());
}

/// Triggers a fail point if a test has armed it.
///
/// # Errors
/// [`InjectedFailure`] if the test requested an error here.
pub fn trigger(name: &str) -> Result<(), InjectedFailure> {
    #[cfg(feature = "failpoints")]
    if let Some(injected) = fail::eval(name, |action| match action.as_deref() {
        Some("kill") => {
            // The process dies during this call. If the signal can't be sent, abort.
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

/// A failure injected by a test.
#[derive(Debug, thiserror::Error)]
#[error("injected failure at {name}")]
pub struct InjectedFailure {
    pub name: String,
}
