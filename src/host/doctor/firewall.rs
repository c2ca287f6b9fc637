//! The network rules of the first boot: whether they are loaded.

use std::path::Path;

use tokio::process::Command;

use crate::diagnosis::Findings;
use crate::host::system::layout::Layout;

const NEXT: &str = "systemctl restart nftables; journalctl -u nftables -n 20";

pub async fn check(layout: &Layout) -> Findings {
    let findings = Findings::of("firewall");
    if layout.root() != Path::new("/") {
        return findings.skipped("the rules are a machine's, and this is a directory");
    }
    let listed = Command::new("nft").args(["list", "table", "inet", "svc"]).kill_on_drop(true).output().await;
    match listed {
        Ok(output) if output.status.success() => findings.ok("the network rules are loaded"),
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            judge(findings, &said)
        }
        Err(error) => findings.skipped(format!("nft: {error}")),
    }
}

fn judge(findings: Findings, said: &str) -> Findings {
    if said.contains("Operation not permitted") {
        return findings.skipped("run this as root");
    }
    let line = said.lines().next().unwrap_or("nft says nothing");
    let why = format!(
        "the table inet svc is not loaded: the metadata address is open to the owner's programs ({line})"
    );
    findings.problem(why, NEXT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnosis::Level;

    #[test]
    fn a_table_that_is_not_there_is_a_problem_and_no_right_to_look_is_none() {
        let level = |said: &str| judge(Findings::of("firewall"), said).into_list()[0].level;
        assert_eq!(level("Error: No such file or directory\nlist table inet svc\n"), Level::Problem);
        assert_eq!(level("Operation not permitted (you must be root)\n"), Level::Skipped);
    }
}
