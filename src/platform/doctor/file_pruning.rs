//! Checks that the repositories of file backups are pruned. A repository that is not pruned grows, but no data is lost.

use crate::config::PlatformConfig;
use crate::db::Db;
use crate::db::files_keys::{self, PruningProblems};
use crate::file_pruning::PRUNE_TIMEOUT;
use svc_base::diagnosis::Findings;
use svc_base::quantity::pluralize;

/// Maximum number of failures that are listed.
const MAX_LISTED: i64 = 5;
/// A repository is overdue if its last prune ended longer ago than this number of intervals plus the maximum duration
/// of a prune.
const OVERDUE_INTERVALS: u32 = 3;

pub async fn check(config: &PlatformConfig) -> Findings {
    let findings = Findings::new("file-pruning");
    match find_problems(config).await {
        Ok(Some(problems)) => assess(findings, &problems, !config.timing.files_prune_interval.is_zero()),
        Ok(None) => findings.skipped("this release of svc-platform has not started yet"),
        Err(error) => findings.problem(format!("{error:#}"), "see the check `database`"),
    }
}

async fn find_problems(config: &PlatformConfig) -> anyhow::Result<Option<PruningProblems>> {
    let db = Db::new(&config.database, 1)?;
    let session = db.session().await?;
    if !files_keys::has_prune_ended_at_column(&session).await? {
        return Ok(None);
    }
    let max_age = config.timing.files_prune_interval * OVERDUE_INTERVALS + PRUNE_TIMEOUT;
    Ok(Some(files_keys::find_pruning_problems(&session, max_age, MAX_LISTED).await?))
}

fn assess(mut findings: Findings, problems: &PruningProblems, is_scheduled: bool) -> Findings {
    for (slot, error) in &problems.failures {
        findings = findings.warning(
            format!("the file backups of {slot} could not be pruned: {error}"),
            "the platform retries automatically; if the error names a damaged snapshot, delete its object in files/snapshots with \
             the store's tools; if a tree or chunk is not in the index, run `restic rebuild-index`; `svcctl files usage USER` \
             shows the last result",
        );
    }
    let unlisted = problems.failed.saturating_sub(problems.failures.len() as u64);
    if unlisted > 0 {
        findings = findings.warning(
            format!("the file backups of {} could not be pruned either", pluralize(unlisted, "other slot")),
            "resolve the warnings above, then run this check again",
        );
    }
    if !is_scheduled {
        return findings.warning(
            "FILES_PRUNE_SECONDS is 0: the repositories of file backups keep all snapshots and grow",
            "remove the setting, or request a prune with `svcctl files prune USER`",
        );
    }
    if problems.overdue > 0 {
        findings = findings.warning(
            format!("the file backups of {} are overdue for pruning", pluralize(problems.overdue, "slot")),
            "check svc-platform's log: a prune may need more memory, or more prunes may be due than the \
             platform's processes can complete",
        );
    }
    findings.or_ok(format!("the file backups of {} are pruned regularly", pluralize(problems.slots, "slot")))
}
