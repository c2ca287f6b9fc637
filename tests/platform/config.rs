//! Starting: what is wrong with the configuration is said at once, with exit 78.

use std::process::{Command, Stdio};
use std::time::Duration;

use super::stack::Stack;

#[test]
fn all_mistakes_of_the_configuration_are_said_at_once() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_svc"));
    command
        .arg("svc-platform")
        .env_clear()
        .env("PLATFORM_KEY", "short-secret")
        .env("STORE_HOST_CREDENTIALS", "sts");
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(78));
    let text = String::from_utf8(output.stderr).unwrap();
    for name in
        ["PLATFORM_KEY", "PLATFORM_SECRET", "PLATFORM_DATABASE_URL", "PROVIDER_API_TOKEN", "STS_ROLE_ARN"]
    {
        assert!(text.contains(name), "{name}: {text}");
    }
    assert!(!text.contains("short-secret"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn another_platform_key_than_the_databases_is_a_mistake() {
    let stack = Stack::start().await;
    drop(stack.platform());
    let mut command = stack.command(&[("PLATFORM_KEY", &"08".repeat(32))]);
    let mut child = command.stdout(Stdio::null()).spawn().unwrap();
    let end = std::time::Instant::now() + Duration::from_secs(30);
    let status = kit::child::wait_until(&mut child, end);
    child.kill().ok();
    assert_eq!(status.and_then(|status| status.code()), Some(78), "{}", stack.log());
    assert!(stack.log().contains("PLATFORM_KEY"), "{}", stack.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_that_reach_every_slot_are_warned_about() {
    let stack = Stack::start().await;
    drop(stack.platform());
    assert!(!stack.log().contains("STORE_HOST_CREDENTIALS=static"), "{}", stack.log());
    drop(stack.platform_with(&[("STORE_HOST_CREDENTIALS", "static")]));
    assert!(stack.log().contains("STORE_HOST_CREDENTIALS=static"), "{}", stack.log());
}
