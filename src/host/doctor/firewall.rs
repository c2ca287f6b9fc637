//! Checks that the network rules that the first boot installs are loaded.

use std::path::Path;

use tokio::process::Command;

use crate::system::layout::Layout;
use svc_base::diagnosis::Findings;

const NEXT_STEP: &str = "run `systemctl restart nftables; journalctl -u nftables -n 20`";

pub async fn check(layout: &Layout) -> Findings {
    let findings = Findings::new("firewall");
    if layout.root() != Path::new("/") {
        return findings.skipped("SVC_ROOT is not /, and the network rules belong to the whole machine");
    }
    let listed = Command::new("nft").args(["list", "table", "inet", "svc"]).kill_on_drop(true).output().await;
    match listed {
        Ok(output) if output.status.success() => findings.ok("the network rules are loaded"),
        Ok(output) => {
            let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
            assess(findings, &stderr)
        }
        Err(error) => findings.skipped(format!("cannot run nft: {error}")),
    }
}

fn assess(findings: Findings, stderr: &str) -> Findings {
    if stderr.contains("Operation not permitted") {
        return findings.skipped("the network rules cannot be read; run the doctor as root");
    }
    let line = stderr.lines().next().unwrap_or("nft printed no error");
    let what = format!(
        "the table inet svc is not loaded: the owner's programs can reach the metadata address ({line})"
    );
    findings.problem(what, NEXT_STEP)
}

#[cfg(test)]
mod tests {
    use super::*;
    use svc_base::diagnosis::Level;

    #[test]
    fn missing_table_is_problem_unless_permission_is_denied() {
        let level = |stderr: &str| assess(Findings::new("firewall"), stderr).into_list()[0].level;
        assert_eq!(level("Error: No such file or directory\nlist table inet svc\n"), Level::Problem);
        assert_eq!(level("Operation not permitted (you must be root)\n"), Level::Skipped);
    }
}
