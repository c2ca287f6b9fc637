//! Samples per round, their medians and spread, and whether a target is met.
//!
//! This module does no I/O. A ratio is the median of the per-round ratios, because a disturbance during a round affects
//! both sides.

use std::collections::BTreeMap;

/// A figure's expected value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Target {
    /// Our value divided by the peer's.
    RatioAtLeast(f64),
    RatioAtMost(f64),
    /// Our value, in the row's unit.
    AtLeast(f64),
    AtMost(f64),
    /// No target: the figure is reported only for comparison.
    None,
}

/// One row of a report: the product's figure next to one peer's.
#[derive(Debug, Clone, Copy)]
pub struct Spec {
    pub name: &'static str,
    pub unit: &'static str,
    pub against: Option<&'static str>,
    pub target: Target,
}

/// The name of the product's side.
pub const PRODUCT: &str = "svc";

/// The samples from all rounds, by figure and side.
#[derive(Debug, Default)]
pub struct Tally {
    samples: BTreeMap<(&'static str, &'static str), Vec<f64>>,
}

/// The median, and half the interquartile range as a percentage of the median.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Figure {
    pub median: f64,
    pub spread_percent: f64,
}

/// The figures measured for a [`Spec`].
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    pub name: &'static str,
    pub unit: &'static str,
    pub ours: Figure,
    pub against: Option<&'static str>,
    pub theirs: Option<Figure>,
    pub ratio: Option<f64>,
    pub target: Target,
    /// `None` if there is no target.
    pub is_met: Option<bool>,
}

impl Tally {
    pub fn add(&mut self, name: &'static str, side: &'static str, value: f64) {
        self.samples.entry((name, side)).or_default().push(value);
    }

    pub fn samples_of(&self, name: &'static str, side: &'static str) -> &[f64] {
        self.samples.get(&(name, side)).map_or(&[], Vec::as_slice)
    }

    /// Computes the row for a spec; `None` if one of its sides was not measured.
    pub fn row(&self, spec: &Spec) -> Option<Row> {
        let ours = self.samples_of(spec.name, PRODUCT);
        let ours_figure = Figure::from_samples(ours)?;
        let (theirs, ratio) = match spec.against {
            None => (None, None),
            Some(peer) => {
                let theirs = self.samples_of(spec.name, peer);
                let ratios: Vec<f64> =
                    ours.iter().zip(theirs).filter(|(_, t)| **t != 0.0).map(|(o, t)| o / t).collect();
                (Some(Figure::from_samples(theirs)?), median(&ratios))
            }
        };
        let is_met = spec.target.is_met(ours_figure.median, ratio);
        Some(Row {
            name: spec.name,
            unit: spec.unit,
            ours: ours_figure,
            against: spec.against,
            theirs,
            ratio,
            target: spec.target,
            is_met,
        })
    }
}

impl Target {
    fn is_met(self, ours: f64, ratio: Option<f64>) -> Option<bool> {
        match self {
            Self::RatioAtLeast(min) => Some(ratio.is_some_and(|ratio| ratio >= min)),
            Self::RatioAtMost(max) => Some(ratio.is_some_and(|ratio| ratio <= max)),
            Self::AtLeast(min) => Some(ours >= min),
            Self::AtMost(max) => Some(ours <= max),
            Self::None => None,
        }
    }

    /// Describes the target; returns an empty string if there is none.
    pub fn describe(self, unit: &str) -> String {
        match self {
            Self::RatioAtLeast(min) => format!("ratio ≥ {min}"),
            Self::RatioAtMost(max) => format!("ratio ≤ {max}"),
            Self::AtLeast(min) => format!("≥ {min} {unit}"),
            Self::AtMost(max) => format!("≤ {max} {unit}"),
            Self::None => String::new(),
        }
    }
}

impl Figure {
    pub fn from_samples(samples: &[f64]) -> Option<Self> {
        let median = median(samples)?;
        let (low, high) = (quantile(samples, 0.25)?, quantile(samples, 0.75)?);
        let spread_percent = if median == 0.0 { 0.0 } else { (high - low) / 2.0 / median.abs() * 100.0 };
        Some(Self { median, spread_percent })
    }
}

pub fn median(samples: &[f64]) -> Option<f64> {
    quantile(samples, 0.5)
}

/// Returns the quantile `q` (0 to 1), interpolated between the two nearest samples; `None` if there are no samples.
pub fn quantile(samples: &[f64], q: f64) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1)?;
    let position = q * last as f64;
    let (below, above) = (position.floor() as usize, position.ceil() as usize);
    Some(sorted[below] + (sorted[above] - sorted[below]) * (position - position.floor()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(ours: &[f64], theirs: &[f64]) -> Tally {
        let mut tally = Tally::default();
        ours.iter().for_each(|value| tally.add("speed", PRODUCT, *value));
        theirs.iter().for_each(|value| tally.add("speed", "peer", *value));
        tally
    }

    fn spec(against: Option<&'static str>, target: Target) -> Spec {
        Spec { name: "speed", unit: "1/s", against, target }
    }

    #[test]
    fn median_and_spread_use_sorted_samples() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0]), Some(3.0));
        assert_eq!(median(&[9.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 100.0]), Some(3.0));
        let figure = Figure::from_samples(&[50.0, 90.0, 100.0, 110.0, 1000.0]).expect("there are samples");
        assert_eq!((figure.median, figure.spread_percent), (100.0, 10.0), "outliers are ignored");
        assert_eq!(Figure::from_samples(&[0.0, 0.0]).expect("there are samples").spread_percent, 0.0);
    }

    #[test]
    fn ratio_pairs_samples_by_round() {
        // The machine was half as fast in the second round, for both sides.
        let row = tally(&[100.0, 55.0, 110.0], &[100.0, 50.0, 100.0]);
        let row = row.row(&spec(Some("peer"), Target::RatioAtLeast(1.1))).expect("both sides were measured");
        assert_eq!((row.ours.median, row.theirs.expect("the row has a peer").median), (100.0, 100.0));
        assert!((row.ratio.expect("the row has a ratio") - 1.1).abs() < 1e-9);
    }

    #[test]
    fn targets_include_their_bound() {
        let equal = tally(&[10.0], &[10.0]);
        let is_met = |tally: &Tally, target| {
            tally.row(&spec(Some("peer"), target)).expect("both sides were measured").is_met
        };
        assert_eq!(is_met(&equal, Target::RatioAtLeast(1.0)), Some(true));
        assert_eq!(is_met(&equal, Target::RatioAtLeast(1.01)), Some(false));
        assert_eq!(is_met(&equal, Target::RatioAtMost(1.0)), Some(true));
        assert_eq!(is_met(&equal, Target::RatioAtMost(0.99)), Some(false));
        assert_eq!(is_met(&equal, Target::AtMost(10.0)), Some(true));
        assert_eq!(is_met(&equal, Target::AtMost(9.9)), Some(false));
        assert_eq!(is_met(&equal, Target::AtLeast(10.0)), Some(true));
        assert_eq!(is_met(&equal, Target::AtLeast(10.1)), Some(false));
        assert_eq!(is_met(&equal, Target::None), None);
        // There is no ratio to a peer's zero, so the target is missed.
        assert_eq!(is_met(&tally(&[10.0], &[0.0]), Target::RatioAtLeast(0.1)), Some(false));
    }

    #[test]
    fn unmeasured_side_yields_no_row() {
        assert_eq!(tally(&[1.0], &[]).row(&spec(Some("peer"), Target::None)), None);
        assert_eq!(tally(&[], &[1.0]).row(&spec(Some("peer"), Target::None)), None);
        let row = tally(&[1.0], &[]).row(&spec(None, Target::AtMost(2.0))).expect("a row without a peer");
        assert_eq!((row.ratio, row.is_met), (None, Some(true)));
    }
}
