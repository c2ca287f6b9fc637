//! At startup, all configuration errors are reported together, with exit code 78, and risky settings log a warning.
//! Settings can also be read from a file.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use super::stack::Stack;

#[test]
fn all_configuration_errors_are_reported_at_once() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_svc"));
    command
        .arg("svc-platform")
        .env_clear()
        .env("PLATFORM_KEY", "short-secret")
        .env("PROVIDER_PROJECT", OsStr::from_bytes(b"\xff"))
        .env("STORE_HOST_CREDENTIALS", "sts");
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(78));
    let text = String::from_utf8(output.stderr).unwrap();
    for name in
        ["PLATFORM_KEY", "PLATFORM_SECRET", "PLATFORM_DATABASE_URL", "PROVIDER_API_TOKEN", "STS_ROLE_ARN"]
    {
        assert!(text.contains(name), "{name}: {text}");
    }
    assert!(text.contains("PROVIDER_PROJECT: must be UTF-8"), "{text}");
    assert!(!text.contains("short-secret"), "{text}");
}

#[test]
fn invalid_log_filter_is_reported() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_svc"));
    command.arg("svc-platform").env_clear().env("RUST_LOG", "svc=loud");
    let output = command.stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("invalid RUST_LOG:") && text.contains("using info"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn platform_key_that_differs_from_the_database_is_rejected() {
    let stack = Stack::start().await;
    drop(stack.start_platform());
    let mut command = stack.command(&[("PLATFORM_KEY", &"08".repeat(32))]);
    let mut child = command.stdout(Stdio::null()).spawn().unwrap();
    let deadline = std::time::Instant::now() + Duration::from_secs(30);
    let status = kit::child::wait_until(&mut child, deadline);
    child.kill().ok();
    assert_eq!(status.and_then(|status| status.code()), Some(78), "{}", stack.log());
    assert!(stack.log().contains("PLATFORM_KEY"), "{}", stack.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn shared_store_credentials_log_a_warning() {
    let stack = Stack::start().await;
    drop(stack.start_platform());
    assert!(!stack.log().contains("STORE_HOST_CREDENTIALS=static"), "{}", stack.log());
    drop(stack.start_platform_with(&[("STORE_HOST_CREDENTIALS", "static")]));
    assert!(stack.log().contains("STORE_HOST_CREDENTIALS=static"), "{}", stack.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn host_domain_in_the_same_site_as_app_host_logs_a_warning() {
    let stack = Stack::start().await;
    let hosts = [("APP_HOST", "app.example.com"), ("CODE_HOST", "code.example.org:8443")];
    let sign_in = ("IDP_SIGN_IN_URL", "https://Login.Example.com/sign-in");
    let env_with_domain = |domain: &'static str| [hosts[0], hosts[1], sign_in, ("HOST_DOMAIN", domain)];
    let find_same_site_problems = async |domain: &'static str| {
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_svc"));
        command.args(["svcctl", "doctor", "platform", "--json"]).env_clear();
        command.envs(stack.settings()).envs(env_with_domain(domain)).kill_on_drop(true);
        let output = command.output().await.unwrap();
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let findings = report["findings"].as_array().unwrap().iter();
        let same_site =
            findings.filter(|finding| finding["what"].as_str().unwrap().contains("the same site"));
        same_site.cloned().collect::<Vec<_>>()
    };
    assert_eq!(find_same_site_problems("hosts.example.net").await, [] as [Value; 0]);
    drop(stack.start_platform_with(&env_with_domain("hosts.example.net")));
    assert!(!stack.log().contains("the same site"), "{}", stack.log());

    let warnings = find_same_site_problems("hosts.example.com").await;
    assert_eq!(
        (warnings.len(), &warnings[0]["check"], &warnings[0]["level"]),
        (1, &json!("configuration"), &json!("warning"))
    );
    let (what, next) = (warnings[0]["what"].as_str().unwrap(), warnings[0]["next"].as_str().unwrap());
    let warning = "HOST_DOMAIN (hosts.example.com) belongs to the same site (example.com) as APP_HOST and IDP_SIGN_IN_URL:";
    assert!(what.starts_with(warning) && next.contains("certificates.md"), "{warnings:?}");
    drop(stack.start_platform_with(&env_with_domain("hosts.example.com")));
    assert!(stack.log().contains(warning), "{}", stack.log());
}

/// As in the container, the service and its health check read the same file.
#[tokio::test(flavor = "multi_thread")]
async fn service_and_probe_read_settings_from_the_named_file() {
    let stack = Stack::start().await;
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let identity = svc::http::tls::generate_self_signed(&["platform.example".to_owned()]).unwrap();
    std::fs::write(path("cert.pem"), &identity.cert_pem).unwrap();
    std::fs::write(path("key.pem"), &identity.key_pem).unwrap();
    let listen = format!("127.0.0.1:{}", kit::net::free_port().unwrap());
    let changes = [
        ("PLATFORM_LISTEN", listen.clone()),
        ("PLATFORM_TLS_CERT_FILE", path("cert.pem")),
        ("PLATFORM_TLS_KEY_FILE", path("key.pem")),
    ];
    let unchanged = stack.settings().into_iter().filter(|(name, _)| name != "PLATFORM_LISTEN");
    let lines = unchanged.chain(changes.map(|(name, value)| (name.to_owned(), value)));
    let lines: String = lines.map(|(name, value)| svc::config::format_env_line(&name, &value)).collect();
    std::fs::write(path("platform.env"), lines).unwrap();

    let mut command = stack.command(&[]);
    command.env_clear().env("PLATFORM_ENV_FILE", path("platform.env"));
    let process = stack.start_process(command);
    assert_eq!(process.base, format!("https://{listen}"));
    let run_probe = || {
        let mut probe = Command::new(env!("CARGO_BIN_EXE_svc"));
        probe.args(["svc-platform", "probe"]).env_clear().env("PLATFORM_ENV_FILE", path("platform.env"));
        probe.output().unwrap()
    };
    // The service is ready once its routes are loaded.
    let mut probe_output = run_probe();
    for _ in 0..100 {
        if probe_output.status.success() {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        probe_output = run_probe();
    }
    assert!(probe_output.status.success(), "{}", String::from_utf8_lossy(&probe_output.stderr));
    drop(process);
    assert_eq!(run_probe().status.code(), Some(69));
}
