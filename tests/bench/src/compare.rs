//! Compares the product with an earlier build: both builds' figures, their ratio, and whether each figure has become
//! better or worse.
//!
//! This module does no I/O. Each round measures both builds, so that a disturbance affects both sides of a ratio.

use super::figures::{Figure, PRODUCT, Spec, Tally, median, quantile};

/// A median ratio that differs from 1 by at most this much never counts as a change.
const MIN_CHANGE: f64 = 0.02;
/// Fewer rounds cannot distinguish a change from noise.
const MIN_ROUNDS: usize = 3;

/// Both builds' samples, by round.
#[derive(Debug, Default)]
pub struct Comparison {
    baseline: Tally,
    current: Tally,
}

/// Which of the two builds is being measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Build {
    Baseline,
    Current,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Better,
    Same,
    Worse,
}

/// One figure's values in both builds, and the verdict.
#[derive(Debug, Clone, PartialEq)]
pub struct ComparedRow {
    pub name: &'static str,
    pub unit: &'static str,
    pub baseline: Figure,
    pub current: Figure,
    /// The median, over the rounds, of the ratio of the current build to the baseline.
    pub ratio: f64,
    pub verdict: Verdict,
}

impl Comparison {
    /// Adds one round's samples.
    pub fn add(&mut self, build: Build, specs: &[Spec], round: &Tally) {
        let tally = match build {
            Build::Baseline => &mut self.baseline,
            Build::Current => &mut self.current,
        };
        for name in names(specs) {
            round.samples_of(name, PRODUCT).iter().for_each(|value| tally.add(name, PRODUCT, *value));
        }
    }

    /// Compares the product's figures. A figure that was not measured in both builds, or that was always zero in the
    /// baseline, has no row.
    pub fn rows(&self, specs: &[Spec]) -> Vec<ComparedRow> {
        let unit = |name| specs.iter().find(|spec| spec.name == name).map_or("", |spec| spec.unit);
        names(specs).into_iter().filter_map(|name| self.row(name, unit(name))).collect()
    }

    fn row(&self, name: &'static str, unit: &'static str) -> Option<ComparedRow> {
        let (baseline, current) =
            (self.baseline.samples_of(name, PRODUCT), self.current.samples_of(name, PRODUCT));
        let ratios: Vec<f64> = current
            .iter()
            .zip(baseline)
            .filter(|(_, old)| **old != 0.0)
            .map(|(new, old)| new / old)
            .collect();
        Some(ComparedRow {
            name,
            unit,
            baseline: Figure::from_samples(baseline)?,
            current: Figure::from_samples(current)?,
            ratio: median(&ratios)?,
            verdict: classify_ratios(&ratios, is_higher_better(unit))?,
        })
    }
}

/// Returns each name once, in table order.
fn names(specs: &[Spec]) -> Vec<&'static str> {
    let mut names: Vec<&'static str> = Vec::new();
    for spec in specs {
        if !names.contains(&spec.name) {
            names.push(spec.name);
        }
    }
    names
}

/// Whether a higher value is better, as for rates and the fairness between apps. For times, sizes and CPU time per
/// second, a lower value is better.
fn is_higher_better(unit: &str) -> bool {
    matches!(unit, "1/s" | "MiB/s" | "ratio")
}

/// Classifies a figure. It has changed if nearly all of its ratios are on one side of 1, and their median differs from
/// 1 by more than [`MIN_CHANGE`] and by more than twice their spread. Returns `None` if there are no ratios.
fn classify_ratios(ratios: &[f64], is_higher_better: bool) -> Option<Verdict> {
    let (low, high) = (quantile(ratios, 0.1)?, quantile(ratios, 0.9)?);
    let change = median(ratios)? - 1.0;
    let spread = (quantile(ratios, 0.75)? - quantile(ratios, 0.25)?) / 2.0;
    let is_beyond_noise = ratios.len() >= MIN_ROUNDS && change.abs() > MIN_CHANGE.max(2.0 * spread);
    let (is_lower, is_higher) = (is_beyond_noise && high < 1.0, is_beyond_noise && low > 1.0);
    Some(match (is_lower, is_higher) {
        (true, _) if is_higher_better => Verdict::Worse,
        (true, _) => Verdict::Better,
        (_, true) if is_higher_better => Verdict::Better,
        (_, true) => Verdict::Worse,
        _ => Verdict::Same,
    })
}

#[cfg(test)]
mod tests {
    use super::super::figures::Target;
    use super::*;

    const RATE: Spec = Spec { name: "rate", unit: "1/s", against: Some("peer"), target: Target::None };
    const MEMORY: Spec = Spec { name: "memory", unit: "MiB", against: None, target: Target::None };

    fn comparison(spec: &Spec, baseline: &[f64], current: &[f64]) -> Comparison {
        let mut comparison = Comparison::default();
        for (build, samples) in [(Build::Baseline, baseline), (Build::Current, current)] {
            for sample in samples {
                let mut round = Tally::default();
                round.add(spec.name, PRODUCT, *sample);
                round.add(spec.name, "peer", 1.0);
                comparison.add(build, &[*spec, *spec], &round);
            }
        }
        comparison
    }

    fn verdict(spec: &Spec, baseline: &[f64], current: &[f64]) -> Verdict {
        let rows = comparison(spec, baseline, current).rows(&[*spec, *spec]);
        assert_eq!(rows.len(), 1, "a figure against two peers is compared once: {rows:?}");
        rows[0].verdict
    }

    #[test]
    fn lower_rate_and_higher_memory_are_worse() {
        let (less, more) = ([90.0, 91.0, 92.0], [100.0, 101.0, 99.0]);
        assert_eq!(verdict(&RATE, &more, &less), Verdict::Worse);
        assert_eq!(verdict(&RATE, &less, &more), Verdict::Better);
        assert_eq!(verdict(&MEMORY, &more, &less), Verdict::Better);
        assert_eq!(verdict(&MEMORY, &less, &more), Verdict::Worse);
    }

    #[test]
    fn change_within_noise_counts_as_same() {
        let baseline = [100.0; 5];
        assert_eq!(verdict(&RATE, &baseline, &[80.0, 101.0, 95.0, 110.0, 102.0]), Verdict::Same, "noise");
        assert_eq!(verdict(&RATE, &baseline, &[99.0; 5]), Verdict::Same, "a steady difference of 1%");
        assert_eq!(verdict(&RATE, &baseline, &[97.0; 5]), Verdict::Worse);
        assert_eq!(verdict(&RATE, &[100.0; 2], &[80.0; 2]), Verdict::Same, "too few rounds");
        let with_outlier = [97.0, 96.0, 97.0, 110.0, 95.0, 96.0, 97.0, 97.0, 96.0];
        assert_eq!(verdict(&RATE, &[100.0; 9], &with_outlier), Verdict::Worse, "one outlier of nine");
    }

    #[test]
    fn ratio_pairs_samples_by_round() {
        // The machine was half as fast in the second round, for both builds.
        let rows = comparison(&RATE, &[100.0, 50.0, 100.0], &[110.0, 55.0, 110.0]).rows(&[RATE]);
        assert!((rows[0].ratio - 1.1).abs() < 1e-9, "{rows:?}");
    }

    #[test]
    fn unmeasured_figure_has_no_row() {
        assert_eq!(comparison(&RATE, &[1.0], &[]).rows(&[RATE]), []);
        assert_eq!(comparison(&RATE, &[0.0], &[0.0]).rows(&[RATE]), []);
    }
}
