//! Prints responses: the API's unchanged JSON, or text.

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
    /// If `format_text` cannot parse the response, or standard output cannot be written to.
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

/// Prints to standard output. A closed pipe, such as one to `head`, is not an error.
///
/// # Errors
/// If writing to standard output fails for another reason.
pub fn print(text: &str) -> Result<(), Failure> {
    stdout::print(text).map(|_| ())
}
