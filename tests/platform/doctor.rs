//! Runs `svcctl doctor platform` against a test's stack.

use serde_json::Value;

use super::stack::{Process, Stack};

impl Stack {
    /// Runs `svcctl doctor platform` and returns one check's findings.
    pub async fn run_doctor(
        &self,
        process: &Process,
        check: &str,
        settings: impl IntoIterator<Item = (&'static str, String)>,
    ) -> String {
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_svc"));
        command.args(["svcctl", "doctor", "platform", "--json"]).env_clear().envs(self.settings());
        command.envs(settings);
        // No request leaves this machine.
        command.envs([
            ("PLATFORM_PUBLIC_URL", process.base.as_str()),
            ("IDP_JWKS_URL", "http://127.0.0.1:1/keys"),
        ]);
        let output = command.kill_on_drop(true).output().await.unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let report: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        let findings = report["findings"].as_array().unwrap().iter();
        let findings: Vec<String> = findings
            .filter(|finding| finding["check"] == check)
            .map(|finding| format!("{}: {}\n  {}", finding["level"], finding["what"], finding["next"]))
            .collect();
        findings.join("\n")
    }
}
