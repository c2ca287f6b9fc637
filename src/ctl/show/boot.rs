//! Text view of a host's first boot, as the host reports it.

use serde::Deserialize;

use super::View;
use super::human::{ago, seconds, size};
use svc_base::quantity::counted;

#[derive(Debug, Deserialize)]
pub struct Boot {
    pub stage: String,
    pub at: String,
    #[serde(default)]
    pub stages: Vec<BootStage>,
}

#[derive(Debug, Deserialize)]
pub struct BootStage {
    pub stage: String,
    pub at: String,
}

/// Progress of one stage: downloaded bytes and loaded rows.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BootProgress {
    pub stage: String,
    pub bytes: Option<u64>,
    pub total_bytes: Option<u64>,
    pub rows: Option<u64>,
    pub total_rows: Option<u64>,
}

impl Boot {
    /// `bundle 0.4 s, database 1.2 s`; until the host has registered, the current stage with its progress.
    pub fn line(&self, view: &View, registered: Option<&String>, progress: Option<&BootProgress>) -> String {
        let ends = self.stages.iter().skip(1).map(|stage| Some(&stage.at)).chain([registered]);
        let took = |stage: &BootStage, end: &String| {
            Some(format!("{} {:.1} s", stage.stage, seconds(&stage.at, end)?.max(0.0)))
        };
        let stages: Vec<_> =
            self.stages.iter().zip(ends).filter_map(|(stage, end)| took(stage, end?)).collect();
        let stages = stages.join(", ");
        if registered.is_some() {
            return stages;
        }
        let far = progress.filter(|progress| progress.stage == self.stage).map(BootProgress::line);
        let far = far.map(|far| format!(": {far}")).unwrap_or_default();
        let now = format!("at {}, {}{far}", self.stage, ago(view.now, &self.at));
        if stages.is_empty() { now } else { format!("{now}; before: {stages}") }
    }
}

impl BootProgress {
    /// Percent of the current phase: rows are loaded after the download.
    pub fn percent(&self) -> Option<u64> {
        let of = |done: Option<u64>, total: Option<u64>| {
            let (done, total) = done.zip(total).filter(|(_, total)| *total > 0)?;
            Some((u128::from(done) * 100 / u128::from(total)).min(100) as u64)
        };
        of(self.rows, self.total_rows).or_else(|| of(self.bytes, self.total_bytes))
    }

    /// `42 %, 1.2 GiB of 2.9 GiB downloaded, 1200 of 4000 rows loaded`.
    pub fn line(&self) -> String {
        let mut parts = Vec::new();
        parts.extend(self.percent().map(|percent| format!("{percent} %")));
        parts.extend(self.bytes.map(|bytes| match self.total_bytes {
            Some(total) => format!("{} of {} downloaded", size(bytes), size(total)),
            None => format!("{} downloaded", size(bytes)),
        }));
        parts.extend(self.rows.map(|rows| match self.total_rows {
            Some(total) => format!("{rows} of {} loaded", counted(total, "row")),
            None => format!("{} loaded", counted(rows, "row")),
        }));
        parts.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percent_is_of_the_last_phase_with_a_total() {
        let far = |bytes, total_bytes, rows, total_rows| {
            let stage = "restore".to_owned();
            BootProgress { stage, bytes, total_bytes, rows, total_rows }
        };
        let downloading = far(Some(1 << 30), Some(4 << 30), None, None);
        assert_eq!(downloading.line(), "25 %, 1.0 GiB of 4.0 GiB downloaded");
        let loading = far(Some(4096), Some(4096), Some(900), Some(1000));
        assert_eq!(loading.line(), "90 %, 4.0 KiB of 4.0 KiB downloaded, 900 of 1000 rows loaded");
        assert_eq!(far(Some(5), Some(0), None, None).percent(), None);
        assert_eq!(far(Some(u64::MAX), Some(1), None, None).percent(), Some(100));
        assert_eq!(far(None, None, Some(7), None).line(), "7 rows loaded");
        assert_eq!(far(None, None, Some(1), None).line(), "1 row loaded");
        assert_eq!(far(None, None, Some(1), Some(1)).line(), "100 %, 1 of 1 row loaded");
    }
}
