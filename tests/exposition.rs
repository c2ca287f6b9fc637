//! A strict parser for the Prometheus text format 0.0.4. It rejects malformed lines, undeclared or duplicate series,
//! duplicate labels, inconsistent histograms, and also what a scraper would accept: unknown comments, metrics without
//! help, and counters whose names do not end with `_total`. It does not support escapes in label values.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail, ensure};

/// A well-formed scrape.
#[derive(Debug, Default)]
pub struct Exposition {
    /// The type of each metric, by name.
    pub kinds: BTreeMap<String, String>,
    helps: BTreeSet<String>,
    /// The value of each series, by name with labels as written.
    pub samples: BTreeMap<String, f64>,
}

impl Exposition {
    /// Returns the value of the series with this name and these labels, as written.
    pub fn get(&self, series: &str) -> Option<f64> {
        self.samples.get(series).copied()
    }

    /// Parses a scrape.
    ///
    /// # Errors
    ///
    /// Fails if the last line has no newline, a line is malformed, or a histogram is inconsistent. The error names the
    /// line or the histogram.
    pub fn parse(text: &str) -> Result<Self> {
        let mut exposition = Self::default();
        ensure!(text.ends_with('\n'), "the last line has no newline");
        for line in text.lines().filter(|line| !line.is_empty()) {
            exposition.parse_line(line).with_context(|| line.to_owned())?;
        }
        exposition.check_histograms()?;
        Ok(exposition)
    }

    fn parse_line(&mut self, line: &str) -> Result<()> {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').context("no help text")?;
            ensure!(!help.trim().is_empty(), "an empty help text");
            ensure!(self.helps.insert(name.to_owned()), "a duplicate HELP line");
            return Ok(());
        }
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').context("no type")?;
            ensure!(["counter", "gauge", "histogram"].contains(&kind), "unsupported type {kind}");
            ensure!(self.helps.contains(name), "a TYPE line without a preceding HELP line");
            ensure!(self.kinds.insert(name.to_owned(), kind.to_owned()).is_none(), "a duplicate TYPE line");
            return Ok(());
        }
        ensure!(!line.starts_with('#'), "an unknown comment");
        let (series, value) = line.rsplit_once(' ').context("no value")?;
        let name = series.split('{').next().unwrap_or_default();
        let is_valid = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
        ensure!(!name.is_empty() && name.chars().all(is_valid), "an invalid metric name");
        let family = self.find_family(name).context("a sample without a preceding TYPE line")?;
        if self.kinds[&family] == "counter" {
            ensure!(name.ends_with("_total"), "a counter's name must end with _total");
        }
        check_labels(&series[name.len()..])?;
        let value: f64 = value.parse().context("the value is not a number")?;
        ensure!(self.samples.insert(series.to_owned(), value).is_none(), "a duplicate series");
        Ok(())
    }

    fn find_family(&self, name: &str) -> Option<String> {
        let suffixes = ["", "_bucket", "_sum", "_count"];
        let families = suffixes.iter().filter_map(|suffix| name.strip_suffix(suffix));
        let mut declared = families.filter(|family| {
            let kind = self.kinds.get(*family).map(String::as_str);
            kind.is_some_and(|kind| (kind == "histogram") == (name != *family))
        });
        declared.next().map(str::to_owned)
    }

    /// Checks that buckets are cumulative, and that the last one is `+Inf` and equals the count.
    fn check_histograms(&self) -> Result<()> {
        let mut histograms: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
        for (series, value) in self.samples.iter().filter(|(series, _)| series.contains("_bucket{")) {
            let (rest, bound) = series.rsplit_once("le=\"").context("a bucket without a bound")?;
            let bound = bound.trim_end_matches("\"}").replace("+Inf", "inf").parse()?;
            histograms.entry(rest.trim_end_matches([',', '{']).to_owned()).or_default().push((bound, *value));
        }
        for (series, mut buckets) in histograms {
            buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
            ensure!(buckets.is_sorted_by(|a, b| a.1 <= b.1), "{series}: the buckets are not cumulative");
            ensure!(buckets.last().is_some_and(|last| last.0.is_infinite()), "{series}: no +Inf bucket");
            let mut count = series.replacen("_bucket", "_count", 1);
            if count.contains('{') {
                count.push('}');
            }
            let count = self.get(&count).with_context(|| format!("{series}: no {count}"))?;
            ensure!(
                buckets.last().is_some_and(|last| last.1 == count),
                "{series}: the last bucket differs from the count"
            );
        }
        Ok(())
    }
}

fn check_labels(text: &str) -> Result<()> {
    if text.is_empty() {
        return Ok(());
    }
    let inner = text.strip_prefix('{').and_then(|text| text.strip_suffix('}')).context("unclosed braces")?;
    let mut names = BTreeSet::new();
    let mut rest = inner;
    while !rest.is_empty() {
        let (name, value) = rest.split_once("=\"").context("a label without a value")?;
        ensure!(names.insert(name), "a duplicate label: {name}");
        let Some(end) = value.find('"') else { bail!("an unclosed label value") };
        rest = value[end + 1..].trim_start_matches(',');
    }
    Ok(())
}

#[test]
fn malformed_exposition_is_rejected() {
    let good = "# HELP a_total An a.\n# TYPE a_total counter\na_total{b=\"c\"} 1\n";
    assert_eq!(Exposition::parse(good).unwrap().get("a_total{b=\"c\"}"), Some(1.0));
    for bad in [
        "a_total 1\n",
        "# TYPE a_total counter\na_total 1\n",
        "# HELP a_total An a.\n# TYPE a_total counter\na_total 1\na_total 2\n",
        "# HELP a_total An a.\n# TYPE a_total counter\na_total{b=\"c\",b=\"d\"} 1\n",
        "# HELP a An a.\n# TYPE a counter\na 1\n",
        "# HELP a_total An a.\n# TYPE a_total counter\na_total x\n",
        "# HELP h An h.\n# TYPE h histogram\nh_bucket{le=\"1\"} 2\nh_bucket{le=\"+Inf\"} 1\nh_sum 1\nh_count 1\n",
        "# HELP h An h.\n# TYPE h histogram\nh_bucket{le=\"1\"} 1\nh_bucket{le=\"+Inf\"} 1\nh_sum 1\nh_count 2\n",
    ] {
        assert!(Exposition::parse(bad).is_err(), "{bad}");
    }
}
