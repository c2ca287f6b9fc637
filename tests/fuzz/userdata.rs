//! User-data: for any values of the machine and the platform, cloud-init parses the intended document.
//!
//! A case is the input for a user-data document, as JSON; the parser is cloud-init's own.

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use futures_util::FutureExt;
use kit::checkers;
use proptest::prelude::*;
use serde_json::{Value, json};
use svc::config::parse_env_file;
use svc::platform::userdata::MAX_BYTES;

use super::Target;
use crate::userdata::{UserDataInput, parse_user_data};

pub fn user_data() -> Target {
    Target { name: "user-data", valid: inputs().boxed(), check_any, check_valid, cases: 60 }
}

/// Generates valid names, and arbitrary text where no format is specified.
fn inputs() -> impl Strategy<Value = Vec<u8>> {
    let user = "[A-Za-z0-9][A-Za-z0-9._|:@+-]{0,30}";
    let names = (user, "[a-z][a-z0-9]{1,20}", "[a-z][a-z0-9]{0,20}", "[0-9]{1,4}\\.[0-9]{1,3}");
    let path = "[^\\x00-\\x1f]{0,24}";
    let text = || prop_oneof![3 => "[^\\pC]{0,40}", 1 => any::<String>()];
    (names, path, text(), text(), text(), 1..4_usize).prop_map(
        |(names, path, token, issuer, digest, key_count)| {
            let (user, handle, slot, version) = names;
            let input = UserDataInput {
                user,
                handle,
                slot,
                version,
                bundle: format!("https://bundles.example/{path}"),
                session_token: token,
                issuer,
                bundle_sha256: digest,
                proof_keys: key_count,
                ..UserDataInput::typical()
            };
            serde_json::to_vec(&input).expect("plain fields serialize to JSON")
        },
    )
}

/// Checks that either the input is rejected, or cloud-init parses the intended document: the files that every machine
/// gets, and nothing that a value injected.
fn check_any(bytes: &[u8]) -> Result<(), String> {
    let Ok(input) = serde_json::from_slice::<UserDataInput>(bytes) else { return Ok(()) };
    if input.proof_keys > 1000 || input.bundle_keys > 1000 {
        return Ok(());
    }
    match render(&input) {
        Ok(text) => check_document(&input, &text),
        Err(_) => Ok(()),
    }
}

fn check_valid(bytes: &[u8]) -> Result<(), String> {
    let input: UserDataInput = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let is_storable = |text: &String| !text.chars().any(char::is_control);
    let values = [&input.session_token, &input.issuer, &input.bundle_sha256];
    let are_storable = values.into_iter().all(is_storable);
    match (are_storable, render(&input)) {
        (true, Ok(_)) | (false, Err(_)) => Ok(()),
        (true, Err(error)) => Err(format!("rejected: {error}")),
        (false, Ok(_)) => Err("a value with a control character was accepted".to_owned()),
    }
}

/// Renders the document, which completes immediately, because static credentials need no request.
fn render(input: &UserDataInput) -> Result<String, String> {
    let rendered = input.try_render().now_or_never().ok_or("rendering did not complete immediately")?;
    rendered.map_err(|error| format!("{error:#}"))
}

fn check_document(input: &UserDataInput, text: &str) -> Result<(), String> {
    if text.len() > MAX_BYTES {
        return Err(format!("the document has {} bytes, more than {MAX_BYTES}", text.len()));
    }
    let document = parse_user_data(text);
    let result = parse_with_cloud_init(text);
    if result != json!({ "parsed": document }) {
        return Err(format!("cloud-init parses it as {result}"));
    }
    let typical = parse_user_data(&render(&UserDataInput::typical())?);
    for key in ["bootcmd", "runcmd"] {
        if document[key] != typical[key] {
            return Err(format!("{key} is {}", document[key]));
        }
    }
    let files = |document: &Value| -> Vec<[Value; 3]> {
        let files = document["write_files"].as_array().cloned().unwrap_or_default();
        files
            .into_iter()
            .map(|file| ["path", "permissions", "owner"].map(|name| file[name].clone()))
            .collect()
    };
    if files(&document) != files(&typical) {
        return Err(format!("the files are {:?}", files(&document)));
    }
    let variables = collect_variables(&document)?;
    // `HostSettings` checks whether the bundle's URL belongs to the platform and may receive the token.
    let names = |variables: &[(String, String)]| -> Vec<String> {
        let names = variables.iter().map(|(name, _)| name.clone());
        names.filter(|name| name != "SVC_HOST_BUNDLE_WITH_TOKEN").collect()
    };
    let (actual, expected) = (names(&variables), names(&collect_variables(&typical)?));
    if actual != expected {
        return Err(format!("the variables are {actual:?}"));
    }
    for (name, value) in [
        ("SVC_USER_ID", &input.user),
        ("SVC_HANDLE", &input.handle),
        ("SVC_SLOT", &input.slot),
        ("SVC_IMAGE_VERSION", &input.version),
        ("AWS_SESSION_TOKEN", &input.session_token),
        ("IDP_ISSUER", &input.issuer),
        ("SVC_BUNDLE_SHA256", &input.bundle_sha256),
    ] {
        if !variables.iter().any(|(key, actual)| key == name && actual == value) {
            return Err(format!("{name} is not {value:?}"));
        }
    }
    Ok(())
}

/// Returns the variables of all env files, in order.
fn collect_variables(document: &Value) -> Result<Vec<(String, String)>, String> {
    let mut variables = Vec::new();
    for file in document["write_files"].as_array().into_iter().flatten() {
        let (Some(path), Some(content)) = (file["path"].as_str(), file["content"].as_str()) else { continue };
        if path.ends_with(".env") {
            variables.extend(parse_env_file(content).map_err(|line| format!("{path}, line {line}"))?);
        }
    }
    Ok(variables)
}

/// A cloud-init parser process, which a thread reuses for all its cases.
struct CloudInitParser {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl CloudInitParser {
    fn start(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("start Python");
        let (stdin, stdout) = (
            child.stdin.take().expect("the stream is piped"),
            child.stdout.take().expect("the stream is piped"),
        );
        Self { child, stdin, stdout: BufReader::new(stdout) }
    }

    fn parse(&mut self, text: &str) -> Value {
        writeln!(self.stdin, "{}", json!(text)).expect("the parser accepts input");
        let mut line = String::new();
        self.stdout.read_line(&mut line).expect("the parser responds");
        serde_json::from_str(&line).expect("the response is JSON")
    }
}

impl Drop for CloudInitParser {
    fn drop(&mut self) {
        // The process may already have exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn parse_with_cloud_init(text: &str) -> Value {
    thread_local! {
        static PARSER: RefCell<Option<CloudInitParser>> = const { RefCell::new(None) };
    }
    PARSER.with_borrow_mut(|parser| {
        let start =
            || CloudInitParser::start(checkers::cloud_init_parser().expect("cloud-init is installed"));
        parser.get_or_insert_with(start).parse(text)
    })
}
