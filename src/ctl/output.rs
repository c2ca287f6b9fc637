//! Prints API responses, as text or as unmodified JSON.

use super::api::{ApiResponse, CallError};
use super::show::View;
use svc_base::applet::Failure;
use svc_base::stdout;

#[derive(Clone, Copy)]
pub struct Output {
    pub is_json: bool,
}

impl Output {
    /// # Errors
    /// If `format_text` can't parse the response, or writing to standard output fails.
    pub fn print_response(
        &self,
        response: &ApiResponse,
        format_text: impl FnOnce(&View) -> Result<String, CallError>,
    ) -> Result<(), Failure> {
        if self.is_json {
            print(&format!("{}\n", response.text.trim_end()))
        } else {
            print(&format_text(&View::for_stdout())?)
        }
    }
}

/// Prints to standard output. A closed pipe (as with `| head`) isn't an error.
///
/// # Errors
/// If writing fails for any other reason.
pub fn print(text: &str) -> Result<(), Failure> {
    stdout::print(text).map(|_| ())
}
