//! The report of a `svcctl` command with `--json`, and assertions about its findings.

use std::path::Path;

use serde_json::Value;
use tokio::process::Command;

/// The exit code and output of a `--json` run.
pub struct Report {
    pub exit_code: Option<i32>,
    pub json: Value,
    pub text: String,
}

impl Report {
    pub fn levels(&self, check: &str) -> Vec<&str> {
        self.findings_of(check).filter_map(|finding| finding["level"].as_str()).collect()
    }

    pub fn findings_of(&self, check: &str) -> impl Iterator<Item = &Value> {
        let all = self.json["findings"].as_array().unwrap_or_else(|| panic!("{}", self.text));
        all.iter().filter(move |finding| finding["check"] == check)
    }

    /// Asserts that the check has a finding at this level that contains `part`. Warnings and problems, and only those,
    /// must have a next step. The exit code must be 65 if the report contains problems, and 0 otherwise.
    #[track_caller]
    pub fn expect(&self, check: &str, level: &str, part: &str) {
        let needs_next_step = matches!(level, "warning" | "problem");
        let has_finding = self.findings_of(check).any(|finding| {
            let what = finding["what"].as_str().unwrap_or_default();
            let has_next_step = finding["next"].is_string();
            finding["level"] == level && what.contains(part) && has_next_step == needs_next_step
        });
        assert!(has_finding, "no {level} from {check} with {part:?}: {}", self.text);
        let expected = if self.json["problems"] == 0 { 0 } else { 65 };
        assert_eq!(self.exit_code, Some(expected), "{}", self.text);
    }
}

/// Runs `svcctl` with these arguments and `--json`.
pub async fn run_report(svc: &Path, args: &[&str], env: &[(String, String)]) -> Report {
    let mut command = Command::new(svc);
    command.arg("svcctl").args(args).arg("--json").env_clear().envs(env.iter().cloned());
    let output = command.kill_on_drop(true).output().await.unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let printed = format!("{}{}", text(&output.stdout), text(&output.stderr));
    let json = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {printed}"));
    Report { exit_code: output.status.code(), json, text: printed }
}

/// Removes a variable from the text of an environment file.
pub fn unset_variable(text: &str, name: &str) -> String {
    let lines = text.lines().filter(|line| !line.starts_with(&format!("{name}=")));
    lines.fold(String::new(), |text, line| text + line + "\n")
}

/// Sets a variable in the text of an environment file.
pub fn set_variable(text: &str, name: &str, value: &str) -> String {
    unset_variable(text, name) + &svc::config::format_env_line(name, value)
}
