//! The targets of tests/fuzz as libFuzzer plays them: the same rules, searched by coverage instead of by mutation alone.

#[path = "../../fuzz/parsers/mod.rs"]
mod parsers;

use std::path::Path;
use std::sync::OnceLock;

use parsers::Target;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

/// Valid documents that a search begins with, beside the corpus that is kept.
const SAMPLES: usize = 24;
/// Names the folder that takes the samples.
const SAMPLES_DIR: &str = "SVC_FUZZ_SAMPLES";

/// Holds the input to the rules of the target of this name.
///
/// # Panics
/// When a rule is broken, which libFuzzer reports as a crash; or when there is no such target.
pub fn check(name: &str, input: &[u8]) {
    static TARGET: OnceLock<Target> = OnceLock::new();
    let target = TARGET.get_or_init(|| {
        let target = parsers::targets().into_iter().find(|target| target.name == name);
        let target = target.unwrap_or_else(|| panic!("{name} is not a target of tests/fuzz/parsers"));
        if let Some(dir) = std::env::var_os(SAMPLES_DIR) {
            write_samples(&target, Path::new(&dir));
        }
        target
    });
    if let Err(rule) = (target.holds)(input) {
        panic!("{name}: {rule}\nof {:?}", String::from_utf8_lossy(input));
    }
}

fn write_samples(target: &Target, dir: &Path) {
    let mut runner = TestRunner::deterministic();
    for index in 0..SAMPLES {
        let sample = target.valid.new_tree(&mut runner).expect("a strategy without filters").current();
        (target.accepts)(&sample).unwrap_or_else(|rule| panic!("sample {index}: {rule}"));
        std::fs::write(dir.join(format!("sample-{index}")), sample).expect("the samples' folder takes files");
    }
}
